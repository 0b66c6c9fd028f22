// SPDX-License-Identifier: Apache-2.0
// Which slots the jobs in flight read or write: two jobs that would disagree about a slot cannot both be
// taken.
#pragma once

#include <cstdint>
#include <vector>

#include "planner.h"

namespace pega {

class SlotUse {
 public:
  explicit SlotUse(const Geometry& geometry);

  // Takes the slots of a job: saves exclusively, loads shared. Throws std::invalid_argument, and takes
  // nothing, for a slot twice in the job, a device block twice in a load, or a slot that another job writes
  // (or, for a save, reads). Moves must have been checked.
  void acquire(Direction direction, const Move* moves, size_t count);
  void release(Direction direction, const Move* moves, size_t count);

 private:
  using Bits = std::vector<uint64_t>;
  int16_t& users(const Move& m) { return users_[geometry_.group_classes[m.group]][m.slot]; }
  void refuse_duplicates(Direction direction, const Move* moves, size_t count);

  static constexpr int16_t kWriter = -1;
  static constexpr int16_t kMaxReaders = INT16_MAX;
  const Geometry& geometry_;
  std::vector<std::vector<int16_t>> users_;   // per class and slot: kWriter or the number of readers
  std::vector<Bits> slot_seen_, block_seen_;  // scratch, all zero between calls: per class, per group
};

}  // namespace pega
