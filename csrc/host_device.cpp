// SPDX-License-Identifier: Apache-2.0
#include "host_device.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pega {
namespace {

constexpr uint32_t kInflight = 8;  // per direction; two or three chunks already keep the workers busy
constexpr uint64_t kStageBytes =
    4 << 20;  // staged chunks larger than this go through their stage piece by piece

void copy(Direction direction, uint64_t device, uint64_t host, uint64_t bytes) {
  auto* d = reinterpret_cast<uint8_t*>(device);
  auto* h = reinterpret_cast<uint8_t*>(host);
  direction == Direction::kLoad ? std::memcpy(d, h, bytes) : std::memcpy(h, d, bytes);
}

}  // namespace

HostDevice::HostDevice(uint32_t workers) : work_(new Work[kDirections * kInflight]) {
  if (workers < 1 || workers > 64)
    throw std::invalid_argument("workers is " + std::to_string(workers) + "; allowed: 1 to 64");
  for (uint32_t i = 0; i < workers; ++i) threads_.emplace_back([this] { run(); });
}

HostDevice::~HostDevice() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  tasks_cv_.notify_all();
  for (std::thread& t : threads_) t.join();
}

DeviceLimits HostDevice::limits() const { return {UINT64_MAX, kInflight, UINT32_MAX, 64}; }

Ticket HostDevice::submit(const Chunk& chunk) {
  const uint32_t index = static_cast<uint32_t>(chunk.direction) * kInflight + chunk.inflight_slot;
  Work* work = &work_[index];
  work->chunk = chunk;
  ++work->serial;
  const bool spread = chunk.backend == Backend::kKernel || chunk.backend == Backend::kChunked;
  work->parts = spread ? std::min<uint32_t>(std::max(chunk.grid, 1u), threads_.size()) : 1;
  work->parts_left.store(work->parts, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t part = 0; part < work->parts; ++part) tasks_.push_back({work, part});
  }
  work->parts > 1 ? tasks_cv_.notify_all() : tasks_cv_.notify_one();
  return work->serial * (kDirections * kInflight) + index;
}

Progress HostDevice::poll(Ticket ticket) {
  const Work& work = work_[ticket % (kDirections * kInflight)];
  return work.parts_left.load(std::memory_order_acquire) == 0 ? Progress::kDone : Progress::kPending;
}

void HostDevice::relax(std::chrono::microseconds limit) {
  std::unique_lock<std::mutex> lock(mutex_);
  finished_cv_.wait_for(lock, limit, [this] { return finished_ != seen_; });
  seen_ = finished_;
}

void HostDevice::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    tasks_cv_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const Task task = tasks_.front();
    tasks_.pop_front();
    lock.unlock();
    if (task.work->chunk.backend == Backend::kStaged) {
      copy_staged(task.work);
    } else {
      copy_part(task.work->chunk, task.part, task.work->parts);
    }
    const bool last = task.work->parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1;
    lock.lock();
    if (!last) continue;
    ++finished_;
    finished_cv_.notify_one();
  }
}

// The chunk's bytes as one stream, of which each part copies an equal share.
void HostDevice::copy_part(const Chunk& chunk, uint32_t part, uint32_t parts) {
  const uint64_t begin = chunk.bytes / parts * part;
  const uint64_t end = part + 1 == parts ? chunk.bytes : begin + chunk.bytes / parts;
  uint64_t at = 0;
  for (size_t i = 0; i < chunk.count && at < end; at += chunk.ranges[i++].bytes) {
    const Range& r = chunk.ranges[i];
    const uint64_t from = std::max(at, begin), to = std::min(at + r.bytes, end);
    if (from < to) copy(chunk.direction, r.device + (from - at), r.host + (from - at), to - from);
  }
}

// Like the GPU's ring of stages: fragments to or from a small buffer, and one copy per run of host memory.
void HostDevice::copy_staged(Work* work) {
  const Chunk& chunk = work->chunk;
  work->stage.resize(std::max<uint64_t>(work->stage.size(), std::min(chunk.bytes, kStageBytes)));
  const auto stage = reinterpret_cast<uint64_t>(work->stage.data());
  const uint64_t room = work->stage.size();
  for (size_t i = 0; i < chunk.count;) {
    if (chunk.ranges[i].bytes > room) {  // too long for the stage, and contiguous anyway
      copy(chunk.direction, chunk.ranges[i].device, chunk.ranges[i].host, chunk.ranges[i].bytes);
      ++i;
      continue;
    }
    const uint64_t host = chunk.ranges[i].host;
    size_t end = i;
    uint64_t run = 0;
    while (end < chunk.count && chunk.ranges[end].host == host + run && run + chunk.ranges[end].bytes <= room)
      run += chunk.ranges[end++].bytes;
    if (chunk.direction == Direction::kLoad) copy(Direction::kSave, host, stage, run);
    for (uint64_t at = 0; i < end; at += chunk.ranges[i++].bytes)
      copy(chunk.direction, chunk.ranges[i].device, stage + at, chunk.ranges[i].bytes);
    if (chunk.direction == Direction::kSave) copy(Direction::kLoad, host, stage, run);
  }
}

}  // namespace pega
