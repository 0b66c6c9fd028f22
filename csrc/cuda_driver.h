// SPDX-License-Identifier: Apache-2.0
// The CUDA driver API as a table of calls, found at run time: nothing here needs CUDA to build, and a machine
// without a driver imports this package and runs the host device. Tests put a fake into the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace pega {

// Types and values below are the driver's binary interface (cuda.h), under names of our own.
using CuResult = int;
using CuDevice = int;
using CuAddress = uint64_t;
using CuContext = void*;
using CuModule = void*;
using CuFunction = void*;
using CuStream = void*;
using CuEvent = void*;

inline constexpr CuResult kCuSuccess = 0;
inline constexpr CuResult kCuInvalidValue = 1;
inline constexpr CuResult kCuOutOfMemory = 2;
inline constexpr CuResult kCuIllegalAddress = 700;
inline constexpr CuResult kCuNotReady = 600;
inline constexpr CuResult kCuAlreadyRegistered = 712;
inline constexpr CuResult kCuNotSupported = 801;

inline constexpr unsigned kCuStreamNonBlocking = 1;
inline constexpr unsigned kCuEventDisableTiming = 2;
inline constexpr unsigned kCuHostPortable = 1;
inline constexpr unsigned kCuHostDeviceMap = 2;
inline constexpr int kCuAttributeMultiprocessors = 16;
inline constexpr int kCuAttributeComputeMajor = 75;
inline constexpr int kCuAttributeComputeMinor = 76;

// CUmemcpyAttributes.
struct CuCopyAttributes {
  int source_order = 1;  // in stream order
  int hints[4] = {};     // locations of unregistered memory: ours is known to the driver
  unsigned flags = 0;
};

// True for errors after which the context takes no more work (the driver then has stopped what was in
// flight).
bool is_sticky(CuResult result);

// Members carry the driver's own names, so that the code that uses them reads like CUDA.
struct CudaDriver {
  std::function<CuResult(unsigned flags)> cuInit;
  std::function<CuResult(int* count)> cuDeviceGetCount;
  std::function<CuResult(CuDevice* device, int ordinal)> cuDeviceGet;
  std::function<CuResult(char* name, int length, CuDevice device)> cuDeviceGetName;
  std::function<CuResult(int* value, int attribute, CuDevice device)> cuDeviceGetAttribute;
  std::function<CuResult(CuContext* context, CuDevice device)> cuDevicePrimaryCtxRetain;
  std::function<CuResult(CuDevice device)> cuDevicePrimaryCtxRelease;
  std::function<CuResult(CuContext* context)> cuCtxGetCurrent;
  std::function<CuResult(CuContext context)> cuCtxPushCurrent;
  std::function<CuResult(CuContext* context)> cuCtxPopCurrent;
  std::function<CuResult(CuContext context)> cuCtxSetCurrent;
  std::function<CuResult(CuModule* module, const void* image)> cuModuleLoadData;
  std::function<CuResult(CuModule module)> cuModuleUnload;
  std::function<CuResult(CuFunction* function, CuModule module, const char* name)> cuModuleGetFunction;
  std::function<CuResult(CuStream* stream, unsigned flags)> cuStreamCreate;
  std::function<CuResult(CuStream stream)> cuStreamDestroy;
  std::function<CuResult(CuStream stream)> cuStreamSynchronize;
  std::function<CuResult(CuStream stream)> cuStreamQuery;
  std::function<CuResult(CuStream stream, CuEvent event, unsigned flags)> cuStreamWaitEvent;
  // Empty where the driver has none. After all earlier work of the stream, and a system-wide fence.
  std::function<CuResult(CuStream stream, CuAddress address, uint32_t value, unsigned flags)>
      cuStreamWriteValue32;
  std::function<CuResult(CuEvent* event, unsigned flags)> cuEventCreate;
  std::function<CuResult(CuEvent event)> cuEventDestroy;
  std::function<CuResult(CuEvent event, CuStream stream)> cuEventRecord;
  std::function<CuResult(CuEvent event)> cuEventQuery;
  std::function<CuResult(CuAddress* address, size_t bytes)> cuMemAlloc;
  std::function<CuResult(CuAddress address)> cuMemFree;
  std::function<CuResult(void** address, size_t bytes, unsigned flags)> cuMemHostAlloc;
  std::function<CuResult(void* address)> cuMemFreeHost;
  std::function<CuResult(void* address, size_t bytes, unsigned flags)> cuMemHostRegister;
  std::function<CuResult(void* address)> cuMemHostUnregister;
  std::function<CuResult(CuAddress* device, void* host, unsigned flags)> cuMemHostGetDevicePointer;
  std::function<CuResult(CuAddress to, const void* from, size_t bytes, CuStream stream)> cuMemcpyHtoDAsync;
  std::function<CuResult(void* to, CuAddress from, size_t bytes, CuStream stream)> cuMemcpyDtoHAsync;
  // Empty where the driver (before CUDA 13) has none. One attribute for all copies, `first` = 0.
  std::function<CuResult(CuAddress* to, CuAddress* from, size_t* bytes, size_t count,
                         CuCopyAttributes* attributes, size_t* first, size_t attribute_count,
                         CuStream stream)>
      cuMemcpyBatchAsync;
  std::function<CuResult(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                         unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                         CuStream stream, void** arguments, void** extra)>
      cuLaunchKernel;
  std::function<CuResult(CuResult result, const char** text)> cuGetErrorName;
  std::function<CuResult(CuResult result, const char** text)> cuGetErrorString;
};

// The machine's driver, loaded and initialised once. Throws std::runtime_error saying why there is none.
std::shared_ptr<const CudaDriver> load_cuda_driver();

// "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
std::string describe(const CudaDriver& driver, const char* call, CuResult result);

}  // namespace pega
