// SPDX-License-Identifier: Apache-2.0
// One transfer job: what was handed over, how far it has come, how it ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "device.h"
#include "planner.h"
#include "types.h"

namespace pega {

enum class Status : uint8_t { kDone, kFailed, kCancelled, kTimeout };
const char* to_string(Status s);

struct JobResult {
  uint64_t job_id = 0;
  Direction direction = Direction::kLoad;
  Status status = Status::kDone;
  std::string error;
  uint64_t bytes = 0;   // planned
  uint64_t ranges = 0;  // after merging
  uint64_t chunks = 0;  // submitted
  std::string backend;  // empty: it ended before it was planned
  std::string reason;
  double queue_s = 0;                   // submit -> first chunk submitted (or the end, if none was)
  double transfer_s = 0;                // first chunk submitted -> last byte landed
  uint64_t peak_outstanding_bytes = 0;  // of its lane, right after one of its chunks was submitted
};

//   QUEUED -> WAITING (for its event) -> SUBMITTING -> INFLIGHT (all submitted) -> ended
// Failure, cancel and timeout lead from anywhere to DRAINING (nothing more is submitted) and then to the end.
enum class JobState : uint8_t { kQueued, kWaiting, kSubmitting, kInflight, kDraining };

struct Job {
  // Handed over by the caller; the engine thread only reads them.
  std::vector<Move> moves;
  std::vector<uint8_t> keys;  // moves.size() x key_bytes
  uint32_t key_bytes = 0;
  EventId event = 0;
  PolicySpec policy;
  Objective objective = Objective::kBalanced;
  double submitted = 0, deadline = 0;  // seconds on the engine's clock
  std::atomic<bool> cancel{false};     // set by any thread

  // The engine thread's.
  JobState state = JobState::kQueued;
  std::vector<uint32_t> order;  // of moves, by slot: the job's bytes as one stream
  std::vector<Range> ranges;
  Prepared prepared;
  TransferDecision decision;
  uint64_t range_bytes = 0;      // of every range, if they are all alike
  size_t next_range = 0;         // first range not wholly submitted
  uint64_t cut = 0;              // bytes of it that were
  uint64_t submitted_bytes = 0;  // position in the stream
  uint32_t outstanding = 0;      // chunks
  double started = -1;           // first chunk submitted
  double queued = 0;             // until the lane took it up
  double paced_from = 0;         // when its spread began: time spent in the queue counts
  // Slots of `order` whose writing was begun, and whose bytes have all landed; with their ends in the stream.
  size_t begun = 0, landed = 0;
  uint64_t begun_end = 0, landed_end = 0;
  std::vector<uint64_t> generations;  // of a load's slots, when keys were given

  bool ended = false;  // under the engine's mutex
  JobResult result;

  // Ready for the next hand-over; keeps the memory of its vectors.
  void reset() {
    keys.clear();
    key_bytes = 0;
    event = 0;
    cancel.store(false, std::memory_order_relaxed);
    state = JobState::kQueued;
    order.clear();
    ranges.clear();
    prepared.clear();
    decision = {};
    next_range = begun = landed = 0;
    range_bytes = cut = submitted_bytes = begun_end = landed_end = 0;
    outstanding = 0;
    started = -1;
    generations.clear();
    ended = false;
    result = {};
  }
};

}  // namespace pega
