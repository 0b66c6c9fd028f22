// SPDX-License-Identifier: Apache-2.0
// The transfer engine: takes jobs from any thread, runs two lanes on one thread (or step by step, for tests).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "device.h"
#include "events.h"
#include "job.h"
#include "lane.h"
#include "planner.h"
#include "policy.h"
#include "slot_use.h"

namespace pega {

struct EngineOptions {
  Objective objective = Objective::kBalanced;
  std::array<PolicySpec, kDirections> policy;
  bool threaded = true;
  bool manual_clock = false;  // stepped engines only: time passes by step(advance_s) alone
  size_t queue_limit = 4096;  // jobs taken and not ended
};

struct Submission {
  uint64_t job_id = 0;
  Direction direction = Direction::kLoad;
  const void* moves = nullptr;  // `count` rows of Move, any alignment
  size_t count = 0;
  const void* keys = nullptr;  // count x key_bytes
  uint32_t key_bytes = 0;
  EventId event = 0;
  const PolicySpec* policy = nullptr;    // nullptr: the engine's for this direction
  const Objective* objective = nullptr;  // nullptr: the engine's
  double timeout_s = 30;
};

// Tickets and inflight slots belong to one engine: a device that served two would mix them up.
struct DeviceClaim {
  explicit DeviceClaim(
      std::shared_ptr<Device> device);  // throws std::invalid_argument if it serves one already
  ~DeviceClaim();
  DeviceClaim(const DeviceClaim&) = delete;
  const std::shared_ptr<Device> device;
};

// submit, cancel, poll, pending and the events' functions may be called from any thread; step, drain and
// close by one at a time. Nothing of a job is touched by the caller's thread while it is under way, and the
// reverse.
class TransferEngine {
 public:
  TransferEngine(std::shared_ptr<Device> device, Geometry geometry, DeviceProfile profile,
                 EngineOptions options);
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // Ends the engine when everything has drained within a grace period. Otherwise it leaks the engine, its
  // thread, the device and the pool: memory that a copy may still touch must stay.
  static void dispose(TransferEngine* engine);

  EventId record_event(uint64_t stream);
  void release_event(EventId event);  // throws std::invalid_argument for an event not recorded here

  // False: the queue is full. Throws std::invalid_argument or, closed, std::runtime_error.
  bool submit(const Submission& submission);
  bool cancel(uint64_t job_id);
  std::vector<JobResult> poll();
  size_t pending();

  bool step(double advance_s);  // throws std::logic_error on a threaded engine
  bool drain(double timeout_s);
  bool close(double timeout_s);

 private:
  ~TransferEngine() = default;  // by dispose() alone
  double now() const;
  bool round();
  void take_inbox();
  void run();
  void work();
  void revive();  // under mutex_
  void wake();
  size_t unfinished() const { return jobs_.size() - outbox_.size(); }  // under mutex_

  const DeviceClaim claim_;
  Device* const device_;
  const Geometry geometry_;
  const DeviceProfile profile_;
  const EngineOptions options_;

  // The engine thread's.
  Events events_;
  Lane load_, save_;
  uint64_t steps_ = 0;
  std::vector<Job*> taken_, ended_;
  std::vector<EventId> dropped_;

  // Shared, under mutex_; the atomics let both sides look without it.
  std::mutex mutex_;
  std::condition_variable wakeup_, ended_cv_;
  std::unordered_map<uint64_t, std::unique_ptr<Job>> jobs_;  // taken and not yet returned by poll()
  std::vector<std::unique_ptr<Job>> spare_;
  std::vector<Job*> inbox_, outbox_;
  std::unordered_set<EventId> live_events_;  // recorded and not released by the caller
  std::vector<EventId> released_;
  SlotUse slot_use_;
  bool closed_ = false, stop_ = false, asleep_ = false;
  std::string died_of_;            // what ended the thread
  std::atomic<bool> dead_{false};  // it has ended by an exception and nobody has looked yet
  std::atomic<bool> has_inbox_{false}, has_outbox_{false}, has_cancels_{false};
  std::atomic<double> manual_now_{0};
  std::thread thread_;
};

}  // namespace pega
