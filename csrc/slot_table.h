// SPDX-License-Identifier: Apache-2.0
// A pool's slot table as the migration agent uses it: which slot holds a key, may these bytes be believed,
// and the writer's side for blocks that arrive from elsewhere.
//
// The engine's threads write the same table meanwhile, in another process. So nothing found here is true for
// long: a reader takes a slot's generation before and after, and believes what it read if both are the same.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "pool.h"

namespace pega {

class SlotTable {
 public:
  // One slot class of `pool`. Throws std::invalid_argument for an unknown class or a key size above 32.
  SlotTable(std::shared_ptr<HostPool> pool, uint32_t slot_class, uint32_t key_bytes);

  uint32_t key_bytes() const { return key_bytes_; }
  uint64_t slots() const { return pool_->classes()[slot_class_].slots; }

  // The longest run of `keys` that slots hold: its length, and slot and generation of each. Reads what has
  // changed in the table only when a key is not where it was last seen. Any thread may call it; the other
  // calls touch nothing but the shared table.
  size_t find(const uint8_t* keys, size_t n, uint32_t* slots, uint64_t* generations);
  // Whether every slot still holds what it held under that generation; `out`: one byte a slot. To be called
  // after the bytes were read.
  void still(const uint32_t* slots, const uint64_t* generations, size_t n, uint8_t* out) const;
  // Whether each slot holds its key now, and under which generation (0: it does not).
  void holding(const uint32_t* slots, const uint8_t* keys, size_t n, uint64_t* generations) const;

  // The writer's side (pool.h). `keys` null: the slots hold nothing.
  void begin(const uint32_t* slots, size_t n);
  void end(const uint32_t* slots, const uint8_t* keys, size_t n, uint32_t length);

  // Asks eviction to leave these slots alone until `until` (CLOCK_MONOTONIC, ns; 0: no longer).
  void lease(const uint32_t* slots, size_t n, uint64_t until);

  // What these slots hold, or are about to hold, was made under rules that no longer apply (other weights,
  // say): forget: nothing that is stored, or being stored, at this moment is found any more. distrust: nor
  // anything that will be stored, until forget. Both write the shared table, so other processes obey at once.
  void forget(const uint32_t* slots, size_t n);
  void forget_all();
  void distrust(const uint32_t* slots, size_t n);

 private:
  void check(const uint32_t* slots, size_t n) const;
  // Whether the slot holds the key, believably.
  bool holds_now(uint32_t slot, const uint8_t* key, uint64_t* generation) const;
  bool located(const uint8_t* key, uint32_t* slot, uint64_t* generation) const;
  void refresh();
  SlotEntry& entry(uint64_t slot) const { return pool_->entry(slot_class_, slot); }

  const std::shared_ptr<HostPool> pool_;
  const uint32_t slot_class_;
  const uint32_t key_bytes_;
  std::mutex finding_;  // guards what follows
  // Where a key was last seen, by its first eight bytes: keys are hashes, and what is found is compared
  // whole.
  std::unordered_map<uint64_t, uint32_t> where_;
  std::vector<uint64_t> seen_;    // per slot: the generation when it was last looked at
  std::vector<uint64_t> prefix_;  // per slot: the entry of `where_` that is its own
};

}  // namespace pega
