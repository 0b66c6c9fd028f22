// SPDX-License-Identifier: Apache-2.0
#include "cuda_device.h"

#include <algorithm>
#include <stdexcept>

namespace pega {
namespace {

// Steps may overlap by a few, each with one event, while a job waits for its own.
constexpr uint32_t kComputeEvents = 256;

}  // namespace

CudaDevice::CudaDevice(std::shared_ptr<const CudaDriver> driver, int ordinal, const std::string& cubin,
                       const CudaOptions& options)
    : driver_(std::move(driver)), cu_(*driver_), options_(options), host_(driver_) {
  if (options.inflight_chunks < 1 || options.inflight_chunks > kMaxInflightChunks ||
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
  max_grid_ = std::max(1, multiprocessors) * (2048 / kThreadsPerBlock);  // as many as could ever be resident
  require("cuModuleLoadData", cu_.cuModuleLoadData(&module_, cubin.data()));
  const uint64_t list_length = piece_capacity(kMaxDescriptors, kMaxChunkBytes);
  const size_t words_bytes = kDirections * options_.inflight_chunks * sizeof(Word);
  require("cuMemHostAlloc", cu_.cuMemHostAlloc(&words_, words_bytes, kCuHostPortable | kCuHostDeviceMap));
  uint64_t words_device = 0;
  require("cuMemHostGetDevicePointer", cu_.cuMemHostGetDevicePointer(&words_device, words_, 0));
  writes_words_ = static_cast<bool>(cu_.cuStreamWriteValue32);
  Word* word = static_cast<Word*>(words_);
  for (int d = 0; d < kDirections; ++d) {
    Lane& lane = lanes_[d];
    const bool load = static_cast<Direction>(d) == Direction::kLoad;
    require("cuModuleGetFunction",
            cu_.cuModuleGetFunction(&lane.function, module_, load ? "pega_load" : "pega_save"));
    for (CuStream& stream : lane.turns)
      require("cuStreamCreate", cu_.cuStreamCreate(&stream, kCuStreamNonBlocking));
    require("cuStreamCreate", cu_.cuStreamCreate(&lane.kernel, kCuStreamNonBlocking));
    require("cuStreamCreate", cu_.cuStreamCreate(&lane.signal, kCuStreamNonBlocking));
    lane.operations.resize(options_.inflight_chunks);
    for (Operation& op : lane.operations) {
      op.word = new (word++) Word;
      op.word_device = words_device + (reinterpret_cast<char*>(op.word) - static_cast<char*>(words_));
      require("cuEventCreate", cu_.cuEventCreate(&op.handoff, kCuEventDisableTiming));
      op.runs.resize(1 + options_.stage_bytes / kMinStagedRun);
      require("cuMemAlloc", cu_.cuMemAlloc(&op.stage, options_.stage_bytes + kStageSlack));
      void* list = nullptr;
      require("cuMemHostAlloc",
              cu_.cuMemHostAlloc(&list, list_length * sizeof(Piece), kCuHostPortable | kCuHostDeviceMap));
      op.pieces = static_cast<Piece*>(list);
      require("cuMemHostGetDevicePointer", cu_.cuMemHostGetDevicePointer(&op.pieces_device, list, 0));
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
      if (op.handoff) cu_.cuEventDestroy(op.handoff);
    }
  }
  for (CuStream stream : streams()) cu_.cuStreamDestroy(stream);
  if (words_) cu_.cuMemFreeHost(words_);
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
    for (CuStream stream : {lane.turns[0], lane.turns[1], lane.kernel, lane.signal}) {
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

}  // namespace pega
