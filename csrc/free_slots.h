// SPDX-License-Identifier: Apache-2.0
// Which slots of a class are free, and which of them to take: neighbours, since those merge into one range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pega {

class FreeSlots {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit FreeSlots(uint32_t slots);  // all free

  // Appends `wanted` slots, which must not be more than are free, and takes them: right behind `near` (-1:
  // behind the last ones taken) as far as those are free, then in as few runs as can be found without a long
  // search.
  void take(size_t wanted, int64_t near, std::vector<uint32_t>* out);
  void give_back(uint32_t slot) { bits_[slot / 64] |= uint64_t{1} << (slot % 64); }

 private:
  bool is_free(uint32_t slot) const { return (bits_[slot / 64] >> (slot % 64) & 1) != 0; }
  uint32_t next(uint32_t from, bool free) const;
  uint32_t find_run(uint32_t from, uint32_t length, uint32_t* longest) const;

  uint32_t slots_;
  uint32_t cursor_ = 0;
  std::vector<uint64_t> bits_;
};

}  // namespace pega
