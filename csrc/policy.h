// SPDX-License-Identifier: Apache-2.0
// The Auto policy: which backend moves a transfer of this shape on this device under this objective.
// A pure function of its arguments; the engine and the command line call the same code.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "types.h"

namespace pega {

// A setting is what a measurement was made with: backend, grid, chunk. In each, 0 means the backend's
// default. Auto only ever chooses settings that a profile holds numbers for.

// Measured throughput of one setting moving shuffled ranges of `range_bytes`.
struct CurvePoint {
  Backend backend;
  uint32_t grid;
  uint64_t range_bytes;
  double gib_per_s;
  uint32_t chunk_descriptors = 0;
  uint64_t chunk_bytes = 0;
};

// Measured growth of decode p99 (0.05 = +5 %) while one setting moves ranges of `range_bytes` (0 = any size).
struct InterferencePoint {
  Backend backend;
  uint32_t grid;
  uint32_t chunk_descriptors;
  double p99_growth;
  uint64_t chunk_bytes = 0;
  uint64_t range_bytes = 0;
};

struct DirectionProfile {
  double contiguous_gib_per_s = 0;
  std::array<double, kBackends> submit_us_per_range{};  // calling cost of one range, microseconds
  std::array<double, kBackends> latency_us{};  // smallest transfer, from submission to completion seen
  std::vector<CurvePoint> curve;
  std::vector<InterferencePoint> interference;
};

struct DeviceProfile {
  std::string name;
  std::array<DirectionProfile, kDirections> direction;
  // What fills the fields that neither a policy nor the chosen setting names, per backend.
  std::array<PolicySpec, kBackends> defaults;
  // Over how many microseconds a transfer is spread, by objective; 0: it goes as fast as it can.
  std::array<double, kObjectives> spread_us{};
};

// Total and deterministic. Explicit fields of `policy` win over the profile.
TransferDecision decide(const TransferShape& shape, const DeviceProfile& profile, Objective objective,
                        const PolicySpec& policy);

}  // namespace pega
