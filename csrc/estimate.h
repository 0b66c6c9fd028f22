// SPDX-License-Identifier: Apache-2.0
// What a profile says about one transfer: how long each measured setting would take, and what it would cost
// the decode steps beside it.
#pragma once

#include <vector>

#include "policy.h"

namespace pega {

struct Candidate {
  PolicySpec setting;
  double us = 0;      // from submission until completion was seen
  double growth = 0;  // of decode p99; 0.05 = +5 %
};

// Every setting that the profile measured in this direction, of the backends that `policy` allows and with
// its explicit fields put in, in order of preference between equals. `shape` has an average range size above
// 0.
std::vector<Candidate> candidates(const TransferShape& shape, const DeviceProfile& profile,
                                  const PolicySpec& policy);

// Microseconds of the submitting thread.
double submit_us(const TransferShape& shape, const DeviceProfile& profile, Backend backend);

// `first`, with what it leaves unset taken from `second`.
PolicySpec fill(PolicySpec first, const PolicySpec& second);

}  // namespace pega
