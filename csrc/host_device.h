// SPDX-License-Identifier: Apache-2.0
// A device whose memory is host memory: CPU vLLM, development and CI. The same policies, by worker threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device.h"

namespace pega {

class HostDevice : public Device {
 public:
  explicit HostDevice(uint32_t workers);  // throws std::invalid_argument unless 1 to 64
  ~HostDevice() override;

  const char* name() const override { return "host"; }
  DeviceLimits limits() const override;
  EventId record_event(uint64_t) override { return 0; }  // CPU work is done when the call returns
  Progress query_event(EventId) override { return Progress::kDone; }
  void release_event(EventId) override {}
  Ticket submit(const Chunk& chunk) override;
  Progress poll(Ticket ticket) override;
  std::string last_error() const override { return ""; }  // copies in one address space do not fail
  bool healthy(Direction) const override { return true; }
  void relax(std::chrono::microseconds limit) override;

 private:
  // One per direction and inflight slot, so nothing is allocated per chunk.
  struct Work {
    Chunk chunk;
    uint32_t parts = 0;
    std::atomic<uint32_t> parts_left{0};
    uint64_t serial = 0;  // of the ticket
    std::vector<uint8_t> stage;
  };
  struct Task {
    Work* work;
    uint32_t part;
  };

  void run();
  static void copy_part(const Chunk& chunk, uint32_t part, uint32_t parts);
  static void copy_staged(Work* work);

  std::unique_ptr<Work[]> work_;
  std::mutex mutex_;
  std::condition_variable tasks_cv_, finished_cv_;
  std::deque<Task> tasks_;
  uint64_t finished_ = 0;  // chunks, under mutex_
  uint64_t seen_ = 0;      // of finished_, by relax(): the engine thread's
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pega
