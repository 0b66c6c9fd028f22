// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/string.h>

#include "bindings.h"

namespace pega {

void bind_cuda(nb::module_& m) {
  m.def("cuda_available", [] { return std::string("this build has no CUDA device"); });
}

}  // namespace pega
