// SPDX-License-Identifier: Apache-2.0
#include "slot_use.h"

#include <stdexcept>
#include <string>

namespace pega {
namespace {

// Sets a bit; false if it was set before.
bool mark(std::vector<uint64_t>& bits, uint32_t i) {
  const uint64_t bit = uint64_t{1} << (i % 64);
  const bool fresh = (bits[i / 64] & bit) == 0;
  bits[i / 64] |= bit;
  return fresh;
}

}  // namespace

SlotUse::SlotUse(const Geometry& geometry) : geometry_(geometry) {
  for (const SlotClass& c : geometry.pool->classes()) {
    users_.emplace_back(c.slots);
    slot_seen_.emplace_back(c.slots / 64 + 1);
  }
  for (const GroupLayout& g : geometry.layouts) block_seen_.emplace_back(g.num_blocks() / 64 + 1);
}

void SlotUse::refuse_duplicates(Direction direction, const Move* moves, size_t count) {
  size_t marked = 0;
  const char* twice = nullptr;
  for (; marked < count && twice == nullptr; ++marked) {
    const Move& m = moves[marked];
    if (!mark(slot_seen_[geometry_.group_classes[m.group]], m.slot)) twice = "slot";
    if (direction == Direction::kLoad && !mark(block_seen_[m.group], m.block)) twice = "device block";
  }
  for (size_t i = 0; i < marked; ++i) {
    slot_seen_[geometry_.group_classes[moves[i].group]][moves[i].slot / 64] = 0;
    if (direction == Direction::kLoad) block_seen_[moves[i].group][moves[i].block / 64] = 0;
  }
  if (twice == nullptr) return;
  const Move& m = moves[marked - 1];
  throw std::invalid_argument("move " + std::to_string(marked - 1) + " (group " + std::to_string(m.group) +
                              ", block " + std::to_string(m.block) + ", slot " + std::to_string(m.slot) +
                              ") names a " + twice + " that an earlier move of this " + to_string(direction) +
                              " names already; each may appear once");
}

void SlotUse::acquire(Direction direction, const Move* moves, size_t count) {
  const bool save = direction == Direction::kSave;
  for (size_t i = 0; i < count; ++i) {
    const int16_t now = users(moves[i]);
    if (now == 0 || (!save && now > 0 && now < kMaxReaders)) continue;
    throw std::invalid_argument("move " + std::to_string(i) + ": slot " + std::to_string(moves[i].slot) +
                                " of group " + std::to_string(moves[i].group) + " is still being " +
                                (now == kWriter ? "written by a save" : "read by a load") +
                                " that poll() has not returned");
  }
  refuse_duplicates(direction, moves, count);
  for (size_t i = 0; i < count; ++i) users(moves[i]) += save ? kWriter : 1;
}

void SlotUse::release(Direction direction, const Move* moves, size_t count) {
  for (size_t i = 0; i < count; ++i) users(moves[i]) -= direction == Direction::kSave ? kWriter : 1;
}

}  // namespace pega
