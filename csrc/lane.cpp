// SPDX-License-Identifier: Apache-2.0
#include "lane.h"

#include <algorithm>

namespace pega {
namespace {

// Jobs that share the lane chunk by chunk, so that a small one does not wait behind gigabytes. More would
// only make all of them late together.
constexpr size_t kSharingJobs = 4;

// Cuts inside a range fall on multiples of this, so that both pieces keep the range's alignment (a few cache
// lines, and far above the 16 bytes that kernels care about).
constexpr uint64_t kCutBytes = 512;

// Ranges that one lane submits before the other has its turn: some 2 us.
constexpr size_t kRangesPerRound = 512;

// A first or last chunk is not made smaller than this: it takes PCIe 5 as long (5 us) as submitting it takes
// the host.
constexpr uint64_t kLeastOpenChunk = 256 << 10;

TransferDecision clamp(TransferDecision d, const DeviceLimits& limits) {
  const auto fit = [](auto value, auto limit) { return value == 0 ? limit : std::min(value, limit); };
  const bool staged = d.backend == Backend::kStaged && limits.max_staged_bytes != 0;
  d.chunk_bytes = fit(d.chunk_bytes,  // 0: as much as the device takes at once
                      staged ? limits.max_staged_bytes : limits.max_chunk_bytes);
  d.chunk_descriptors = fit(d.chunk_descriptors, limits.max_chunk_descriptors);
  d.max_grid_blocks = fit(d.max_grid_blocks, limits.max_grid_blocks);
  d.inflight_chunks = std::min(std::max(d.inflight_chunks, 1u), limits.max_inflight_chunks);
  return d;
}

// What the lane may have outstanding while this job takes part in it. Saturates: "no limit" stays that.
uint64_t bound(const TransferDecision& d) {
  return d.chunk_bytes > UINT64_MAX / d.inflight_chunks ? UINT64_MAX : d.chunk_bytes * d.inflight_chunks;
}

}  // namespace

const char* to_string(Status s) {
  switch (s) {
    case Status::kDone: return "done";
    case Status::kFailed: return "failed";
    case Status::kCancelled: return "cancelled";
    case Status::kTimeout: return "timeout";
  }
  return "?";
}

Lane::Lane(Direction direction, Device& device, const Geometry& geometry, const DeviceProfile& profile,
           Events& events)
    : direction_(direction),
      device_(device),
      geometry_(geometry),
      profile_(profile),
      events_(events),
      limits_(device.limits()),
      planner_(geometry),
      slots_(limits_.max_inflight_chunks) {}

void Lane::take(Job* job) {
  events_.add_share(job->event);
  next_deadline_ = std::min(next_deadline_, job->deadline);
  queue_.push_back(job);
  if (job->cancel.load(std::memory_order_relaxed)) stop(job, Status::kCancelled, "cancelled");
}

bool Lane::step(double now, uint64_t step, std::vector<Job*>* ended) {
  moved_ = false;
  if (busy_ != 0) poll_chunks();
  if (!idle()) {
    stop_late_and_broken(now);
    wait_for_events(now, step);
    admit(now);  // planning takes time: what it admits may start in the next round, with that round's clock
    for (size_t ranges = 0, more; ranges < kRangesPerRound && (more = submit_next(now)) != 0;
         ranges += more) {
      moved_ = true;
    }
    collect_ended(now, ended);
  }
  return moved_;
}

void Lane::poll_chunks() {
  for (Slot& slot : slots_) {
    if (slot.job == nullptr) continue;
    const Progress progress = device_.poll(slot.ticket);
    if (progress == Progress::kPending) continue;
    Job* job = slot.job;
    slot.job = nullptr;
    --busy_;
    --job->outstanding;
    outstanding_bytes_ -= slot.bytes;
    moved_ = true;
    if (progress == Progress::kFailed) stop(job, Status::kFailed, device_.last_error());
    if (direction_ == Direction::kSave && job->state != JobState::kDraining) land_slots(job);
  }
}

void Lane::stop_late_and_broken(double now) {
  const bool broken = !device_.healthy(direction_);
  if (!broken && now < next_deadline_) return;
  next_deadline_ = std::numeric_limits<double>::infinity();
  const auto look_at = [&](Job* job) {
    if (broken) {
      stop(job, Status::kFailed,
           std::string("the device takes no more ") + to_string(direction_) + "s: " + device_.last_error());
    } else if (now >= job->deadline) {
      stop(job, Status::kTimeout, "not finished within its timeout");
    } else {
      next_deadline_ = std::min(next_deadline_, job->deadline);
    }
  };
  for (Job* job : active_) look_at(job);
  for (Job* job : queue_) look_at(job);
}

void Lane::apply_cancels() {
  const auto look_at = [&](Job* job) {
    if (job->cancel.load(std::memory_order_relaxed)) stop(job, Status::kCancelled, "cancelled");
  };
  for (Job* job : active_) look_at(job);
  for (Job* job : queue_) look_at(job);
}

void Lane::fail_all(const std::string& why) {
  for (Job* job : active_) stop(job, Status::kFailed, why);
  for (Job* job : queue_) stop(job, Status::kFailed, why);
}

// The first reason to stop is the one that is reported.
void Lane::stop(Job* job, Status status, std::string error) {
  if (job->state == JobState::kDraining) return;
  if (job->state == JobState::kQueued) stopping_ = true;
  job->state = JobState::kDraining;
  job->result.status = status;
  job->result.error = std::move(error);
}

// Jobs are planned here, before their event is ready: the time until then is free.
void Lane::admit(double now) {
  while (active_.size() < kSharingJobs && !queue_.empty()) {
    Job* job = queue_.front();
    queue_.pop_front();
    active_.push_back(job);
    moved_ = true;
    if (job->state == JobState::kDraining) continue;
    job->state = JobState::kWaiting;
    job->queued = now - job->submitted;
    planner_.plan(job->moves.data(), job->moves.size(), &job->order, &job->ranges);
    const TransferShape shape = shape_of(direction_, job->ranges);
    job->result.bytes = shape.total_bytes;
    job->result.ranges = shape.ranges;
    job->range_bytes = shape.min_range_bytes * shape.ranges == shape.total_bytes ? shape.min_range_bytes : 0;
    if (job->ranges.empty()) continue;
    job->decision = clamp(decide(shape, profile_, job->objective, job->policy), limits_);
    if (job->decision.backend != Backend::kMemcpy) device_.prepare(job->ranges, &job->prepared);
    job->result.backend = to_string(job->decision.backend);
    job->result.reason = job->decision.reason;
  }
}

void Lane::wait_for_events(double now, uint64_t step) {
  for (Job* job : active_) {
    if (job->state != JobState::kWaiting) continue;
    const Progress progress = events_.query(job->event, step);
    if (progress == Progress::kPending) continue;
    moved_ = true;
    if (progress == Progress::kFailed) {
      stop(job, Status::kFailed, "its compute event failed: " + device_.last_error());
    } else if (!start(job)) {
      stop(job, Status::kFailed, "a slot does not hold the key that was to be loaded from it");
    } else {
      job->state = job->ranges.empty() ? JobState::kInflight : JobState::kSubmitting;
      job->paced_from = now - job->queued;
      events_.drop_share(job->event);
      job->event = 0;
    }
  }
}

// A load that named its keys reads only slots that hold them, and checks again at its end.
bool Lane::start(Job* job) {
  if (direction_ == Direction::kSave || job->key_bytes == 0) return true;
  job->generations.resize(job->moves.size());
  for (size_t i = 0; i < job->order.size(); ++i) {
    if (!holds(entry(*job, i), key(*job, i), job->key_bytes, &job->generations[i])) return false;
  }
  return true;
}

// Round robin. A job whose turn it is and which does not fit yet keeps its turn: what is in flight will land,
// and neither a large chunk nor a small one is overtaken for ever.
size_t Lane::submit_next(double now) {
  Job* job = nullptr;
  for (size_t i = 0; i < active_.size() && job == nullptr; ++i) {
    turn_ = turn_ < active_.size() ? turn_ : 0;
    if (active_[turn_]->state == JobState::kSubmitting && due(*active_[turn_], now)) {
      job = active_[turn_];
    } else {
      ++turn_;
    }
  }
  if (job == nullptr) return 0;
  Slot* slot = free_slot(*job);
  const uint64_t most = std::min(job->decision.chunk_bytes, job->result.bytes - job->submitted_bytes);
  if (slot == nullptr || !within_bound(*job, most)) return 0;

  pack(job, slot);
  if (busy_ != 0 && outstanding_bytes_ + slot->bytes > bound(job->decision)) {
    // The one promise of a lane, so it is looked at again in release builds: rather a failed job than more.
    stop(job, Status::kFailed, "a chunk would have exceeded the bound on outstanding bytes");
    return 1;
  }
  if (direction_ == Direction::kSave) begin_slots(job);
  Chunk chunk{direction_,
              job->decision.backend,
              slot->ranges,
              slot->count,
              slot->bytes,
              job->decision.max_grid_blocks,
              static_cast<uint32_t>(slot - slots_.data())};
  if (!job->prepared.words.empty() && slot->ranges != slot->parts.data()) {
    chunk.prepared = &job->prepared;
    chunk.first = slot->ranges - job->ranges.data();
  }
  slot->ticket = device_.submit(chunk);
  slot->job = job;  // now, not before: what throws above must leave no chunk behind that was never submitted
  ++busy_;
  ++job->outstanding;
  outstanding_bytes_ += slot->bytes;
  if (job->started < 0) job->started = now;
  ++job->result.chunks;
  job->result.peak_outstanding_bytes = std::max(job->result.peak_outstanding_bytes, outstanding_bytes_);
  if (job->next_range == job->ranges.size()) job->state = JobState::kInflight;
  ++turn_;
  return slot->count;
}

// Whether it is time for the job's next chunk: its bytes are spread evenly over the time its decision names.
bool Lane::due(const Job& job, double now) const {
  const double spread = job.decision.spread_us * 1e-6;
  const double total = static_cast<double>(job.result.bytes);
  return static_cast<double>(job.submitted_bytes) * spread <= total * (now - job.paced_from);
}

Lane::Slot* Lane::free_slot(const Job& job) {
  for (uint32_t i = 0; i < job.decision.inflight_chunks; ++i) {
    if (slots_[i].job == nullptr) return &slots_[i];
  }
  return nullptr;
}

// Jobs with different decisions may share the lane; then the tightest bound of those in flight counts for
// all.
bool Lane::within_bound(const Job& job, uint64_t bytes) const {
  uint64_t allowed = bound(job.decision);
  for (const Slot& slot : slots_) {
    if (slot.job != nullptr) allowed = std::min(allowed, bound(slot.job->decision));
  }
  return busy_ == 0 || (bytes <= allowed && outstanding_bytes_ <= allowed - bytes);
}

// Fills a chunk up to its bytes and descriptors. A range that would fit a chunk of its own is cut only to
// spare a chunk that would otherwise be less than half full. Whole ranges, nearly always, stay where they
// are: at 512 bytes a range and 50 GiB/s, copying them would cost a fifth of the time there is.
void Lane::pack(Job* job, Slot* slot) {
  const TransferDecision& d = job->decision;
  const uint64_t limit = chunk_limit(*job);
  const Range* const ranges = job->ranges.data();
  const size_t first = job->next_range, count = job->ranges.size();
  const size_t end_most = std::min<size_t>(count, first + d.chunk_descriptors);
  uint64_t bytes = 0;
  size_t end = first;
  if (job->cut == 0) {
    if (job->range_bytes != 0) {  // all alike
      end += std::min<uint64_t>(end_most - first, limit / job->range_bytes);
      bytes = (end - first) * job->range_bytes;
    } else {
      while (end < end_most && ranges[end].bytes <= limit - bytes) bytes += ranges[end++].bytes;
    }
  }
  slot->begin = job->submitted_bytes;
  job->next_range = end;
  if (end == end_most || (end != first && ranges[end].bytes <= limit && bytes >= limit / 2)) {
    slot->ranges = ranges + first;
    slot->count = end - first;
  } else {
    slot->parts.assign(ranges + first, ranges + end);
    bytes = pack_parts(job, slot, bytes, limit);
    slot->ranges = slot->parts.data();
    slot->count = slot->parts.size();
  }
  slot->bytes = bytes;
  job->submitted_bytes += bytes;
}

// Goes on with parts of ranges, from `bytes` up to `limit`; what the chunk then has.
uint64_t Lane::pack_parts(Job* job, Slot* slot, uint64_t bytes, uint64_t limit) {
  while (job->next_range < job->ranges.size() && slot->parts.size() < job->decision.chunk_descriptors) {
    const Range& r = job->ranges[job->next_range];
    const uint64_t left = r.bytes - job->cut, room = limit - bytes;
    uint64_t take = left;
    if (left > room) {
      if (left <= limit && bytes >= limit / 2) break;
      take = room / kCutBytes * kCutBytes;
      if (take == 0 && bytes != 0) break;
      if (take == 0) take = room;  // chunks smaller than a cut
    }
    slot->parts.push_back({r.device + job->cut, r.host + job->cut, take});
    bytes += take;
    job->cut += take;
    if (job->cut == r.bytes) {
      ++job->next_range;
      job->cut = 0;
    }
  }
  return bytes;
}

// What a staged pipeline cannot overlap is kept short: listing and gathering its first chunks, and scattering
// the last ones of a load. So it opens with small chunks, each as large as all before it, and a load ends
// with ever smaller ones. Beside other jobs there is less to keep short: what they have in flight counts as
// before, and a load behind which one has more to submit ends as it is.
uint64_t Lane::chunk_limit(const Job& job) const {
  const TransferDecision& d = job.decision;
  if (d.backend != Backend::kStaged || d.inflight_chunks < 2) return d.chunk_bytes;
  const uint64_t least = std::max(d.chunk_bytes / 8, std::min(d.chunk_bytes, kLeastOpenChunk));
  const uint64_t left = job.result.bytes - job.submitted_bytes;
  const auto follows = [&](const Job* other) {
    return other != &job && other->state == JobState::kSubmitting;
  };
  const bool last = queue_.empty() && std::none_of(active_.begin(), active_.end(), follows);
  uint64_t most = std::max(job.submitted_bytes, outstanding_bytes_);
  if (direction_ == Direction::kLoad && last) most = std::min(most, left / 2);
  return std::clamp(most, least, d.chunk_bytes);
}

SlotEntry& Lane::entry(const Job& job, size_t i) const {
  const Move& m = job.moves[job.order[i]];
  return geometry_.pool->entry(geometry_.group_classes[m.group], m.slot);
}

// Every slot that a byte submitted so far belongs to is marked as being written.
void Lane::begin_slots(Job* job) {
  while (job->begun_end < job->submitted_bytes) {
    begin_write(entry(*job, job->begun));
    job->begun_end += geometry_.layouts[job->moves[job->order[job->begun]].group].slot_bytes();
    ++job->begun;
  }
}

// Chunks complete in any order: the stream has landed up to the first byte still in flight.
void Lane::land_slots(Job* job) {
  uint64_t landed = job->submitted_bytes;
  for (const Slot& slot : slots_) {
    if (slot.job == job) landed = std::min(landed, slot.begin);
  }
  while (job->landed < job->begun) {
    const uint64_t bytes = geometry_.layouts[job->moves[job->order[job->landed]].group].slot_bytes();
    if (job->landed_end + bytes > landed) break;
    end_write(entry(*job, job->landed), key(*job, job->landed), job->key_bytes, static_cast<uint32_t>(bytes));
    job->landed_end += bytes;
    ++job->landed;
  }
}

void Lane::collect_ended(double now, std::vector<Job*>* ended) {
  const auto over = [&](Job* job) {
    if (job->outstanding != 0 || (job->state != JobState::kInflight && job->state != JobState::kDraining))
      return false;
    finish(job, now);
    ended->push_back(job);
    moved_ = true;
    return true;
  };
  active_.erase(std::remove_if(active_.begin(), active_.end(), over), active_.end());
  if (!stopping_) return;
  stopping_ = false;
  queue_.erase(std::remove_if(queue_.begin(), queue_.end(), over), queue_.end());
}

void Lane::finish(Job* job, double now) {
  JobResult& result = job->result;
  if (job->state == JobState::kInflight) {
    for (size_t i = 0; i < job->generations.size(); ++i) {
      if (entry(*job, i).generation.load(std::memory_order_acquire) == job->generations[i]) continue;
      result.status = Status::kFailed;
      result.error = "a slot was written while it was being loaded from";
    }
  }
  if (result.status != Status::kDone) {
    for (size_t i = 0; i < job->begun; ++i) forget(entry(*job, i));
  }
  events_.drop_share(job->event);
  job->event = 0;
  result.queue_s = (job->started < 0 ? now : job->started) - job->submitted;
  result.transfer_s = job->started < 0 ? 0 : now - job->started;
}

}  // namespace pega
