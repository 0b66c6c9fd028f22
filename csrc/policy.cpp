// SPDX-License-Identifier: Apache-2.0
#include "policy.h"

namespace pega {

TransferDecision decide(const TransferShape&, const DeviceProfile&, Objective, const PolicySpec& policy) {
  TransferDecision d;
  d.backend = policy.backend == Backend::kAuto ? Backend::kMemcpy : policy.backend;
  d.max_grid_blocks = policy.max_grid_blocks ? policy.max_grid_blocks : 8;
  d.chunk_descriptors = policy.chunk_descriptors ? policy.chunk_descriptors : 1024;
  d.chunk_bytes = policy.chunk_bytes ? policy.chunk_bytes : 4 << 20;
  d.inflight_chunks = policy.inflight_chunks ? policy.inflight_chunks : 2;
  d.reason = "fixed";
  return d;
}

}  // namespace pega
