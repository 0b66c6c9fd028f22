// SPDX-License-Identifier: Apache-2.0
#include "engine.h"

#include <sys/prctl.h>

#include <cmath>
#include <cstring>
#include <stdexcept>

namespace pega {
namespace {

using Clock = std::chrono::steady_clock;

// How long the thread leaves the CPU: while jobs only wait for the compute stream (a decode step takes
// milliseconds, so this adds well under a percent), and while a host device copies.
constexpr std::chrono::microseconds kEventSleep{20};
constexpr std::chrono::microseconds kRelax{200};
// How long dispose() waits for what is in flight before it leaks it.
constexpr double kDisposeGrace_s = 5;
// Job objects kept for reuse, so that the hot path does not allocate; more than a step ever hands over.
constexpr size_t kSpareJobs = 64;

std::chrono::duration<double> seconds(double s) { return std::chrono::duration<double>(std::min(s, 1e9)); }

struct DevicesInUse {
  std::mutex mutex;
  std::unordered_set<const Device*> set;
};
DevicesInUse& devices_in_use() {
  static auto* devices = new DevicesInUse;  // never destroyed: leaked engines outlive static objects
  return *devices;
}

}  // namespace

DeviceClaim::DeviceClaim(std::shared_ptr<Device> d) : device(std::move(d)) {
  if (device == nullptr) throw std::invalid_argument("no device given");
  std::lock_guard<std::mutex> lock(devices_in_use().mutex);
  if (!devices_in_use().set.insert(device.get()).second)
    throw std::invalid_argument("this device already serves an engine; make one device per engine");
}

DeviceClaim::~DeviceClaim() {
  std::lock_guard<std::mutex> lock(devices_in_use().mutex);
  devices_in_use().set.erase(device.get());
}

TransferEngine::TransferEngine(std::shared_ptr<Device> device, Geometry geometry, DeviceProfile profile,
                               EngineOptions options)
    : claim_(std::move(device)),
      device_(claim_.device.get()),
      geometry_(std::move(geometry)),
      profile_(std::move(profile)),
      options_(options),
      events_(*device_),
      load_(Direction::kLoad, *device_, geometry_, profile_, events_),
      save_(Direction::kSave, *device_, geometry_, profile_, events_),
      slot_use_(geometry_) {
  if (options_.threaded) thread_ = std::thread([this] { run(); });
}

void TransferEngine::dispose(TransferEngine* engine) {
  if (engine->close(kDisposeGrace_s)) delete engine;
}

EventId TransferEngine::record_event(uint64_t stream) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("the engine is closed");
  }
  const EventId event = device_->record_event(stream);  // a driver may make us wait here: without the mutex
  if (event != 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_events_.insert(event);
  }
  return event;
}

void TransferEngine::release_event(EventId event) {
  if (event == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (live_events_.erase(event) == 0) {
    if (closed_) return;
    throw std::invalid_argument("event " + std::to_string(event) +
                                " was not recorded here, or is released already");
  }
  released_.push_back(event);
  has_inbox_.store(true, std::memory_order_release);  // no wake-up: there is no hurry
}

bool TransferEngine::submit(const Submission& s) {
  if (!(s.timeout_s > 0))
    throw std::invalid_argument("timeout_s is " + std::to_string(s.timeout_s) + "; must be > 0");
  if (s.key_bytes > kMaxKeyBytes)
    throw std::invalid_argument("keys of " + std::to_string(s.key_bytes) + " bytes; at most 32 are allowed");
  if (s.count > UINT32_MAX) throw std::invalid_argument("more than 2^32 - 1 moves in one job");

  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) throw std::runtime_error("the engine is closed");
  if (jobs_.count(s.job_id) != 0)
    throw std::invalid_argument("job id " + std::to_string(s.job_id) +
                                " is still in flight or not yet polled");
  if (s.event != 0 && live_events_.count(s.event) == 0)
    throw std::invalid_argument("event " + std::to_string(s.event) +
                                " was not recorded here, or is released already");
  if (unfinished() >= options_.queue_limit) return false;

  std::unique_ptr<Job> job;
  if (spare_.empty()) {
    job = std::make_unique<Job>();
  } else {
    job = std::move(spare_.back());
    spare_.pop_back();
  }
  job->moves.resize(s.count);
  if (s.count != 0) std::memcpy(job->moves.data(), s.moves, s.count * sizeof(Move));
  const auto* keys = static_cast<const uint8_t*>(s.keys);
  job->keys.assign(keys, keys + s.count * s.key_bytes);
  try {
    geometry_.check(job->moves.data(), s.count);
    slot_use_.acquire(s.direction, job->moves.data(), s.count);
  } catch (...) {
    spare_.push_back(std::move(job));
    throw;
  }
  job->key_bytes = s.key_bytes;
  job->event = s.event;
  job->policy = s.policy ? *s.policy : options_.policy[static_cast<int>(s.direction)];
  job->objective = s.objective ? *s.objective : options_.objective;
  job->submitted = now();
  job->deadline = job->submitted + s.timeout_s;
  job->result.job_id = s.job_id;
  job->result.direction = s.direction;
  inbox_.push_back(job.get());
  jobs_.emplace(s.job_id, std::move(job));
  has_inbox_.store(true, std::memory_order_release);
  wake();
  return true;
}

bool TransferEngine::cancel(uint64_t job_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = jobs_.find(job_id);
  if (it == jobs_.end() || it->second->ended) return false;
  it->second->cancel.store(true, std::memory_order_relaxed);
  has_cancels_.store(true, std::memory_order_release);
  wake();
  return true;
}

std::vector<JobResult> TransferEngine::poll() {
  if (dead_.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(mutex_);
    revive();
  }
  std::vector<JobResult> results;
  if (!has_outbox_.load(std::memory_order_acquire)) return results;
  std::lock_guard<std::mutex> lock(mutex_);
  has_outbox_.store(false, std::memory_order_relaxed);
  results.reserve(outbox_.size());
  for (Job* job : outbox_) {
    const auto it = jobs_.find(job->result.job_id);
    results.push_back(std::move(job->result));
    slot_use_.release(results.back().direction, job->moves.data(), job->moves.size());
    if (spare_.size() < kSpareJobs) {
      job->reset();
      spare_.push_back(std::move(it->second));
    }
    jobs_.erase(it);
  }
  outbox_.clear();
  return results;
}

size_t TransferEngine::pending() {
  std::lock_guard<std::mutex> lock(mutex_);
  return jobs_.size();
}

bool TransferEngine::step(double advance_s) {
  if (options_.threaded) throw std::logic_error("step() is for engines made with threaded=False");
  if (!(advance_s >= 0)) throw std::invalid_argument("advance_s must be >= 0");
  manual_now_.store(manual_now_.load() + advance_s);
  return round();
}

// Waits until nothing is unfinished. A stepped engine runs its rounds here.
bool TransferEngine::drain(double timeout_s) {
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds(timeout_s));
  std::unique_lock<std::mutex> lock(mutex_);
  while (options_.threaded) {
    ended_cv_.wait_until(lock, deadline, [this] { return unfinished() == 0 || dead_; });
    if (unfinished() == 0) return true;
    if (Clock::now() >= deadline) return false;
    revive();
  }
  while (unfinished() != 0) {
    if (Clock::now() >= deadline) return false;
    lock.unlock();
    if (!round()) device_->relax(kRelax);
    lock.lock();
  }
  return true;
}

bool TransferEngine::close(double timeout_s) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    for (auto& [id, job] : jobs_) job->cancel.store(true, std::memory_order_relaxed);
    has_cancels_.store(true, std::memory_order_release);
    wake();
  }
  if (!drain(timeout_s)) return false;
  if (thread_.joinable()) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      wake();
    }
    thread_.join();
  }
  take_inbox();  // events released since the last round
  for (const EventId event : live_events_) events_.release(event);
  live_events_.clear();
  return true;
}

double TransferEngine::now() const {
  if (options_.manual_clock) return manual_now_.load();
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Under mutex_. Skips the system call while the thread is awake anyway.
void TransferEngine::wake() {
  if (asleep_) wakeup_.notify_one();
}

void TransferEngine::take_inbox() {
  if (!has_inbox_.load(std::memory_order_acquire)) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    has_inbox_.store(false, std::memory_order_relaxed);
    taken_.swap(inbox_);
    dropped_.swap(released_);
  }
  for (Job* job : taken_) (job->result.direction == Direction::kLoad ? load_ : save_).take(job);
  // After the jobs: a job taken above may have been the first to share one of these events.
  for (const EventId event : dropped_) events_.release(event);
  taken_.clear();
  dropped_.clear();
}

// One round of the state machine. Loads come first: someone waits for them.
bool TransferEngine::round() {
  const bool cancels = has_cancels_.exchange(false, std::memory_order_acq_rel);
  take_inbox();
  if (cancels) {
    load_.apply_cancels();
    save_.apply_cancels();
  }
  ++steps_;
  const double time = now();
  bool moved = load_.step(time, steps_, &ended_);
  moved = save_.step(time, steps_, &ended_) || moved;
  if (!ended_.empty()) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Job* job : ended_) {
      job->ended = true;
      outbox_.push_back(job);
    }
    ended_.clear();
    has_outbox_.store(true, std::memory_order_release);
    if (unfinished() == 0) ended_cv_.notify_all();
  }
  return moved;
}

// An exception (no memory, a device that broke its contract) ends the thread, not the process.
void TransferEngine::run() {
  prctl(PR_SET_NAME, "pega-transfer");
  prctl(PR_SET_TIMERSLACK, 1000);  // nanoseconds; the default of 50 us would triple kEventSleep
  try {
    work();
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    died_of_ = error.what();
    dead_.store(true, std::memory_order_release);
    ended_cv_.notify_all();
  }
}

// The watch of the thread: whoever asks for results, or waits for them, fails the jobs that a dead thread had
// taken and starts the next. That one waits for their chunks in flight, reports them, and goes on with the
// rest.
void TransferEngine::revive() {
  if (!dead_.load(std::memory_order_acquire)) return;
  if (thread_.joinable()) thread_.join();
  const std::string why = "the engine's thread ended: " + died_of_;
  load_.fail_all(why);
  save_.fail_all(why);
  thread_ = std::thread([this] { run(); });
  dead_.store(false, std::memory_order_release);
}

void TransferEngine::work() {
  for (;;) {
    if (round()) continue;
    if (load_.in_flight() || save_.in_flight()) {
      device_->relax(kRelax);
    } else if (!load_.idle() || !save_.idle()) {
      std::this_thread::sleep_for(kEventSleep);
    } else {
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_ = true;
      wakeup_.wait(lock, [this] { return stop_ || !inbox_.empty() || has_cancels_.load(); });
      asleep_ = false;
      if (stop_ && inbox_.empty()) return;
    }
  }
}

}  // namespace pega
