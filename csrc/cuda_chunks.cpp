// SPDX-License-Identifier: Apache-2.0
// How CudaDevice moves a chunk, from submit() to the poll() that retires it.
#include <algorithm>

#include "cuda_device.h"

namespace pega {
namespace {

// A staged chunk pays one copy-engine command (2.6 us on an H200's host, less in a batch) per run of host
// memory; a run of 64 KiB takes 1.3 us on PCIe 5. Where runs are shorter on average, the kernel writes host
// memory itself.
constexpr uint64_t kMinStagedRun = 64 << 10;
// A driver call that fails once may work the next time; one that fails this often will not.
constexpr uint32_t kMaxFailedPolls = 64;

// A ticket is a serial number above, and below it where the operation lives.
constexpr uint64_t kSlotBits = 7;
constexpr Ticket kRefusedTicket = (1 << (kSlotBits + 1)) - 1;

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                               std::chrono::nanoseconds(1));
}

}  // namespace

Ticket CudaDevice::submit(const Chunk& chunk) {
  auto& operations = lanes_[static_cast<int>(chunk.direction)].operations;
  if (chunk.inflight_slot >= operations.size() || operations[chunk.inflight_slot].phase != Phase::kIdle) {
    note_error("a chunk was submitted to an inflight slot that is taken or does not exist");
    return kRefusedTicket;
  }
  Operation& op = operations[chunk.inflight_slot];
  op.chunk = chunk;
  op.ticket = ++tickets_ << (kSlotBits + 1) | static_cast<uint64_t>(chunk.direction) << kSlotBits |
              chunk.inflight_slot;
  op.staged = op.drain_recorded = false;
  op.range = 0;
  op.range_done = op.stage_end = 0;
  op.slices = op.failed_polls = 0;
  op.resume = {};
  CudaStats& seen = stats(op);
  ++seen.chunks[static_cast<int>(chunk.backend)];
  seen.outstanding_bytes += chunk.bytes;
  seen.peak_outstanding_bytes = std::max(seen.peak_outstanding_bytes, seen.outstanding_bytes);
  const uint64_t begun = now_ns();
  op.phase = Phase::kRefused;
  if (!dead_ && !disabled_ && enter() && !start(op) && op.phase != Phase::kRefused)
    op.phase = Phase::kDraining;
  seen.submit_ns += now_ns() - begun;
  return op.ticket;
}

bool CudaDevice::start(Operation& op) {
  const Chunk& chunk = op.chunk;
  if (chunk.count == 0 || chunk.count > kMaxDescriptors || chunk.bytes > kMaxChunkBytes) {
    note_error("a chunk of " + std::to_string(chunk.count) + " ranges and " + std::to_string(chunk.bytes) +
               " bytes was submitted; allowed are 1 to " + std::to_string(kMaxDescriptors) + " ranges and " +
               std::to_string(kMaxChunkBytes) + " bytes");
    return false;
  }
  if (chunk.backend == Backend::kAuto) {
    note_error("a chunk was submitted without a backend");
    return false;
  }
  op.staged = chunk.backend == Backend::kStaged;
  if (chunk.backend == Backend::kMemcpy) {
    op.list = {};
    for (size_t i = 0; i < chunk.count; ++i) op.list.registered &= host_.covers(chunk.ranges[i]);
  } else {
    op.list = list_pieces(chunk, host_, op.staged, op.pieces);
  }
  if (op.list.registered && op.staged && !stageable(chunk, op.list)) {
    ++stats(op).unstaged_chunks;
    op.staged = false;
    op.list = list_pieces(chunk, host_, false, op.pieces);
  }
  if (!op.list.registered) {
    note_error("a chunk touches host memory that is not registered: call register_host() for the pool first");
    return false;
  }
  if (chunk.backend != Backend::kMemcpy && (!op.staged || chunk.direction == Direction::kSave)) {
    if (!launch(op)) return false;
    if (!op.staged) return true;
    if (!succeeded("cuStreamWaitEvent", cu_.cuStreamWaitEvent(lane(op).dma, op.kernel_event, 0)))
      return false;
  }
  op.phase = Phase::kCopying;
  return advance(op);
}

bool CudaDevice::stageable(const Chunk& chunk, const PieceList& list) const {
  return list.staged_bytes <= options_.stage_bytes + kStageSlack &&
         list.runs <= 1 + chunk.bytes / kMinStagedRun;
}

// Submits the next slice of copies if it is time, and what follows the last one. False on failure.
bool CudaDevice::advance(Operation& op) {
  if (op.slices > 0 && std::chrono::steady_clock::now() < op.resume) return true;
  if (op.slices >= 2) {
    // At most two slices are queued: a full channel makes the driver wait with its lock held.
    const CuResult result = cu_.cuEventQuery(op.slice_event[op.slices % 2]);
    if (result == kCuNotReady) return true;
    if (!succeeded("cuEventQuery", result)) return false;
  }
  const uint64_t begun = now_ns();
  if (!submit_slice(op)) return false;
  if (op.slices > 1) stats(op).submit_ns += now_ns() - begun;  // the first is within submit()
  op.resume = std::chrono::steady_clock::now() + std::chrono::microseconds(options_.slice_pause_us);
  if (op.range < op.chunk.count) return true;
  op.last_event = op.slice_event[(op.slices - 1) % 2];
  op.phase = Phase::kRunning;
  if (!op.staged || op.chunk.direction == Direction::kSave) return true;
  return succeeded("cuStreamWaitEvent", cu_.cuStreamWaitEvent(lane(op).kernel, op.last_event, 0)) &&
         launch(op);
}

bool CudaDevice::submit_slice(Operation& op) {
  to_.clear(), from_.clear(), bytes_.clear();
  const bool load = op.chunk.direction == Direction::kLoad;
  uint64_t host, device, bytes;
  while (bytes_.size() < options_.copies_per_slice && next_copy(op, &host, &device, &bytes)) {
    to_.push_back(load ? device : host);
    from_.push_back(load ? host : device);
    bytes_.push_back(bytes);
  }
  if (!copy_slice(op)) return false;
  const uint32_t copies = static_cast<uint32_t>(bytes_.size());
  stats(op).copies += copies;
  stats(op).max_copies_per_slice = std::max(stats(op).max_copies_per_slice, copies);
  return succeeded("cuEventRecord", cu_.cuEventRecord(op.slice_event[op.slices++ % 2], lane(op).dma));
}

bool CudaDevice::copy_slice(Operation& op) {
  const CuStream dma = lane(op).dma;
  if (bytes_.size() > 1 && options_.batch_copies && cu_.cuMemcpyBatchAsync) {
    CuCopyAttributes attributes;
    size_t first = 0;
    return succeeded("cuMemcpyBatchAsync",
                     cu_.cuMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), bytes_.size(),
                                            &attributes, &first, 1, dma));
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    const bool copied =
        op.chunk.direction == Direction::kLoad
            ? succeeded("cuMemcpyHtoDAsync",
                        cu_.cuMemcpyHtoDAsync(to_[i], reinterpret_cast<void*>(from_[i]), bytes_[i], dma))
            : succeeded("cuMemcpyDtoHAsync",
                        cu_.cuMemcpyDtoHAsync(reinterpret_cast<void*>(to_[i]), from_[i], bytes_[i], dma));
    if (!copied) return false;
  }
  return true;
}

// The next copy-engine command: a range or, if staged, a run of ranges that are neighbours in host memory;
// cut where a registration ends.
bool CudaDevice::next_copy(Operation& op, uint64_t* host, uint64_t* device, uint64_t* bytes) {
  const Chunk& chunk = op.chunk;
  if (op.range == chunk.count) return false;
  const Range& first = chunk.ranges[op.range];
  *host = first.host + op.range_done;
  uint64_t run = first.bytes - op.range_done;
  size_t end = op.range + 1;
  if (op.staged) {
    op.stage_end = place_run(op.stage_end, *host);
    *device = op.stage + op.stage_end;
    while (end < chunk.count && chunk.ranges[end].host == *host + run) run += chunk.ranges[end++].bytes;
  } else {
    *device = first.device + op.range_done;
  }
  *bytes = host_.contiguous(*host, run);
  op.stage_end += *bytes;
  // Step over what this copy covers.
  uint64_t covered = op.range_done + *bytes;
  while (op.range < end && covered >= chunk.ranges[op.range].bytes) covered -= chunk.ranges[op.range++].bytes;
  op.range_done = covered;
  return true;
}

bool CudaDevice::launch(Operation& op) {
  uint32_t count = op.list.count, aligned = op.list.aligned;
  LaunchShape shape = shape_launch(count, std::min(op.chunk.grid, max_grid_));
  uint64_t pieces = op.pieces_device, base = op.staged ? op.stage : host_.base();
  void* arguments[] = {&pieces, &count, &shape.batch, &base, &aligned};
  const CuStream stream = lane(op).kernel;
  if (!succeeded("cuLaunchKernel", cu_.cuLaunchKernel(lane(op).function, shape.grid, 1, 1, kThreadsPerBlock,
                                                      1, 1, 0, stream, arguments, nullptr))) {
    return false;
  }
  CudaStats& seen = stats(op);
  ++seen.launches;
  seen.max_grid = std::max(seen.max_grid, shape.grid);
  op.last_event = op.kernel_event;
  op.phase = Phase::kRunning;
  return succeeded("cuEventRecord", cu_.cuEventRecord(op.kernel_event, stream));
}

Progress CudaDevice::poll(Ticket ticket) {
  if (ticket == kRefusedTicket) return Progress::kFailed;
  const uint64_t slot = ticket & ((1 << kSlotBits) - 1);
  Operation& op = lanes_[ticket >> kSlotBits & 1].operations.at(slot);
  if (op.ticket != ticket) return Progress::kFailed;  // retired already
  if (op.phase == Phase::kRefused || dead_) return retire(op, Progress::kFailed);
  if (!enter()) {
    give_up(op);
    return Progress::kPending;
  }
  if (op.phase == Phase::kCopying && !advance(op)) op.phase = Phase::kDraining;
  if (op.phase == Phase::kRunning) {
    const CuResult result = cu_.cuEventQuery(op.last_event);
    if (result == kCuSuccess) return retire(op, Progress::kDone);
    if (result != kCuNotReady && !succeeded("cuEventQuery", result)) op.phase = Phase::kDraining;
  }
  if (op.phase == Phase::kDraining && drained(op)) return retire(op, Progress::kFailed);
  return dead_ ? retire(op, Progress::kFailed) : Progress::kPending;
}

// Whether nothing of a failed chunk can still touch memory: fresh events behind all that was queued.
bool CudaDevice::drained(Operation& op) {
  if (!op.drain_recorded) {
    op.drain_recorded = succeeded("cuEventRecord", cu_.cuEventRecord(op.slice_event[0], lane(op).dma)) &&
                        succeeded("cuEventRecord", cu_.cuEventRecord(op.kernel_event, lane(op).kernel));
    if (!op.drain_recorded) give_up(op);
    return false;
  }
  for (CuEvent event : {op.slice_event[0], op.kernel_event}) {
    const CuResult result = cu_.cuEventQuery(event);
    if (result == kCuNotReady) return false;
    if (!succeeded("cuEventQuery", result)) {
      give_up(op);
      return false;
    }
  }
  return true;
}

// After too many failures in a row the device takes no more work, and waiting for the streams tells whether
// what was submitted has ended: by itself or with the context. If not even that works, the chunk stays
// pending: memory that it may still touch must not be handed on.
void CudaDevice::give_up(Operation& op) {
  if (++op.failed_polls < kMaxFailedPolls) return;
  op.failed_polls = 0;
  disabled_ = true;
  for (CuStream stream : streams()) {
    const CuResult result = cu_.cuStreamSynchronize(stream);
    if (result != kCuSuccess && !is_sticky(result)) return;
  }
  dead_ = true;
}

Progress CudaDevice::retire(Operation& op, Progress progress) {
  stats(op).outstanding_bytes -= op.chunk.bytes;
  op.phase = Phase::kIdle;
  op.ticket = 0;
  return progress;
}

}  // namespace pega
