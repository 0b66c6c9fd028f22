// SPDX-License-Identifier: Apache-2.0
// CudaDevice, what tells whether there is one, and the fake driver that stands in for it in tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bindings.h"
#include "cuda_device.h"
#include "fake_driver.h"

using namespace nb::literals;

namespace pega {
namespace {

using Rows = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

std::string cuda_available() {
  try {
    const auto driver = load_cuda_driver();
    int count = 0;
    const CuResult result = driver->cuDeviceGetCount(&count);
    if (result != kCuSuccess) return describe(*driver, "cuDeviceGetCount", result);
    return count > 0 ? "" : "the CUDA driver sees no device (CUDA_VISIBLE_DEVICES?)";
  } catch (const std::exception& error) {
    return error.what();
  }
}

int cuda_architecture(int ordinal) {
  const auto driver = load_cuda_driver();
  CuDevice device = 0;
  int major = 0, minor = 0;
  CuResult result = driver->cuDeviceGet(&device, ordinal);
  if (!result) result = driver->cuDeviceGetAttribute(&major, kCuAttributeComputeMajor, device);
  if (!result) result = driver->cuDeviceGetAttribute(&minor, kCuAttributeComputeMinor, device);
  if (result) {
    throw std::runtime_error("CUDA device " + std::to_string(ordinal) + ": " +
                             describe(*driver, "cuDeviceGetAttribute", result));
  }
  return major * 10 + minor;
}

void construct(CudaDevice* self, int ordinal, const nb::bytes& cubin, uint64_t stage_bytes,
               uint32_t inflight_chunks, uint32_t copies_per_slice, uint32_t slice_pause_us,
               bool batch_copies, uint32_t ask_driver_us, FakeDriver* fake) {
  const CudaOptions options{stage_bytes,    inflight_chunks, copies_per_slice,
                            slice_pause_us, batch_copies,    ask_driver_us};
  new (self) CudaDevice(fake ? fake->table() : load_cuda_driver(), ordinal,
                        std::string(cubin.c_str(), cubin.size()), options);
}

nb::dict limits(const CudaDevice& device) {
  const DeviceLimits limits = device.limits();
  nb::dict out;
  out["max_chunk_bytes"] = limits.max_chunk_bytes;
  out["max_staged_bytes"] = limits.max_staged_bytes;
  out["max_inflight_chunks"] = limits.max_inflight_chunks;
  out["max_chunk_descriptors"] = limits.max_chunk_descriptors;
  out["max_grid_blocks"] = limits.max_grid_blocks;
  return out;
}

nb::dict stats(const CudaDevice& device, const std::string& direction) {
  const CudaStats seen = device.stats(parse_direction(direction));
  nb::dict out, chunks;
  for (int b = 1; b < kBackends; ++b) chunks[to_string(static_cast<Backend>(b))] = seen.chunks[b];
  out["chunks"] = chunks;
  out["launches"] = seen.launches;
  out["max_grid"] = seen.max_grid;
  out["copies"] = seen.copies;
  out["max_copies_per_slice"] = seen.max_copies_per_slice;
  out["outstanding_bytes"] = seen.outstanding_bytes;
  out["peak_outstanding_bytes"] = seen.peak_outstanding_bytes;
  out["submit_ns"] = seen.submit_ns;
  out["unstaged_chunks"] = seen.unstaged_chunks;
  return out;
}

// One chunk, start to end, as an engine would move it.
void copy(CudaDevice& device, const std::string& direction, const std::string& backend, const Rows& rows,
          uint32_t grid, uint32_t inflight_slot) {
  std::vector<Range> ranges(rows.shape(0));
  uint64_t total = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    ranges[i] = {rows.data()[3 * i], rows.data()[3 * i + 1], rows.data()[3 * i + 2]};
    total += ranges[i].bytes;
  }
  const Chunk chunk{parse_direction(direction),
                    parse_backend(backend),
                    ranges.data(),
                    ranges.size(),
                    total,
                    grid,
                    inflight_slot};
  nb::gil_scoped_release release;
  const Ticket ticket = device.submit(chunk);
  Progress progress;
  while ((progress = device.poll(ticket)) == Progress::kPending) device.relax(std::chrono::microseconds(10));
  if (progress == Progress::kFailed) throw std::runtime_error(device.last_error());
}

}  // namespace

void bind_cuda(nb::module_& m) {
  m.def("cuda_available", &cuda_available);
  m.def("cuda_architecture", &cuda_architecture, "ordinal"_a);

  nb::class_<FakeDriver>(m, "FakeDriver")
      .def(nb::init<uint64_t, uint32_t, bool>(), "seed"_a, "eagerness"_a = 3, "writes_words"_a = true)
      .def("fail", &FakeDriver::fail, "nth"_a, "result"_a)
      .def("fail_from", &FakeDriver::fail_from, "nth"_a, "result"_a)
      .def("settle", &FakeDriver::settle)
      .def("allocate", &FakeDriver::allocate, "nbytes"_a)
      .def(
          "view",
          [](FakeDriver& fake, uint64_t address, size_t nbytes) {
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(fake.resolve(address, nbytes), {nbytes},
                                                                nb::find(fake));
          },
          "address"_a, "nbytes"_a)
      .def_prop_ro("calls", &FakeDriver::calls)
      .def_prop_ro("last_failed", &FakeDriver::last_failed)
      .def_prop_ro("most_copies_ready", &FakeDriver::most_copies_ready)
      .def_prop_ro("live", &FakeDriver::live)
      .def_prop_ro("violations", &FakeDriver::violations);

  const CudaOptions defaults;
  nb::class_<CudaDevice, Device>(m, "CudaDevice")
      .def("__init__", &construct, "ordinal"_a, "cubin"_a, nb::kw_only(),
           "stage_bytes"_a = defaults.stage_bytes, "inflight_chunks"_a = defaults.inflight_chunks,
           "copies_per_slice"_a = defaults.copies_per_slice, "slice_pause_us"_a = defaults.slice_pause_us,
           "batch_copies"_a = defaults.batch_copies, "ask_driver_us"_a = defaults.ask_driver_us,
           "driver"_a = nb::none(), nb::keep_alive<1, 10>())
      .def("register_host", &CudaDevice::register_host, "address"_a, "nbytes"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("unregister_host", &CudaDevice::unregister_host, "address"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("name", [](const CudaDevice& device) { return std::string(device.name()); })
      .def_prop_ro("limits", &limits)
      .def_prop_ro("last_error", &CudaDevice::last_error)
      .def(
          "healthy",
          [](const CudaDevice& d, const std::string& direction) {
            return d.healthy(parse_direction(direction));
          },
          "direction"_a)
      .def("stats", &stats, "direction"_a)
      .def("copy", &copy, "direction"_a, "backend"_a, "ranges"_a, "grid"_a = 8, "inflight_slot"_a = 0);
}

}  // namespace pega
