// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "engine.h"
#include "host_device.h"
#include "sim_device.h"

namespace pega {
namespace {

struct Dispose {
  void operator()(TransferEngine* engine) const {
    nb::gil_scoped_release release;  // it may have to wait for copies
    TransferEngine::dispose(engine);
  }
};

std::tuple<uint64_t, uint64_t> pair(const std::array<uint64_t, kDirections>& by_direction) {
  return {by_direction[0], by_direction[1]};
}

struct EngineHandle {
  std::unique_ptr<TransferEngine, Dispose> engine;
};

void make_engine(EngineHandle* self, std::shared_ptr<Device> device, const PoolHandle& pool,
                 std::vector<GroupLayout> layouts, std::vector<uint32_t> group_classes,
                 const DeviceProfile& profile, const std::string& objective, const PolicySpec* load_policy,
                 const PolicySpec* save_policy, bool threaded, size_t queue_limit, bool manual_clock) {
  if (manual_clock && threaded) throw std::invalid_argument("manual_clock needs threaded=False");
  if (queue_limit == 0) throw std::invalid_argument("queue_limit is 0; must be at least 1");
  EngineOptions options;
  options.objective = parse_objective(objective);
  if (load_policy != nullptr) options.policy[static_cast<int>(Direction::kLoad)] = *load_policy;
  if (save_policy != nullptr) options.policy[static_cast<int>(Direction::kSave)] = *save_policy;
  options.threaded = threaded;
  options.manual_clock = manual_clock;
  options.queue_limit = queue_limit;
  new (self) EngineHandle;
  self->engine.reset(new TransferEngine(std::move(device),
                                        Geometry(pool.get(), std::move(layouts), std::move(group_classes)),
                                        profile, options));
}

bool submit(EngineHandle& self, uint64_t job_id, const std::string& direction, nb::handle moves,
            nb::handle keys, EventId event, const PolicySpec* policy, const std::string& objective,
            double timeout_s) {
  const BufferView rows(moves), joined(keys);
  Submission s;
  s.job_id = job_id;
  s.direction = parse_direction(direction);
  s.moves = rows.data();
  s.count = count_moves(rows);
  if (joined.nbytes() != 0) {
    if (s.count == 0 || joined.nbytes() % s.count != 0 || joined.nbytes() / s.count > kMaxKeyBytes)
      throw std::invalid_argument("keys have " + std::to_string(joined.nbytes()) + " bytes for " +
                                  std::to_string(s.count) +
                                  " moves; give each move a key of the same 1 to 32 bytes");
    s.keys = joined.data();
    s.key_bytes = static_cast<uint32_t>(joined.nbytes() / s.count);
  }
  s.event = event;
  s.policy = policy;
  const Objective own = objective.empty() ? Objective::kBalanced : parse_objective(objective);
  if (!objective.empty()) s.objective = &own;
  s.timeout_s = timeout_s;
  return self.engine->submit(s);
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Device>(m, "Device").def_prop_ro("name", &Device::name);

  nb::class_<HostDevice, Device>(m, "HostDevice").def(nb::init<uint32_t>(), nb::arg("workers") = 2);

  nb::class_<SimDevice, Device>(m, "SimDevice")
      .def(nb::init<uint64_t, uint32_t, double, double>(), nb::arg("seed"), nb::arg("max_delay_steps") = 8,
           nb::arg("fail_rate") = 0.0, nb::arg("break_rate") = 0.0)
      .def_prop_ro("chunks", &SimDevice::chunks)
      .def_prop_ro("max_grid", &SimDevice::max_grid)
      .def_prop_ro("live_events", &SimDevice::live_events)
      .def_prop_ro("unready_events", &SimDevice::unready_events)
      .def_prop_ro("outstanding_bytes", [](const SimDevice& d) { return pair(d.outstanding_bytes()); })
      .def_prop_ro("max_outstanding_bytes",
                   [](const SimDevice& d) { return pair(d.max_outstanding_bytes()); })
      .def_prop_ro("violations", &SimDevice::violations)
      .def("touching", [](const SimDevice& d) {
        std::vector<std::tuple<uint64_t, uint64_t, uint64_t>> out;
        for (const Range& r : d.touching()) out.emplace_back(r.device, r.host, r.bytes);
        return out;
      });

  nb::class_<JobResult>(m, "JobResult")
      .def_ro("job_id", &JobResult::job_id)
      .def_prop_ro("direction", [](const JobResult& r) { return to_string(r.direction); })
      .def_prop_ro("status", [](const JobResult& r) { return to_string(r.status); })
      .def_ro("error", &JobResult::error)
      .def_ro("bytes", &JobResult::bytes)
      .def_ro("ranges", &JobResult::ranges)
      .def_ro("chunks", &JobResult::chunks)
      .def_ro("backend", &JobResult::backend)
      .def_ro("reason", &JobResult::reason)
      .def_ro("queue_s", &JobResult::queue_s)
      .def_ro("transfer_s", &JobResult::transfer_s)
      .def_ro("peak_outstanding_bytes", &JobResult::peak_outstanding_bytes)
      .def("__repr__", [](const JobResult& r) {
        return "JobResult(" + std::to_string(r.job_id) + ", " + to_string(r.direction) + ", " +
               to_string(r.status) + (r.error.empty() ? "" : ": " + r.error) + ", " +
               std::to_string(r.bytes) + " bytes, " + r.backend + ")";
      });

  nb::class_<EngineHandle>(m, "TransferEngine")
      .def("__init__", &make_engine, nb::arg("device"), nb::arg("pool"), nb::arg("layouts"),
           nb::arg("group_classes"), nb::arg("profile"), nb::arg("objective") = "balanced",
           nb::arg("load_policy").none() = nb::none(), nb::arg("save_policy").none() = nb::none(),
           nb::arg("threaded") = true, nb::arg("queue_limit") = 4096, nb::arg("manual_clock") = false)
      .def(
          "record_event", [](EngineHandle& e, uint64_t stream) { return e.engine->record_event(stream); },
          nb::arg("stream") = 0)
      .def(
          "release_event", [](EngineHandle& e, EventId event) { e.engine->release_event(event); },
          nb::arg("event"))
      .def("submit", &submit, nb::arg("job_id"), nb::arg("direction"), nb::arg("moves"),
           nb::arg("keys") = nb::bytes("", 0), nb::arg("event") = 0, nb::arg("policy").none() = nb::none(),
           nb::arg("objective") = "", nb::arg("timeout_s") = 30.0)
      .def(
          "cancel", [](EngineHandle& e, uint64_t job_id) { return e.engine->cancel(job_id); },
          nb::arg("job_id"))
      .def("poll", [](EngineHandle& e) { return e.engine->poll(); })
      .def(
          "step", [](EngineHandle& e, double advance_s) { return e.engine->step(advance_s); },
          nb::arg("advance_s") = 0.0)
      .def_prop_ro("pending", [](EngineHandle& e) { return e.engine->pending(); })
      .def(
          "drain", [](EngineHandle& e, double timeout_s) { return e.engine->drain(timeout_s); },
          nb::arg("timeout_s"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "close", [](EngineHandle& e, double timeout_s) { return e.engine->close(timeout_s); },
          nb::arg("timeout_s") = 10.0, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace pega
