// SPDX-License-Identifier: Apache-2.0
// One direction of the engine: its queue, its jobs under way and its chunks in flight. Single-threaded.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "device.h"
#include "events.h"
#include "job.h"
#include "planner.h"
#include "policy.h"

namespace pega {

class Lane {
 public:
  Lane(Direction direction, Device& device, const Geometry& geometry, const DeviceProfile& profile,
       Events& events);

  void take(Job* job);

  // One round: what has landed, what must stop, what may start. Jobs that ended are appended to `ended`.
  // `step` counts the engine's rounds. True if anything moved.
  bool step(double now, uint64_t step, std::vector<Job*>* ended);

  // Stops every job whose cancel flag is set.
  void apply_cancels();

  // Stops every job.
  void fail_all(const std::string& why);

  bool in_flight() const { return busy_ != 0; }
  bool idle() const { return queue_.empty() && active_.empty(); }

 private:
  // A place for one chunk; the index is the chunk's inflight_slot.
  struct Slot {
    Job* job = nullptr;  // nullptr: free
    Ticket ticket = 0;
    uint64_t bytes = 0;
    uint64_t begin = 0;             // position of its first byte in the job's stream
    const Range* ranges = nullptr;  // in the job or, if some are parts of the job's, in `parts`
    size_t count = 0;
    std::vector<Range> parts;
  };

  void poll_chunks();
  void stop_late_and_broken(double now);
  void stop(Job* job, Status status, std::string error);
  void admit(double now);
  void wait_for_events(double now, uint64_t step);
  bool start(Job* job);
  size_t submit_next(double now);  // ranges submitted
  bool due(const Job& job, double now) const;
  Slot* free_slot(const Job& job);
  bool within_bound(const Job& job, uint64_t bytes) const;
  void pack(Job* job, Slot* slot);
  uint64_t pack_parts(Job* job, Slot* slot, uint64_t bytes, uint64_t limit);
  uint64_t chunk_limit(const Job& job) const;
  void begin_slots(Job* job);
  void land_slots(Job* job);
  void collect_ended(double now, std::vector<Job*>* ended);
  void finish(Job* job, double now);
  SlotEntry& entry(const Job& job, size_t i) const;
  const uint8_t* key(const Job& job, size_t i) const {
    return job.keys.data() + job.order[i] * job.key_bytes;
  }

  const Direction direction_;
  Device& device_;
  const Geometry& geometry_;
  const DeviceProfile& profile_;
  Events& events_;
  const DeviceLimits limits_;
  Planner planner_;
  std::deque<Job*> queue_;
  std::vector<Job*> active_;
  size_t turn_ = 0;  // whose turn it is to submit
  std::vector<Slot> slots_;
  uint32_t busy_ = 0;  // slots in use
  uint64_t outstanding_bytes_ = 0;
  double next_deadline_ = std::numeric_limits<double>::infinity();
  bool stopping_ = false;  // some queued job was stopped and waits to be collected
  bool moved_ = false;
};

}  // namespace pega
