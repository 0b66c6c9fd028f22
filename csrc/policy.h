// SPDX-License-Identifier: Apache-2.0
// The Auto policy: which backend moves a transfer of this shape on this device under this objective.
// A pure function of its arguments; the engine and the command line call the same code.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "types.h"

namespace pega {

// Measured throughput of `backend` moving shuffled ranges of `range_bytes` with at most `grid` CTAs
// (grid 0 where it means nothing).
struct CurvePoint {
  Backend backend;
  uint32_t grid;
  uint64_t range_bytes;
  double gib_per_s;
};

// Measured growth of decode p99 (0.05 = +5 %) while `backend` runs with this grid and chunk (0 = unchunked).
struct InterferencePoint {
  Backend backend;
  uint32_t grid;
  uint32_t chunk_descriptors;
  double p99_growth;
};

struct DirectionProfile {
  double contiguous_gib_per_s = 0;
  std::array<double, kBackends> submit_us_per_range{};  // calling cost of one range, microseconds
  std::vector<CurvePoint> curve;
  std::vector<InterferencePoint> interference;
};

struct DeviceProfile {
  std::string name;
  std::array<DirectionProfile, kDirections> direction;
  // Defaults for whatever a policy leaves unset, per backend (0 in kernel's chunk fields: one launch).
  std::array<PolicySpec, kBackends> defaults;
};

// Total and deterministic. Explicit fields of `policy` win over the profile.
TransferDecision decide(const TransferShape& shape, const DeviceProfile& profile, Objective objective,
                        const PolicySpec& policy);

}  // namespace pega
