// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace pega {
namespace {

template <typename Result, typename... Arguments>
void bind(void* library, const char* symbol, std::function<Result(Arguments...)>& call,
          bool optional = false) {
  void* found = dlsym(library, symbol);
  if (!found && optional) return;
  if (!found) {
    throw std::runtime_error(std::string("libcuda.so.1 has no ") + symbol +
                             ": the NVIDIA driver is too old; CUDA 12 needs driver 525 or newer");
  }
  call = reinterpret_cast<Result (*)(Arguments...)>(found);
}

std::shared_ptr<const CudaDriver> load() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!library) {
    const char* why = dlerror();
    throw std::runtime_error(std::string("no CUDA driver: ") + (why ? why : "libcuda.so.1 cannot be loaded") +
                             "; install the NVIDIA driver, or in a container start it with GPU access");
  }
  auto driver = std::make_shared<CudaDriver>();
  // Calls whose binary interface changed have a suffix; the plain name is the old one.
  bind(library, "cuInit", driver->cuInit);
  bind(library, "cuDeviceGetCount", driver->cuDeviceGetCount);
  bind(library, "cuDeviceGet", driver->cuDeviceGet);
  bind(library, "cuDeviceGetName", driver->cuDeviceGetName);
  bind(library, "cuDeviceGetAttribute", driver->cuDeviceGetAttribute);
  bind(library, "cuDevicePrimaryCtxRetain", driver->cuDevicePrimaryCtxRetain);
  bind(library, "cuDevicePrimaryCtxRelease_v2", driver->cuDevicePrimaryCtxRelease);
  bind(library, "cuCtxGetCurrent", driver->cuCtxGetCurrent);
  bind(library, "cuCtxPushCurrent_v2", driver->cuCtxPushCurrent);
  bind(library, "cuCtxPopCurrent_v2", driver->cuCtxPopCurrent);
  bind(library, "cuCtxSetCurrent", driver->cuCtxSetCurrent);
  bind(library, "cuModuleLoadData", driver->cuModuleLoadData);
  bind(library, "cuModuleUnload", driver->cuModuleUnload);
  bind(library, "cuModuleGetFunction", driver->cuModuleGetFunction);
  bind(library, "cuStreamCreate", driver->cuStreamCreate);
  bind(library, "cuStreamDestroy_v2", driver->cuStreamDestroy);
  bind(library, "cuStreamSynchronize", driver->cuStreamSynchronize);
  bind(library, "cuStreamQuery", driver->cuStreamQuery);
  bind(library, "cuStreamWaitEvent", driver->cuStreamWaitEvent);
  bind(library, "cuStreamWriteValue32_v2", driver->cuStreamWriteValue32, true);
  bind(library, "cuEventCreate", driver->cuEventCreate);
  bind(library, "cuEventDestroy_v2", driver->cuEventDestroy);
  bind(library, "cuEventRecord", driver->cuEventRecord);
  bind(library, "cuEventQuery", driver->cuEventQuery);
  bind(library, "cuMemAlloc_v2", driver->cuMemAlloc);
  bind(library, "cuMemFree_v2", driver->cuMemFree);
  bind(library, "cuMemHostAlloc", driver->cuMemHostAlloc);
  bind(library, "cuMemFreeHost", driver->cuMemFreeHost);
  bind(library, "cuMemHostRegister_v2", driver->cuMemHostRegister);
  bind(library, "cuMemHostUnregister", driver->cuMemHostUnregister);
  bind(library, "cuMemHostGetDevicePointer_v2", driver->cuMemHostGetDevicePointer);
  bind(library, "cuMemcpyHtoDAsync_v2", driver->cuMemcpyHtoDAsync);
  bind(library, "cuMemcpyDtoHAsync_v2", driver->cuMemcpyDtoHAsync);
  bind(library, "cuMemcpyBatchAsync_v2", driver->cuMemcpyBatchAsync, true);
  bind(library, "cuLaunchKernel", driver->cuLaunchKernel);
  bind(library, "cuGetErrorName", driver->cuGetErrorName);
  bind(library, "cuGetErrorString", driver->cuGetErrorString);
  const CuResult result = driver->cuInit(0);
  if (result != kCuSuccess) {
    throw std::runtime_error(describe(*driver, "cuInit", result) +
                             "; is a GPU visible (nvidia-smi, CUDA_VISIBLE_DEVICES)?");
  }
  return driver;
}

}  // namespace

bool is_sticky(CuResult result) {
  // Deinitialised, no or lost context, uncorrectable ECC or NVLink errors, and whatever ends a kernel.
  static constexpr CuResult kSticky[] = {4,   46,  201, 214, 220, 226, 700, 702, 709,
                                         710, 714, 715, 716, 717, 718, 719, 721, 999};
  return std::find(std::begin(kSticky), std::end(kSticky), result) != std::end(kSticky);
}

std::shared_ptr<const CudaDriver> load_cuda_driver() {
  // Never unloaded: the driver keeps threads of its own. A failure is not kept: it may mend (a late mount).
  static const auto* loaded = new std::shared_ptr<const CudaDriver>(load());
  return *loaded;
}

std::string describe(const CudaDriver& driver, const char* call, CuResult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  std::string message = std::string(call) + ": " + (name ? name : "error " + std::to_string(result));
  if (text) message += std::string(" (") + text + ")";
  return message;
}

}  // namespace pega
