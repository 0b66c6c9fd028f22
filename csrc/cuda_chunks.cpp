// SPDX-License-Identifier: Apache-2.0
// How CudaDevice moves a chunk, from submit() to the poll() that retires it.
#include <algorithm>

#include "cuda_device.h"

namespace pega {
namespace {

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
  op.staged = op.drain_marked = false;
  op.next = op.next_done = 0;
  op.first_slice = op.marked;
  op.failed_polls = 0;
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
    list(op);
  }
  if (op.list.registered && op.staged && !stageable(chunk, op.list)) {
    ++stats(op).unstaged_chunks;
    op.staged = false;
    list(op);
  }
  if (!op.list.registered) {
    note_error("a chunk touches host memory that is not registered: call register_host() for the pool first");
    return false;
  }
  if (chunk.backend != Backend::kMemcpy && (!op.staged || chunk.direction == Direction::kSave)) {
    if (!launch(op)) return false;
    if (!op.staged) {
      op.phase = Phase::kRunning;
      return mark(op, lane(op).kernel);
    }
    if (!hand_over(op, lane(op).kernel, lane(op).dma())) return false;
  }
  op.phase = Phase::kCopying;
  return advance(op);
}

void CudaDevice::list(Operation& op) {
  if (!copy_prepared(op.chunk, host_, op.staged, op.pieces, op.runs.data(), &op.list)) {
    op.list = op.staged ? list_staged_pieces(op.chunk, host_, op.pieces, op.runs.data(), op.runs.size())
                        : list_pieces(op.chunk, host_, op.pieces);
    op.list.base = op.staged ? 0 : host_.base();
  }
  if (op.staged) op.list.base += op.stage;
}

bool CudaDevice::stageable(const Chunk& chunk, const PieceList& list) const {
  return list.staged_bytes <= options_.stage_bytes + kStageSlack &&
         list.runs <= 1 + chunk.bytes / kMinStagedRun;
}

// Submits the next slice of copies if it is time, and what follows the last one. False on failure.
bool CudaDevice::advance(Operation& op) {
  const bool again =
      op.marked != op.first_slice;  // the first slice is within submit(), which counts its time
  if (again) {
    if (std::chrono::steady_clock::now() < op.resume) return true;
    // At most two slices are queued: a full channel makes the driver wait with its lock held.
    if (op.marked - op.first_slice >= 2) {
      const Progress progress = ended(op, op.marked - 1);
      if (progress != Progress::kDone) return progress == Progress::kPending;
    }
  }
  const uint64_t begun = now_ns();
  if (!enter() || !submit_slice(op)) return false;
  const bool all = copied(op);
  const bool scatters = all && op.staged && op.chunk.direction == Direction::kLoad;
  const CuStream next = scatters ? lane(op).kernel : lane(op).signal;
  if (!hand_over(op, lane(op).dma(), next) || (all && !pass_turn(op)) || (scatters && !launch(op)) ||
      !mark(op, next)) {
    return false;
  }
  if (again) stats(op).submit_ns += now_ns() - begun;
  op.resume = std::chrono::steady_clock::now() + std::chrono::microseconds(options_.slice_pause_us);
  if (all) op.phase = Phase::kRunning;
  return true;
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
  return true;
}

bool CudaDevice::copy_slice(Operation& op) {
  const CuStream stream = lane(op).dma();
  if (bytes_.size() > 1 && options_.batch_copies && cu_.cuMemcpyBatchAsync) {
    CuCopyAttributes attributes;
    size_t first = 0;
    return succeeded("cuMemcpyBatchAsync",
                     cu_.cuMemcpyBatchAsync(to_.data(), from_.data(), bytes_.data(), bytes_.size(),
                                            &attributes, &first, 1, stream));
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    const bool copied =
        op.chunk.direction == Direction::kLoad
            ? succeeded("cuMemcpyHtoDAsync",
                        cu_.cuMemcpyHtoDAsync(to_[i], reinterpret_cast<void*>(from_[i]), bytes_[i], stream))
            : succeeded("cuMemcpyDtoHAsync",
                        cu_.cuMemcpyDtoHAsync(reinterpret_cast<void*>(to_[i]), from_[i], bytes_[i], stream));
    if (!copied) return false;
  }
  return true;
}

// The next copy-engine command: a range or, if staged, a run; cut where a registration ends.
bool CudaDevice::next_copy(Operation& op, uint64_t* host, uint64_t* device, uint64_t* bytes) {
  if (copied(op)) return false;
  uint64_t left;
  if (op.staged) {
    const StagedRun& run = op.runs[op.next];
    *host = run.host, *device = op.stage + run.offset, left = run.bytes;
  } else {
    const Range& range = op.chunk.ranges[op.next];
    *host = range.host, *device = range.device, left = range.bytes;
  }
  *host += op.next_done, *device += op.next_done, left -= op.next_done;
  *bytes = host_.contiguous(*host, left);
  op.next_done += *bytes;
  if (*bytes == left) ++op.next, op.next_done = 0;
  return true;
}

bool CudaDevice::copied(const Operation& op) const {
  return op.next == (op.staged ? op.list.runs : op.chunk.count);
}

bool CudaDevice::launch(Operation& op) {
  uint32_t count = op.list.count, aligned = op.list.aligned;
  LaunchShape shape = shape_launch(count, std::min(op.chunk.grid, max_grid_));
  uint64_t pieces = op.pieces_device, base = op.list.base;
  void* arguments[] = {&pieces, &count, &shape.batch, &base, &aligned};
  if (!succeeded("cuLaunchKernel", cu_.cuLaunchKernel(lane(op).function, shape.grid, 1, 1, kThreadsPerBlock,
                                                      1, 1, 0, lane(op).kernel, arguments, nullptr))) {
    return false;
  }
  CudaStats& seen = stats(op);
  ++seen.launches;
  seen.max_grid = std::max(seen.max_grid, shape.grid);
  return true;
}

bool CudaDevice::hand_over(Operation& op, CuStream from, CuStream to) {
  return succeeded("cuEventRecord", cu_.cuEventRecord(op.handoff, from)) &&
         succeeded("cuStreamWaitEvent", cu_.cuStreamWaitEvent(to, op.handoff, 0));
}

// After a hand-over from the stream that has the turn. Where this fails the turn stays, and so
// does the order.
bool CudaDevice::pass_turn(Operation& op) {
  Lane& mine = lane(op);
  const CuStream other = mine.turns[mine.turn ^ 1];
  if (!succeeded("cuStreamWaitEvent", cu_.cuStreamWaitEvent(other, op.handoff, 0))) return false;
  mine.turn ^= 1;
  return true;
}

// Ends a slice: the stream will say so.
bool CudaDevice::mark(Operation& op, CuStream stream) {
  ++op.marked;
  op.last = stream;
  op.ask = std::chrono::steady_clock::now() + ask_every();
  if (!writes_words_) return true;
  const CuResult result = cu_.cuStreamWriteValue32(stream, op.word_device, op.marked, 0);
  if (result != kCuNotSupported) return succeeded("cuStreamWriteValue32", result);
  writes_words_ = false;  // an old driver or a virtual GPU; asking the driver works everywhere
  return true;
}

// Whether the first `slices` (counted as `marked` is) have ended. Costs no driver call as long as the GPU
// writes its words; where it has long written none, or cannot, the driver is asked: it knows of errors too.
Progress CudaDevice::ended(Operation& op, uint32_t slices) {
  const auto reached = [&] { return static_cast<int32_t>(op.ended - slices) >= 0; };
  if (writes_words_) op.ended = op.word->ended.load(std::memory_order_acquire);
  if (reached()) return Progress::kDone;
  if (writes_words_) {
    const auto now = std::chrono::steady_clock::now();
    if (now < op.ask) return Progress::kPending;
    op.ask = now + ask_every();
  }
  const Progress progress = query(op.last);
  if (progress == Progress::kDone) op.ended = op.marked;
  return progress;
}

// What the driver says of all that was queued on a stream; others' chunks count too.
Progress CudaDevice::query(CuStream stream) {
  if (!enter()) return Progress::kFailed;
  const CuResult result = cu_.cuStreamQuery(stream);
  if (result == kCuNotReady) return Progress::kPending;
  return succeeded("cuStreamQuery", result) ? Progress::kDone : Progress::kFailed;
}

Progress CudaDevice::poll(Ticket ticket) {
  if (ticket == kRefusedTicket) return Progress::kFailed;
  const uint64_t slot = ticket & ((1 << kSlotBits) - 1);
  Operation& op = lanes_[ticket >> kSlotBits & 1].operations.at(slot);
  if (op.ticket != ticket) return Progress::kFailed;  // retired already
  if (op.phase == Phase::kRefused || dead_) return retire(op, Progress::kFailed);
  if (op.phase == Phase::kCopying && !advance(op)) op.phase = Phase::kDraining;
  if (op.phase == Phase::kRunning) {
    const Progress progress = ended(op, op.marked);
    if (progress == Progress::kDone) return retire(op, Progress::kDone);
    if (progress == Progress::kFailed) op.phase = Phase::kDraining;
  }
  if (op.phase == Phase::kDraining && drained(op)) return retire(op, Progress::kFailed);
  return dead_ ? retire(op, Progress::kFailed) : Progress::kPending;
}

// Whether nothing of a failed chunk can still touch memory: one more slice, behind all that was queued, has
// ended.
bool CudaDevice::drained(Operation& op) {
  if (!op.drain_marked) {
    op.drain_marked = enter() && hand_over(op, lane(op).kernel, lane(op).dma()) && mark(op, lane(op).dma());
    if (!op.drain_marked) give_up(op);
    return false;
  }
  const Progress progress = ended(op, op.marked);
  if (progress == Progress::kFailed) give_up(op);
  return progress == Progress::kDone;
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
