// SPDX-License-Identifier: Apache-2.0
// From moves of blocks to merged ranges of bytes, in host order.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "layout.h"
#include "pool.h"
#include "types.h"

namespace pega {

// One row of a job: block `block` of group `group` from or to slot `slot` of the group's class.
struct Move {
  uint32_t group;
  uint32_t block;
  uint32_t slot;
};
static_assert(sizeof(Move) == 12);

// What all jobs of an engine share: the pool and, per group, the device layout and the slot class.
struct Geometry {
  // Throws std::invalid_argument unless every group has a class whose slots are large enough.
  Geometry(std::shared_ptr<HostPool> pool, std::vector<GroupLayout> layouts,
           std::vector<uint32_t> group_classes);

  // Throws std::invalid_argument naming the row unless every id exists.
  void check(const Move* moves, size_t count) const;

  std::shared_ptr<HostPool> pool;
  std::vector<GroupLayout> layouts;
  std::vector<uint32_t> group_classes;
};

// Keeps its scratch memory from call to call; moves must have been checked.
class Planner {
 public:
  explicit Planner(const Geometry& geometry) : geometry_(geometry) {}

  // `order`: the moves' indices by (class, slot). `ranges`: their bytes in that order; two neighbours are one
  // range where they touch on both sides and belong to one allocation. Since slots come in order and the
  // segments of a slot too, the ranges come out in host order without ever sorting fragments.
  void plan(const Move* moves, size_t count, std::vector<uint32_t>* order, std::vector<Range>* ranges);

 private:
  void sort(const Move* moves, size_t count, std::vector<uint32_t>* order);

  const Geometry& geometry_;
  std::vector<std::pair<uint64_t, uint32_t>> keyed_, sorted_;
};

// Cuts ranges longer than `max_bytes` (> 0).
std::vector<Range> split(const std::vector<Range>& ranges, uint64_t max_bytes);

TransferShape shape_of(Direction direction, const std::vector<Range>& ranges);

}  // namespace pega
