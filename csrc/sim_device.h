// SPDX-License-Identifier: Apache-2.0
// A device for deterministic simulation: real memory is copied, but a seed decides when, in which order, and
// what fails. It also watches the engine: whatever breaks the Device contract is written down as a violation.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device.h"

namespace pega {

class SimDevice : public Device {
 public:
  // A chunk and an event take up to `max_delay_steps` polls. `fail_rate`, `break_rate`: chance of a chunk to
  // fail, and to fail and leave its direction broken for good. Throws std::invalid_argument.
  SimDevice(uint64_t seed, uint32_t max_delay_steps, double fail_rate, double break_rate);

  const char* name() const override { return "sim"; }
  DeviceLimits limits() const override;
  EventId record_event(uint64_t stream) override;
  Progress query_event(EventId event) override;
  void release_event(EventId event) override;
  Ticket submit(const Chunk& chunk) override;
  Progress poll(Ticket ticket) override;
  std::string last_error() const override { return error_; }
  bool healthy(Direction direction) const override { return !broken_[static_cast<int>(direction)]; }
  void relax(std::chrono::microseconds) override {}

  uint64_t chunks() const { return chunks_; }
  uint32_t max_grid() const { return max_grid_; }
  uint64_t live_events() const { return events_.size(); }
  std::vector<EventId> unready_events() const;
  const std::array<uint64_t, kDirections>& outstanding_bytes() const { return outstanding_; }
  const std::array<uint64_t, kDirections>& max_outstanding_bytes() const { return max_outstanding_; }
  // What copies may still read or write.
  std::vector<Range> touching() const;
  const std::vector<std::string>& violations() const { return violations_; }

 private:
  struct Flight {
    Chunk chunk;
    std::vector<Range> left;  // pieces not copied yet
    uint32_t polls_left;
    bool fails, breaks;
  };

  uint64_t random(uint64_t bound);  // 0 .. bound-1
  bool chance(double probability);
  void advance();
  void copy_one(Flight* flight);
  void violation(const std::string& what) { violations_.push_back(what); }

  uint64_t state_;
  const uint32_t max_delay_;
  const double fail_rate_, break_rate_;
  std::map<Ticket, Flight> flights_;    // ordered: iteration must not depend on addresses or hashes
  std::map<EventId, uint32_t> events_;  // queries until ready
  uint64_t next_id_ = 1;
  std::array<bool, kDirections> broken_{};
  std::string error_;
  uint64_t chunks_ = 0;
  uint32_t max_grid_ = 0;
  std::array<uint64_t, kDirections> outstanding_{}, max_outstanding_{};
  std::vector<std::string> violations_;
};

}  // namespace pega
