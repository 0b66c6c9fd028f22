// SPDX-License-Identifier: Apache-2.0
#include "fake_driver.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <set>
#include <stdexcept>

namespace pega {
namespace {

constexpr uint64_t kMappedShift = 1ull << 50;  // how the GPU sees host memory ...
constexpr uint64_t kDeviceShift = 1ull << 52;  // ... and its own
constexpr CuResult kInvalidHandle = 400;

char load_function, save_function;  // their addresses are the function handles

// The entry of `map` that holds [address, address + bytes).
bool holds(const std::map<uint64_t, uint64_t>& map, uint64_t address, uint64_t bytes) {
  auto next = map.upper_bound(address);
  if (next == map.begin()) return false;
  const auto& [start, length] = *std::prev(next);
  return address - start <= length && bytes <= length - (address - start);
}

std::string hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

FakeDriver::FakeDriver(uint64_t seed, uint32_t eagerness, bool writes_words)
    : table_(std::make_shared<CudaDriver>()), random_(seed), eagerness_(eagerness) {
  fill_table(writes_words);
}

uint64_t FakeDriver::live() const {
  return retained_ + modules_ + streams_.size() + events_.size() + device_memory_.size() -
         test_memory_.size() + pinned_.size() + registered_.size();
}

// Every call starts here: counts, fails if it is this call's turn, and lets time pass.
CuResult FakeDriver::enter(const char* name) {
  ++calls_;
  if (broken_) return broken_;
  const bool wait = fail_to_ > fail_from_ && std::string(name) == "cuStreamSynchronize";
  if (calls_ >= fail_from_ && calls_ <= fail_to_ && !wait) {
    last_failed_ = name;
    if (is_sticky(failure_)) {
      broken_ = failure_;
      for (auto& entry : streams_) entry.second->queue.clear();  // the context's work ends with it
    }
    return failure_;
  }
  run_some();
  return broken_;
}

CuResult FakeDriver::violate(const std::string& what) {
  violations_.push_back(what);
  broken_ = kCuIllegalAddress;
  for (auto& entry : streams_) entry.second->queue.clear();
  return broken_;
}

CuResult FakeDriver::enqueue(CuStream stream, Work work) {
  auto found = streams_.find(stream);
  if (found == streams_.end()) return kInvalidHandle;
  found->second->queue.push_back(work);
  return kCuSuccess;
}

void FakeDriver::count_copies_ready() {
  uint64_t ready[2] = {};
  for (const auto& entry : streams_) {
    std::set<std::shared_ptr<bool>> own;  // what a stream has to record itself holds up nothing of it
    for (const Work& work : entry.second->queue) {
      if (work.kind == Work::kRecord) own.insert(work.record);
      if (work.kind == Work::kWait && !*work.record && !own.count(work.record)) break;
      if (work.kind == Work::kKernel) break;
      if (work.kind == Work::kCopy) ++ready[work.to_host];
    }
  }
  most_copies_ready_ = std::max({most_copies_ready_, ready[0], ready[1]});
}

void FakeDriver::run_some() {
  count_copies_ready();
  for (uint64_t steps = random_() % (eagerness_ + 1); steps > 0 && !streams_.empty(); --steps) {
    auto turn = std::next(streams_.begin(), static_cast<long>(random_() % streams_.size()));
    run_one(*turn->second);
  }
}

void FakeDriver::settle() {
  std::lock_guard<std::mutex> lock(mutex_);
  run_all();
}

void FakeDriver::run_all() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& entry : streams_) moved |= run_one(*entry.second);
  }
}

bool FakeDriver::run_one(Stream& stream) {
  if (stream.queue.empty()) return false;
  const Work work = stream.queue.front();
  if (work.kind == Work::kWait && !*work.record) return false;
  stream.queue.pop_front();
  if (work.kind == Work::kRecord) *work.record = true;
  if (work.kind == Work::kKernel) run_kernel(work);
  if (work.kind == Work::kWrite) {
    if (char* word = seen_by_gpu(work.device, sizeof(uint32_t))) {
      reinterpret_cast<std::atomic<uint32_t>*>(word)->store(static_cast<uint32_t>(work.count));
    } else {
      violate("a stream writes a word at " + hex(work.device));
    }
  }
  if (work.kind == Work::kCopy) {
    char* device = seen_by_gpu(work.device, work.bytes);
    if (!device || !page_locked(reinterpret_cast<uint64_t>(work.host), work.bytes)) {
      violate("copy of " + std::to_string(work.bytes) + " bytes, device " + hex(work.device));
    } else if (work.to_host) {
      std::memcpy(work.host, device, work.bytes);
    } else {
      std::memcpy(device, work.host, work.bytes);
    }
  }
  return true;
}

// csrc/copy_kernels.cu in a few lines: the list is read when the kernel runs, not when it is launched.
void FakeDriver::run_kernel(const Work& work) {
  if (work.batch < 1 || work.batch > 32) {
    violate("kernel launched with batches of " + std::to_string(work.batch));
    return;
  }
  for (uint32_t i = 0; i < work.piece_count; ++i) {
    uint64_t piece[2];
    const char* entry = seen_by_gpu(work.pieces + i * sizeof piece, sizeof piece);
    if (!entry) {
      violate("kernel reads piece " + std::to_string(i) + " outside of its list");
      return;
    }
    std::memcpy(piece, entry, sizeof piece);
    const uint64_t bytes = (piece[1] >> 48) + 1;
    char* device = seen_by_gpu(piece[0], bytes);
    char* host = seen_by_gpu(work.base + (piece[1] & ((1ull << 48) - 1)), bytes);
    const bool wide = ((piece[0] | piece[1] | bytes) & 15) == 0;
    if (!device || !host || (work.aligned && !wide)) {
      violate("kernel copies " + std::to_string(bytes) + " bytes at " + hex(piece[0]) + ", " + hex(piece[1]));
      return;
    }
    std::memcpy(work.to_host ? host : device, work.to_host ? device : host, bytes);
  }
}

char* FakeDriver::seen_by_gpu(CuAddress address, uint64_t bytes) const {
  if (address >= kDeviceShift) {
    return holds(device_memory_, address, bytes) ? reinterpret_cast<char*>(address - kDeviceShift) : nullptr;
  }
  if (address < kMappedShift || !page_locked(address - kMappedShift, bytes)) return nullptr;
  return reinterpret_cast<char*>(address - kMappedShift);
}

bool FakeDriver::page_locked(uint64_t host, uint64_t bytes) const {
  return holds(pinned_, host, bytes) || holds(registered_, host, bytes);
}

CuAddress FakeDriver::allocate(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  const CuAddress address = allocate_device(bytes);
  test_memory_[address] = bytes;
  return address;
}

CuAddress FakeDriver::allocate_device(uint64_t bytes) {
  std::unique_ptr<char[]> memory(new char[bytes]);  // as it comes, like the real thing
  const uint64_t host = reinterpret_cast<uint64_t>(memory.get());
  owned_[host] = std::move(memory);
  device_memory_[host + kDeviceShift] = bytes;
  return host + kDeviceShift;
}

char* FakeDriver::resolve(CuAddress address, uint64_t bytes) {
  if (!holds(test_memory_, address, bytes))
    throw std::out_of_range("not memory of this fake: " + hex(address));
  return reinterpret_cast<char*>(address - kDeviceShift);
}

void FakeDriver::fill_table(bool writes_words) {
  CudaDriver& cu = *table_;
  // A handle is the address of its object.
  const auto create = [](auto& owner, auto object, void** handle) {
    *handle = object.get();
    owner[*handle] = std::move(object);
  };
  const auto call = [this](const char* name, auto body) {
    return [this, name, body](auto... arguments) -> CuResult {
      std::lock_guard<std::mutex> lock(mutex_);
      const CuResult result = enter(name);
      return result != kCuSuccess ? result : body(arguments...);
    };
  };
  // Releasing works even in a broken context, and is then the end of it all.
  const auto release = [this](auto body) {
    return [this, body](auto... arguments) -> CuResult {
      std::lock_guard<std::mutex> lock(mutex_);
      return body(arguments...);
    };
  };
  cu.cuInit = call("cuInit", [](unsigned) { return kCuSuccess; });
  cu.cuDeviceGetCount = call("cuDeviceGetCount", [](int* count) { return *count = 1, kCuSuccess; });
  cu.cuDeviceGet = call("cuDeviceGet", [](CuDevice* device, int) { return *device = 0, kCuSuccess; });
  cu.cuDeviceGetName = call("cuDeviceGetName", [](char* name, int length, CuDevice) {
    return std::snprintf(name, static_cast<size_t>(length), "fake"), kCuSuccess;
  });
  cu.cuDeviceGetAttribute = call("cuDeviceGetAttribute", [](int* value, int, CuDevice) {
    return *value = 2, kCuSuccess;  // multiprocessors
  });
  cu.cuDevicePrimaryCtxRetain = call("cuDevicePrimaryCtxRetain", [this](CuContext* context, CuDevice) {
    return ++retained_, *context = &context_, kCuSuccess;
  });
  cu.cuDevicePrimaryCtxRelease = release([this](CuDevice) { return --retained_, kCuSuccess; });
  cu.cuCtxGetCurrent =
      call("cuCtxGetCurrent", [this](CuContext* context) { return *context = current_, kCuSuccess; });
  cu.cuCtxSetCurrent =
      call("cuCtxSetCurrent", [this](CuContext context) { return current_ = context, kCuSuccess; });
  cu.cuCtxPushCurrent = call("cuCtxPushCurrent", [this](CuContext context) {
    return context_stack_.push_back(current_), current_ = context, kCuSuccess;
  });
  cu.cuCtxPopCurrent = release([this](CuContext* context) {
    *context = current_;
    current_ = context_stack_.back();
    return context_stack_.pop_back(), kCuSuccess;
  });
  cu.cuModuleLoadData = call("cuModuleLoadData", [this](CuModule* module, const void*) {
    return ++modules_, *module = &modules_, kCuSuccess;
  });
  cu.cuModuleUnload = release([this](CuModule) { return --modules_, kCuSuccess; });
  cu.cuModuleGetFunction = call("cuModuleGetFunction", [](CuFunction* function, CuModule, const char* name) {
    if (std::string(name) != "pega_load" && std::string(name) != "pega_save") return CuResult{500};
    return *function = std::string(name) == "pega_load" ? &load_function : &save_function, kCuSuccess;
  });
  cu.cuStreamCreate = call("cuStreamCreate", [this, create](CuStream* stream, unsigned) {
    return create(streams_, std::make_unique<Stream>(), stream), kCuSuccess;
  });
  cu.cuStreamDestroy =
      release([this](CuStream stream) { return streams_.erase(stream) ? kCuSuccess : kInvalidHandle; });
  cu.cuStreamSynchronize = call("cuStreamSynchronize", [this](CuStream) { return run_all(), broken_; });
  cu.cuStreamWaitEvent = call("cuStreamWaitEvent", [this](CuStream stream, CuEvent event, unsigned) {
    Work work{Work::kWait};
    work.record = events_.at(event)->latest;
    return enqueue(stream, work);
  });
  cu.cuStreamQuery = call("cuStreamQuery", [this](CuStream stream) {
    auto found = streams_.find(stream);
    if (found == streams_.end()) return kInvalidHandle;
    return found->second->queue.empty() ? kCuSuccess : kCuNotReady;
  });
  cu.cuStreamWriteValue32 = call(
      "cuStreamWriteValue32", [this, writes_words](CuStream stream, CuAddress at, uint32_t value, unsigned) {
        if (!writes_words) return kCuNotSupported;
        Work work{Work::kWrite};
        work.device = at, work.count = value;
        return enqueue(stream, work);
      });
  cu.cuEventCreate = call("cuEventCreate", [this, create](CuEvent* event, unsigned) {
    return create(events_, std::make_unique<Event>(), event), kCuSuccess;
  });
  cu.cuEventDestroy =
      release([this](CuEvent event) { return events_.erase(event) ? kCuSuccess : kInvalidHandle; });
  cu.cuEventRecord = call("cuEventRecord", [this](CuEvent event, CuStream stream) {
    Work work{Work::kRecord};
    work.record = events_.at(event)->latest =
        std::make_shared<bool>(stream == nullptr);  // compute stream: idle
    if (stream == nullptr) return kCuSuccess;
    return enqueue(stream, work);
  });
  cu.cuEventQuery = call("cuEventQuery", [this](CuEvent event) {
    return *events_.at(event)->latest ? kCuSuccess : kCuNotReady;
  });
  cu.cuMemAlloc = call("cuMemAlloc", [this](CuAddress* address, size_t bytes) {
    return *address = allocate_device(bytes), kCuSuccess;
  });
  cu.cuMemFree = release([this](CuAddress address) {
    owned_.erase(address - kDeviceShift);
    return device_memory_.erase(address) ? kCuSuccess : kCuInvalidValue;
  });
  cu.cuMemHostAlloc = call("cuMemHostAlloc", [this](void** address, size_t bytes, unsigned) {
    std::unique_ptr<char[]> memory(new char[bytes]);  // as it comes, like the real thing
    *address = memory.get();
    const uint64_t host = reinterpret_cast<uint64_t>(*address);
    owned_[host] = std::move(memory);
    return pinned_[host] = bytes, kCuSuccess;
  });
  cu.cuMemFreeHost = release([this](void* address) {
    owned_.erase(reinterpret_cast<uint64_t>(address));
    return pinned_.erase(reinterpret_cast<uint64_t>(address)) ? kCuSuccess : kCuInvalidValue;
  });
  cu.cuMemHostRegister = call("cuMemHostRegister", [this](void* address, size_t bytes, unsigned) {
    const uint64_t host = reinterpret_cast<uint64_t>(address);
    if (registered_.count(host)) return kCuAlreadyRegistered;
    return registered_[host] = bytes, kCuSuccess;
  });
  cu.cuMemHostUnregister = release([this](void* address) {
    return registered_.erase(reinterpret_cast<uint64_t>(address)) ? kCuSuccess : kCuInvalidValue;
  });
  cu.cuMemHostGetDevicePointer =
      call("cuMemHostGetDevicePointer", [this](CuAddress* device, void* host, unsigned) {
        if (!page_locked(reinterpret_cast<uint64_t>(host), 1)) return kCuInvalidValue;
        return *device = reinterpret_cast<uint64_t>(host) + kMappedShift, kCuSuccess;
      });
  const auto copy = [this](CuAddress device, char* host, size_t bytes, bool to_host, CuStream stream) {
    Work work{Work::kCopy};
    work.device = device, work.host = host, work.bytes = bytes, work.to_host = to_host;
    return enqueue(stream, work);
  };
  cu.cuMemcpyHtoDAsync =
      call("cuMemcpyHtoDAsync", [copy](CuAddress to, const void* from, size_t bytes, CuStream on) {
        return copy(to, static_cast<char*>(const_cast<void*>(from)), bytes, false, on);
      });
  cu.cuMemcpyDtoHAsync =
      call("cuMemcpyDtoHAsync", [copy](void* to, CuAddress from, size_t bytes, CuStream on) {
        return copy(from, static_cast<char*>(to), bytes, true, on);
      });
  // One that fails may have queued some of its copies: here the first half.
  cu.cuMemcpyBatchAsync = [this, copy](CuAddress* to, CuAddress* from, size_t* bytes, size_t count,
                                       CuCopyAttributes*, size_t*, size_t, CuStream on) {
    std::lock_guard<std::mutex> lock(mutex_);
    const CuResult result = enter("cuMemcpyBatchAsync");
    if (broken_) return broken_;
    for (size_t i = 0; i < (result == kCuSuccess ? count : count / 2); ++i) {
      const bool to_host = to[i] < kMappedShift;
      const CuResult queued = copy(to_host ? from[i] : to[i],
                                   reinterpret_cast<char*>(to_host ? to[i] : from[i]), bytes[i], to_host, on);
      if (queued != kCuSuccess) return queued;
    }
    return result;
  };
  cu.cuLaunchKernel =
      call("cuLaunchKernel", [this](CuFunction function, unsigned grid, unsigned, unsigned, unsigned block,
                                    unsigned, unsigned, unsigned, CuStream stream, void** arguments, void**) {
        if (grid == 0 || block != 256) return kCuInvalidValue;
        Work work{Work::kKernel};
        work.to_host = function == &save_function;
        std::memcpy(&work.pieces, arguments[0], sizeof work.pieces);
        std::memcpy(&work.piece_count, arguments[1], sizeof work.piece_count);
        std::memcpy(&work.batch, arguments[2], sizeof work.batch);
        std::memcpy(&work.base, arguments[3], sizeof work.base);
        std::memcpy(&work.aligned, arguments[4], sizeof work.aligned);
        return enqueue(stream, work);
      });
  cu.cuGetErrorName = [](CuResult, const char** text) { return *text = "FAKE_ERROR", kCuSuccess; };
  cu.cuGetErrorString = [](CuResult, const char** text) { return *text = "made to fail", kCuSuccess; };
}

}  // namespace pega
