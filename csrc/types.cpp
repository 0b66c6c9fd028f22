// SPDX-License-Identifier: Apache-2.0
#include "types.h"

namespace pega {

const char* to_string(Direction d) { return d == Direction::kLoad ? "load" : "save"; }

const char* to_string(Backend b) {
  switch (b) {
    case Backend::kAuto: return "auto";
    case Backend::kMemcpy: return "memcpy";
    case Backend::kKernel: return "kernel";
    case Backend::kChunked: return "chunked";
    case Backend::kStaged: return "staged";
  }
  return "?";
}

const char* to_string(Objective o) {
  switch (o) {
    case Objective::kThroughput: return "throughput";
    case Objective::kBalanced: return "balanced";
    case Objective::kTail: return "tail";
    case Objective::kStrict: return "strict";
  }
  return "?";
}

}  // namespace pega
