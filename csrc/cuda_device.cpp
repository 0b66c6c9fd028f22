// SPDX-License-Identifier: Apache-2.0
#include "cuda_device.h"

#include <algorithm>
#include <stdexcept>

namespace pega {
namespace {

constexpr uint32_t kThreads = 32 * kWarpsPerBlock;
constexpr uint32_t kMaxDescriptors = 64 << 10;
constexpr uint64_t kMaxChunkBytes = 256 << 20;
// A staged chunk pays one copy-engine command (2.6 us on an H200's host) per run of host memory; a run of 64
// KiB takes 1.3 us on PCIe 5. Where runs are shorter on average, the kernel writes host memory itself.
constexpr uint64_t kMinStagedRun = 64 << 10;
constexpr uint64_t kStageSlack =
    64 << 10;  // each run keeps the alignment of its host address: < 16 bytes a run
// Steps may overlap by a few, each with one event, while a job waits for its own.
constexpr uint32_t kComputeEvents = 256;
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

CudaDevice::CudaDevice(std::shared_ptr<const CudaDriver> driver, int ordinal, const std::string& cubin,
                       const CudaOptions& options)
    : driver_(std::move(driver)), cu_(*driver_), options_(options), host_(driver_) {
  if (options.inflight_chunks < 1 || options.inflight_chunks >= (1u << kSlotBits) ||
      options.stage_bytes < 1 || options.stage_bytes > kMaxChunkBytes || options.copies_per_slice < 1) {
    throw std::invalid_argument(
        "CudaDevice: inflight_chunks must be 1 to 127, stage_bytes 1 to 268435456, "
        "copies_per_slice at least 1");
  }
  int count = 0;
  require("cuDeviceGetCount", cu_.cuDeviceGetCount(&count));
  if (ordinal < 0 || ordinal >= count) {
    throw std::runtime_error("CUDA device " + std::to_string(ordinal) + " asked for; this process sees " +
                             std::to_string(count) + " (CUDA_VISIBLE_DEVICES limits them)");
  }
  require("cuDeviceGet", cu_.cuDeviceGet(&device_, ordinal));
  require("cuDevicePrimaryCtxRetain", cu_.cuDevicePrimaryCtxRetain(&context_, device_));
  try {
    create(cubin);
  } catch (...) {
    destroy();
    throw;
  }
}

CudaDevice::~CudaDevice() { destroy(); }

void CudaDevice::create(const std::string& cubin) {
  CuContext previous = nullptr;
  require("cuCtxGetCurrent", cu_.cuCtxGetCurrent(&previous));
  if (previous != context_) require("cuCtxSetCurrent", cu_.cuCtxSetCurrent(context_));
  char name[128] = {};
  require("cuDeviceGetName", cu_.cuDeviceGetName(name, sizeof(name) - 1, device_));
  name_ = std::string("cuda:") + name;
  int multiprocessors = 0;
  require("cuDeviceGetAttribute",
          cu_.cuDeviceGetAttribute(&multiprocessors, kCuAttributeMultiprocessors, device_));
  max_grid_ = std::max(1, multiprocessors) * (2048 / kThreads);  // as many as could ever be resident
  require("cuModuleLoadData", cu_.cuModuleLoadData(&module_, cubin.data()));
  const uint64_t list_length = piece_capacity(kMaxDescriptors, kMaxChunkBytes);
  for (int d = 0; d < kDirections; ++d) {
    Lane& lane = lanes_[d];
    const bool load = static_cast<Direction>(d) == Direction::kLoad;
    require("cuModuleGetFunction",
            cu_.cuModuleGetFunction(&lane.function, module_, load ? "pega_load" : "pega_save"));
    require("cuStreamCreate", cu_.cuStreamCreate(&lane.dma, kCuStreamNonBlocking));
    require("cuStreamCreate", cu_.cuStreamCreate(&lane.kernel, kCuStreamNonBlocking));
    lane.operations.resize(options_.inflight_chunks);
    for (Operation& op : lane.operations) {
      require("cuMemAlloc", cu_.cuMemAlloc(&op.stage, options_.stage_bytes + kStageSlack));
      void* list = nullptr;
      require("cuMemHostAlloc",
              cu_.cuMemHostAlloc(&list, list_length * sizeof(Piece), kCuHostPortable | kCuHostDeviceMap));
      op.pieces = static_cast<Piece*>(list);
      require("cuMemHostGetDevicePointer", cu_.cuMemHostGetDevicePointer(&op.pieces_device, list, 0));
      for (CuEvent* event : {&op.slice_event[0], &op.slice_event[1], &op.kernel_event}) {
        require("cuEventCreate", cu_.cuEventCreate(event, kCuEventDisableTiming));
      }
    }
  }
  const size_t slice = std::min(options_.copies_per_slice, kMaxDescriptors);
  to_.reserve(slice), from_.reserve(slice), bytes_.reserve(slice);
  events_.resize(kComputeEvents);
  for (uint32_t i = 0; i < kComputeEvents; ++i) {
    require("cuEventCreate", cu_.cuEventCreate(&events_[i], kCuEventDisableTiming));
    free_events_.push_back(kComputeEvents - 1 - i);
  }
  if (previous != context_) cu_.cuCtxSetCurrent(previous);
}

void CudaDevice::destroy() {
  // Nothing here can be mended by the caller: a dead context frees everything by itself.
  CuContext previous = nullptr;
  cu_.cuCtxGetCurrent(&previous);
  if (previous != context_) cu_.cuCtxSetCurrent(context_);
  for (CuStream stream : streams()) cu_.cuStreamSynchronize(stream);
  for (Lane& lane : lanes_) {
    for (Operation& op : lane.operations) {
      if (op.stage) cu_.cuMemFree(op.stage);
      if (op.pieces) cu_.cuMemFreeHost(op.pieces);
      for (CuEvent event : {op.slice_event[0], op.slice_event[1], op.kernel_event}) {
        if (event) cu_.cuEventDestroy(event);
      }
    }
  }
  for (CuStream stream : streams()) cu_.cuStreamDestroy(stream);
  for (CuEvent event : events_) {
    if (event) cu_.cuEventDestroy(event);
  }
  host_.remove_all();
  if (module_) cu_.cuModuleUnload(module_);
  if (previous != context_) cu_.cuCtxSetCurrent(previous);
  cu_.cuDevicePrimaryCtxRelease(device_);
}

std::vector<CuStream> CudaDevice::streams() const {
  std::vector<CuStream> created;
  for (const Lane& lane : lanes_) {
    for (CuStream stream : {lane.dma, lane.kernel}) {
      if (stream) created.push_back(stream);
    }
  }
  return created;
}

void CudaDevice::require(const char* call, CuResult result) const {
  if (result == kCuSuccess) return;
  throw std::runtime_error(describe(cu_, call, result));
}

bool CudaDevice::succeeded(const char* call, CuResult result) {
  if (result == kCuSuccess) return true;
  if (!dead_) note_error(describe(cu_, call, result));  // what follows the end of the device is no news
  if (is_sticky(result)) dead_ = true;
  return false;
}

void CudaDevice::note_error(const std::string& why) {
  std::lock_guard<std::mutex> lock(error_mutex_);
  error_ = why;
}

std::string CudaDevice::last_error() const {
  std::lock_guard<std::mutex> lock(error_mutex_);
  return error_;
}

// Makes the context current on the engine thread, for good: the primary context is what everyone there wants.
bool CudaDevice::enter() {
  CuContext current = nullptr;
  if (!succeeded("cuCtxGetCurrent", cu_.cuCtxGetCurrent(&current))) return false;
  return current == context_ || succeeded("cuCtxSetCurrent", cu_.cuCtxSetCurrent(context_));
}

void CudaDevice::register_host(uint64_t address, uint64_t bytes) {
  require("cuCtxPushCurrent", cu_.cuCtxPushCurrent(context_));
  CuContext popped = nullptr;
  try {
    host_.add(address, bytes);
  } catch (...) {
    cu_.cuCtxPopCurrent(&popped);
    throw;
  }
  cu_.cuCtxPopCurrent(&popped);
}

void CudaDevice::unregister_host(uint64_t address) {
  require("cuCtxPushCurrent", cu_.cuCtxPushCurrent(context_));
  CuContext popped = nullptr;
  try {
    host_.remove(address);
  } catch (...) {
    cu_.cuCtxPopCurrent(&popped);
    throw;
  }
  cu_.cuCtxPopCurrent(&popped);
}

DeviceLimits CudaDevice::limits() const {
  return {kMaxChunkBytes, options_.inflight_chunks, kMaxDescriptors, max_grid_,
          std::min<uint64_t>(options_.stage_bytes, kMaxChunkBytes)};
}

EventId CudaDevice::record_event(uint64_t stream) {
  if (dead_ || disabled_) throw std::runtime_error("the CUDA device is disabled: " + last_error());
  uint32_t index;
  {
    std::lock_guard<std::mutex> lock(events_mutex_);
    if (free_events_.empty()) {
      throw std::runtime_error("all " + std::to_string(kComputeEvents) +
                               " compute events are in use: jobs are waiting for steps that do not end");
    }
    index = free_events_.back();
    free_events_.pop_back();
  }
  // The stream's own thread normally has this context; stream 0 means that of the current context.
  CuContext current = nullptr;
  CuResult result = cu_.cuCtxGetCurrent(&current);
  const bool push = result == kCuSuccess && current != context_;
  if (push) result = cu_.cuCtxPushCurrent(context_);
  if (result == kCuSuccess) {
    result = cu_.cuEventRecord(events_[index], reinterpret_cast<CuStream>(stream));
    if (push) cu_.cuCtxPopCurrent(&current);
  }
  if (!succeeded("cuEventRecord on the compute stream", result)) {
    release_event(index + 1);
    throw std::runtime_error(last_error());
  }
  return index + 1;
}

Progress CudaDevice::query_event(EventId event) {
  if (event == 0) return Progress::kDone;
  if (dead_ || event > kComputeEvents || !enter()) return Progress::kFailed;
  const CuResult result = cu_.cuEventQuery(events_[event - 1]);
  if (result == kCuNotReady) return Progress::kPending;
  return succeeded("cuEventQuery of the compute stream", result) ? Progress::kDone : Progress::kFailed;
}

void CudaDevice::release_event(EventId event) {
  if (event == 0 || event > kComputeEvents) return;
  std::lock_guard<std::mutex> lock(events_mutex_);
  free_events_.push_back(static_cast<uint32_t>(event - 1));
}

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
  if (!succeeded("cuLaunchKernel", cu_.cuLaunchKernel(lane(op).function, shape.grid, 1, 1, kThreads, 1, 1, 0,
                                                      stream, arguments, nullptr))) {
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
