// SPDX-License-Identifier: Apache-2.0
#include "free_slots.h"

#include <algorithm>

namespace pega {
namespace {

// Free runs looked at before a search settles for a shorter one: in a pool in splinters a whole scan would
// cost the scheduler milliseconds.
constexpr int kScanRuns = 1024;

}  // namespace

FreeSlots::FreeSlots(uint32_t slots) : slots_(slots), bits_((uint64_t{slots} + 63) / 64, ~uint64_t{0}) {
  if (slots % 64 != 0) bits_.back() = (uint64_t{1} << (slots % 64)) - 1;
}

// The first slot from `from` on that is free, or that is not; slots_ if there is none.
uint32_t FreeSlots::next(uint32_t from, bool free) const {
  for (uint32_t word = from / 64; word < bits_.size(); ++word) {
    uint64_t bits = free ? bits_[word] : ~bits_[word];
    if (word == from / 64) bits &= ~uint64_t{0} << (from % 64);
    if (bits != 0) return std::min<uint32_t>(slots_, word * 64 + __builtin_ctzll(bits));
  }
  return slots_;
}

// The first run of `length` free slots from `from` on; kNone if there is none nearby. `longest` grows to the
// length of the longest one seen.
uint32_t FreeSlots::find_run(uint32_t from, uint32_t length, uint32_t* longest) const {
  uint32_t begin = next(from, true);
  for (int runs = 0; begin < slots_ && runs < kScanRuns; ++runs) {
    const uint32_t end = next(begin, false);
    if (end - begin >= length) return begin;
    *longest = std::max(*longest, end - begin);
    begin = next(end, true);
  }
  return kNone;
}

void FreeSlots::take(size_t wanted, int64_t near, std::vector<uint32_t>* out) {
  const bool beside = near >= 0 && near + 1 < slots_;
  uint32_t at = beside ? static_cast<uint32_t>(near + 1) : cursor_;
  const auto take_run = [&] {
    for (; at < slots_ && is_free(at) && wanted > 0; ++at, --wanted) {
      bits_[at / 64] &= ~(uint64_t{1} << (at % 64));
      out->push_back(at);
    }
  };
  if (beside) take_run();
  for (size_t length = wanted; wanted > 0;) {  // one run for all, or else the longest there are
    length = std::min(length, wanted);
    uint32_t longest = 0;
    uint32_t run = find_run(at < slots_ ? at : 0, static_cast<uint32_t>(length), &longest);
    if (run == kNone) run = find_run(0, static_cast<uint32_t>(length), &longest);
    if (run == kNone) {
      length = longest;
      continue;
    }
    at = run;
    take_run();
  }
  cursor_ = at < slots_ ? at : 0;
}

}  // namespace pega
