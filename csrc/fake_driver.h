// SPDX-License-Identifier: Apache-2.0
// A CUDA driver made of host memory, for tests: streams run later and in an order that a seed decides, every
// access is checked, and any call can be made to fail.
//
// Address spaces are kept apart as a real machine may keep them: the GPU sees host memory under other
// addresses than the host does, and device memory under addresses that mean nothing to the host.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace pega {

class FakeDriver {
 public:
  // Each call runs 0 to `eagerness` queued operations. `writes_words`: whether streams can write a word of
  // memory.
  FakeDriver(uint64_t seed, uint32_t eagerness, bool writes_words = true);
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  // Valid as long as this object.
  std::shared_ptr<const CudaDriver> table() const { return table_; }

  // The n-th call from now (1 = the next) returns `result` and does nothing. A sticky result ends the
  // context.
  void fail(uint64_t nth, CuResult result) { fail_from_ = fail_to_ = calls_ + nth, failure_ = result; }
  // So does every call after it, but for cuStreamSynchronize.
  void fail_from(uint64_t nth, CuResult result) { fail(nth, result), fail_to_ = UINT64_MAX; }
  uint64_t calls() const { return calls_; }
  std::string last_failed() const { return last_failed_; }
  // Objects that were created and not destroyed, contexts included; registrations too.
  uint64_t live() const;
  // What no driver would forgive: accesses outside of what is allocated, unknown handles.
  const std::vector<std::string>& violations() const { return violations_; }
  // The most copies of one direction that a copy engine ever found ready, on all streams: those that wait for
  // nothing but one another.
  uint64_t most_copies_ready() const { return most_copies_ready_; }
  // Runs all that is queued.
  void settle();

  // Device memory for a test's tensors; not a call.
  CuAddress allocate(uint64_t bytes);
  // Host pointer behind a device address; throws std::out_of_range if [address, address + bytes) is not
  // allocated.
  char* resolve(CuAddress address, uint64_t bytes);

 private:
  struct Event {
    // Whether what the last cuEventRecord captured has ended. Who waits keeps the record that it found.
    std::shared_ptr<bool> latest = std::make_shared<bool>(true);
  };
  struct Work {
    enum Kind { kCopy, kKernel, kRecord, kWait, kWrite } kind;
    std::shared_ptr<bool> record = nullptr;  // record, wait
    uint64_t count = 0;                      // the word to write
    CuAddress device = 0;                    // copy, write
    char* host = nullptr;
    uint64_t bytes = 0;
    bool to_host = false;
    CuAddress pieces = 0;  // kernel
    uint32_t piece_count = 0, batch = 0, aligned = 0;
    uint64_t base = 0;
  };
  struct Stream {
    std::deque<Work> queue;
  };

  void fill_table(bool writes_words);
  CuResult enter(const char* name);
  CuResult violate(const std::string& what);
  CuResult enqueue(CuStream stream, Work work);
  bool run_one(Stream& stream);
  void run_some();
  void count_copies_ready();
  void run_all();
  CuAddress allocate_device(uint64_t bytes);
  void run_kernel(const Work& work);
  char* seen_by_gpu(CuAddress address, uint64_t bytes) const;  // null: not allocated
  bool page_locked(uint64_t host, uint64_t bytes) const;

  std::mutex mutex_;  // the driver's lock: one call at a time
  std::shared_ptr<CudaDriver> table_;
  std::mt19937_64 random_;
  uint32_t eagerness_;
  uint64_t calls_ = 0, fail_from_ = UINT64_MAX, fail_to_ = 0;
  CuResult failure_ = 0, broken_ = 0;
  uint64_t most_copies_ready_ = 0;
  std::string last_failed_;
  std::vector<std::string> violations_;
  int context_ = 0, retained_ = 0, modules_ = 0;
  CuContext current_ = nullptr;
  std::vector<CuContext> context_stack_;
  std::map<CuStream, std::unique_ptr<Stream>> streams_;
  std::map<CuEvent, std::unique_ptr<Event>> events_;
  std::map<uint64_t, std::unique_ptr<char[]>> owned_;  // by host address: device and pinned memory
  std::map<CuAddress, uint64_t> device_memory_;        // device address -> bytes
  std::map<uint64_t, uint64_t> test_memory_;           // of device_memory_, what allocate() made
  std::map<uint64_t, uint64_t> pinned_;                // host address -> bytes, allocated
  std::map<uint64_t, uint64_t> registered_;            // host address -> bytes, registered
};

}  // namespace pega
