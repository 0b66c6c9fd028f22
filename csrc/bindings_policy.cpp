// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <stdexcept>

#include "bindings.h"
#include "policy.h"

namespace pega {
namespace {

constexpr double kMaxSpread_ms = 10'000;

// Keys that are absent keep the struct's default; unknown keys are ignored: the profile's schema is checked
// in Python.
template <typename T>
void read(const nb::dict& from, const char* key, T* to) {
  if (!from.contains(key)) return;
  if (!nb::try_cast(nb::object(from[key]), *to))
    throw std::invalid_argument(std::string("device profile: \"") + key +
                                "\" has a value of a wrong type or sign: " + nb::repr(from[key]).c_str());
}

nb::object child(const nb::dict& from, const char* key) {
  return from.contains(key) ? nb::object(from[key]) : nb::object(nb::none());
}

template <typename Visit>
void each(const nb::dict& from, const char* key, Visit visit) {
  const nb::object rows = child(from, key);
  if (rows.is_none()) return;
  for (nb::handle row : rows) visit(nb::cast<nb::dict>(row));
}

// Numbers by name, such as {"memcpy": 2.6}; `parse` tells which place in `to` a name has.
template <typename Enum, size_t kCount>
void read_by_name(const nb::dict& from, const char* key, Enum (*parse)(const std::string&),
                  std::array<double, kCount>* to) {
  const nb::object values = child(from, key);
  if (values.is_none()) return;
  const auto by_name = nb::cast<nb::dict>(values);
  for (auto [each_name, value] : by_name) {
    const auto name = nb::cast<std::string>(each_name);
    read(by_name, name.c_str(), &(*to)[static_cast<size_t>(parse(name))]);
  }
}

DirectionProfile read_direction(const nb::dict& from) {
  DirectionProfile d;
  read(from, "contiguous_gib_per_s", &d.contiguous_gib_per_s);
  read_by_name(from, "submit_us_per_range", parse_backend, &d.submit_us_per_range);
  read_by_name(from, "latency_us", parse_backend, &d.latency_us);
  each(from, "curve", [&](const nb::dict& row) {
    CurvePoint p{};
    std::string backend;
    read(row, "backend", &backend);
    p.backend = parse_backend(backend);
    read(row, "grid", &p.grid);
    read(row, "range_bytes", &p.range_bytes);
    read(row, "gib_per_s", &p.gib_per_s);
    read(row, "chunk_descriptors", &p.chunk_descriptors);
    read(row, "chunk_bytes", &p.chunk_bytes);
    d.curve.push_back(p);
  });
  each(from, "interference", [&](const nb::dict& row) {
    InterferencePoint p{};
    std::string backend;
    read(row, "backend", &backend);
    p.backend = parse_backend(backend);
    read(row, "grid", &p.grid);
    read(row, "chunk_descriptors", &p.chunk_descriptors);
    read(row, "p99_growth", &p.p99_growth);
    read(row, "chunk_bytes", &p.chunk_bytes);
    read(row, "range_bytes", &p.range_bytes);
    d.interference.push_back(p);
  });
  return d;
}

DeviceProfile read_profile(const nb::dict& from) {
  DeviceProfile profile;
  read(from, "name", &profile.name);
  const nb::object directions = child(from, "directions");
  if (!directions.is_none()) {
    for (auto [name, value] : nb::cast<nb::dict>(directions))
      profile.direction[static_cast<int>(parse_direction(nb::cast<std::string>(name)))] =
          read_direction(nb::cast<nb::dict>(value));
  }
  for (int b = 0; b < kBackends; ++b) profile.defaults[b].backend = static_cast<Backend>(b);
  const nb::object defaults = child(from, "defaults");
  if (!defaults.is_none()) {
    for (auto [name, value] : nb::cast<nb::dict>(defaults)) {
      PolicySpec& spec = profile.defaults[static_cast<int>(parse_backend(nb::cast<std::string>(name)))];
      const auto row = nb::cast<nb::dict>(value);
      read(row, "max_grid_blocks", &spec.max_grid_blocks);
      read(row, "chunk_descriptors", &spec.chunk_descriptors);
      read(row, "chunk_bytes", &spec.chunk_bytes);
      read(row, "inflight_chunks", &spec.inflight_chunks);
    }
  }
  read_by_name(from, "spread_ms", parse_objective, &profile.spread_us);
  for (double& spread : profile.spread_us) spread = 1000 * std::clamp(spread, 0.0, kMaxSpread_ms);
  return profile;
}

template <typename Enum>
Enum parse_name(const std::string& name, std::initializer_list<Enum> all, const char* what) {
  std::string allowed;
  for (const Enum e : all) {
    if (name == to_string(e)) return e;
    allowed += std::string(allowed.empty() ? "" : ", ") + to_string(e);
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is unknown; allowed: " + allowed);
}

}  // namespace

Direction parse_direction(const std::string& name) {
  return parse_name(name, {Direction::kLoad, Direction::kSave}, "direction");
}

Backend parse_backend(const std::string& name) {
  return parse_name(name,
                    {Backend::kAuto, Backend::kMemcpy, Backend::kKernel, Backend::kChunked, Backend::kStaged},
                    "backend");
}

Objective parse_objective(const std::string& name) {
  return parse_name(name,
                    {Objective::kThroughput, Objective::kBalanced, Objective::kTail, Objective::kStrict},
                    "objective");
}

void bind_policy(nb::module_& m) {
  nb::class_<PolicySpec>(m, "Policy")
      .def(
          "__init__",
          [](PolicySpec* self, const std::string& backend, uint32_t max_grid_blocks,
             uint32_t chunk_descriptors, uint64_t chunk_bytes, uint32_t inflight_chunks, int64_t spread_us) {
            new (self) PolicySpec{parse_backend(backend), max_grid_blocks, chunk_descriptors, chunk_bytes,
                                  inflight_chunks,        spread_us};
          },
          nb::arg("backend") = "auto", nb::arg("max_grid_blocks") = 0, nb::arg("chunk_descriptors") = 0,
          nb::arg("chunk_bytes") = 0, nb::arg("inflight_chunks") = 0, nb::arg("spread_us") = -1)
      .def_prop_ro("backend", [](const PolicySpec& p) { return to_string(p.backend); })
      .def_ro("max_grid_blocks", &PolicySpec::max_grid_blocks)
      .def_ro("chunk_descriptors", &PolicySpec::chunk_descriptors)
      .def_ro("chunk_bytes", &PolicySpec::chunk_bytes)
      .def_ro("inflight_chunks", &PolicySpec::inflight_chunks)
      .def_ro("spread_us", &PolicySpec::spread_us);

  nb::class_<TransferShape>(m, "TransferShape")
      .def(
          "__init__",
          [](TransferShape* self, const std::string& direction, uint64_t ranges, uint64_t total_bytes,
             uint64_t avg_range_bytes, uint64_t min_range_bytes, uint32_t alignment) {
            if (avg_range_bytes == 0 && ranges != 0) avg_range_bytes = total_bytes / ranges;
            if (min_range_bytes == 0) min_range_bytes = avg_range_bytes;
            new (self) TransferShape{
                parse_direction(direction), ranges, total_bytes, avg_range_bytes, min_range_bytes, alignment};
          },
          nb::arg("direction"), nb::arg("ranges"), nb::arg("total_bytes"), nb::arg("avg_range_bytes") = 0,
          nb::arg("min_range_bytes") = 0, nb::arg("alignment") = 16)
      .def_prop_ro("direction", [](const TransferShape& s) { return to_string(s.direction); })
      .def_ro("ranges", &TransferShape::ranges)
      .def_ro("total_bytes", &TransferShape::total_bytes)
      .def_ro("avg_range_bytes", &TransferShape::avg_range_bytes)
      .def_ro("min_range_bytes", &TransferShape::min_range_bytes)
      .def_ro("alignment", &TransferShape::alignment);

  nb::class_<TransferDecision>(m, "TransferDecision")
      .def_prop_ro("backend", [](const TransferDecision& d) { return to_string(d.backend); })
      .def_ro("max_grid_blocks", &TransferDecision::max_grid_blocks)
      .def_ro("chunk_descriptors", &TransferDecision::chunk_descriptors)
      .def_ro("chunk_bytes", &TransferDecision::chunk_bytes)
      .def_ro("inflight_chunks", &TransferDecision::inflight_chunks)
      .def_ro("spread_us", &TransferDecision::spread_us)
      .def_ro("reason", &TransferDecision::reason);

  nb::class_<DeviceProfile>(m, "DeviceProfile")
      .def(
          "__init__",
          [](DeviceProfile* self, const nb::dict& profile) {
            new (self) DeviceProfile(read_profile(profile));
          },
          nb::arg("profile"))
      .def_ro("name", &DeviceProfile::name);

  m.def(
      "decide",
      [](const TransferShape& shape, const DeviceProfile& profile, const std::string& objective,
         const PolicySpec& policy) { return decide(shape, profile, parse_objective(objective), policy); },
      nb::arg("shape"), nb::arg("profile"), nb::arg("objective"), nb::arg("policy"));
}

}  // namespace pega
