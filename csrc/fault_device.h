// SPDX-License-Identifier: Apache-2.0
// A device that misbehaves on purpose, around one that does not: for tests of what the engine and vLLM make
// of it. Only in builds with PEGA_FAULTS.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"

namespace pega {

struct ChunkFault {
  enum class Action : uint8_t {
    kFail,       // the chunk is not copied at all and fails
    kDelay,      // it lands, and says so late
    kKillThread  // it lands, but asking for it ends the engine's thread
  };
  Action action;
  std::array<bool, kDirections> directions;
  uint64_t nth;  // of these directions' chunks, from 1; 0: each with `probability`
  double probability;
  uint64_t seed;
  std::chrono::microseconds delay;
};

class FaultDevice : public Device {
 public:
  FaultDevice(std::shared_ptr<Device> device, std::vector<ChunkFault> faults);

  // From now on these faults, counted from here. From any thread.
  void arm(std::vector<ChunkFault> faults);
  uint64_t fired();  // faults so far, of all kinds

  const char* name() const override { return device_->name(); }
  DeviceLimits limits() const override { return device_->limits(); }
  EventId record_event(uint64_t stream) override { return device_->record_event(stream); }
  Progress query_event(EventId event) override { return device_->query_event(event); }
  void release_event(EventId event) override { device_->release_event(event); }
  void prepare(const std::vector<Range>& ranges, Prepared* prepared) override {
    device_->prepare(ranges, prepared);
  }
  Ticket submit(const Chunk& chunk) override;
  Progress poll(Ticket ticket) override;
  std::string last_error() const override { return ours_ ? "injected fault" : device_->last_error(); }
  bool healthy(Direction direction) const override { return device_->healthy(direction); }
  void relax(std::chrono::microseconds limit) override { device_->relax(limit); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Armed {
    ChunkFault fault;
    uint64_t seen;
    uint64_t random;  // state of its generator
  };
  struct Flight {
    Ticket inner;  // 0: never given to the device, or retired there
    Progress progress;
    Clock::time_point due;
    bool fails, kills;
  };

  static bool fires(Armed* armed, Direction direction);

  const std::shared_ptr<Device> device_;
  std::mutex mutex_;  // of armed_ and fired_
  std::vector<Armed> armed_;
  uint64_t fired_ = 0;
  // The engine thread's.
  std::map<Ticket, Flight> flights_;
  Ticket next_ = 1;
  bool ours_ = false;  // the latest failure
};

}  // namespace pega
