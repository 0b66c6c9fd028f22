// SPDX-License-Identifier: Apache-2.0
#include "cuda_host_memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <stdexcept>
#include <string>

namespace pega {
namespace {

// The driver holds its lock for the whole of one registration (minutes for hundreds of GiB); pieces let other
// threads in between.
constexpr uint64_t kMaxRegistration = 64ull << 30;
// A piece names host memory by a 48-bit offset (csrc/copy_kernels.cu).
constexpr uint64_t kMaxSpan = 1ull << 48;

std::string gib(uint64_t bytes) {
  const uint64_t tenths = (bytes * 10) >> 30;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " GiB";
}

std::string why_refused(uint64_t bytes) {
  rlimit limit{};
  std::string text = "page-locking " + gib(bytes) + " of host memory failed. ";
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < bytes) {
    text += "The memlock limit is " + gib(limit.rlim_cur) +
            ": raise it (ulimit -l unlimited; docker run --ulimit memlock=-1). ";
  }
  return text +
         "Page-locked memory counts against the memory cgroup (memory.max): lower host_pool_gib or give the "
         "container more memory. ";
}

}  // namespace

void CudaHostMemory::add(uint64_t address, uint64_t bytes) {
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (address == 0 || address % page != 0 || bytes == 0 || address + bytes < address) {
    throw std::invalid_argument("register_host: address " + std::to_string(address) + " and " +
                                std::to_string(bytes) + " bytes given; the address must be page-aligned (" +
                                std::to_string(page) + ") and the size at least 1");
  }
  for (const Region& region : regions_) {
    if (address < region.host + region.bytes && region.host < address + bytes) {
      throw std::invalid_argument("register_host: the range overlaps memory registered at " +
                                  std::to_string(region.host) + "; unregister that first");
    }
  }
  std::vector<Region> added;
  std::string error;
  for (uint64_t done = 0; done < bytes && error.empty();) {
    const uint64_t part = std::min(bytes - done, kMaxRegistration);
    void* host = reinterpret_cast<void*>(address + done);
    CuResult result = cu_->cuMemHostRegister(host, part, kCuHostPortable | kCuHostDeviceMap);
    if (result != kCuSuccess) {
      error = why_refused(bytes) + describe(*cu_, "cuMemHostRegister", result);
      if (result == kCuAlreadyRegistered)
        error += ": some other component of this process registered it already";
      break;
    }
    added.push_back({address + done, part, 0, address});
    result = cu_->cuMemHostGetDevicePointer(&added.back().device, host, 0);
    if (result != kCuSuccess) error = describe(*cu_, "cuMemHostGetDevicePointer", result);
    done += part;
  }
  uint64_t low = UINT64_MAX, high = 0;
  for (const auto* list : {&regions_, &added}) {
    for (const Region& region : *list) {
      low = std::min(low, region.device);
      high = std::max(high, region.device + region.bytes);
    }
  }
  if (error.empty() && high - low > kMaxSpan)
    error = "the GPU sees the registered memory over more than 256 TiB";
  if (!error.empty()) {
    for (const Region& region : added) unregister(region);
    throw std::runtime_error(error);
  }
  regions_.insert(regions_.end(), added.begin(), added.end());
  std::sort(regions_.begin(), regions_.end(),
            [](const Region& a, const Region& b) { return a.host < b.host; });
  update_base();
}

void CudaHostMemory::remove(uint64_t address) {
  const auto mine = [address](const Region& region) { return region.pool == address; };
  if (std::none_of(regions_.begin(), regions_.end(), mine)) {
    throw std::invalid_argument("unregister_host: nothing is registered at " + std::to_string(address));
  }
  for (const Region& region : regions_) {
    if (mine(region)) unregister(region);
  }
  regions_.erase(std::remove_if(regions_.begin(), regions_.end(), mine), regions_.end());
  update_base();
}

void CudaHostMemory::remove_all() {
  for (const Region& region : regions_) unregister(region);
  regions_.clear();
  update_base();
}

const CudaHostMemory::Region* CudaHostMemory::find(uint64_t host) const {
  for (const Region& region : regions_) {  // a handful at most: one per 64 GiB
    if (host >= region.host && host - region.host < region.bytes) return &region;
  }
  return nullptr;
}

void CudaHostMemory::unregister(const Region& region) {
  cu_->cuMemHostUnregister(
      reinterpret_cast<void*>(region.host));  // fails only with the context, which frees it
}

void CudaHostMemory::update_base() {
  base_ = 0;
  for (const Region& region : regions_) base_ = base_ == 0 ? region.device : std::min(base_, region.device);
}

}  // namespace pega
