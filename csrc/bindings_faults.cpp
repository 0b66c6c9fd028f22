// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "fault_device.h"

namespace pega {
namespace {

// action, direction ("": both), nth, probability, seed, delay in ms
using Row = std::tuple<std::string, std::string, uint64_t, double, uint64_t, double>;

std::vector<ChunkFault> faults_of(const std::vector<Row>& rows) {
  std::vector<ChunkFault> faults;
  for (const auto& [action, direction, nth, probability, seed, delay_ms] : rows) {
    ChunkFault f{};
    if (action == "fail") {
      f.action = ChunkFault::Action::kFail;
    } else if (action == "delay") {
      f.action = ChunkFault::Action::kDelay;
    } else if (action == "kill") {
      f.action = ChunkFault::Action::kKillThread;
    } else {
      throw std::invalid_argument("a chunk fault's action is '" + action + "'; allowed: fail, delay, kill");
    }
    for (int d = 0; d < kDirections; ++d)
      f.directions[d] = direction.empty() || d == static_cast<int>(parse_direction(direction));
    f.nth = nth;
    f.probability = probability;
    f.seed = seed;
    f.delay = std::chrono::microseconds(static_cast<int64_t>(delay_ms * 1000));
    faults.push_back(f);
  }
  return faults;
}

}  // namespace

void bind_faults(nb::module_& m) {
  nb::class_<FaultDevice, Device>(m, "FaultDevice")
      .def(
          "__init__",
          [](FaultDevice* self, std::shared_ptr<Device> device, const std::vector<Row>& faults) {
            new (self) FaultDevice(std::move(device), faults_of(faults));
          },
          nb::arg("device"), nb::arg("faults"))
      .def(
          "arm", [](FaultDevice& self, const std::vector<Row>& faults) { self.arm(faults_of(faults)); },
          nb::arg("faults"))
      .def_prop_ro("fired", &FaultDevice::fired);
}

}  // namespace pega
