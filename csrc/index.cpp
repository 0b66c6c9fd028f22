// SPDX-License-Identifier: Apache-2.0
#include "index.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pega {
namespace {

// How many keys a lookup is ahead of the one it compares, in fetching the cell and then the node: as many as
// a core has misses on their way (10 to 16), for each of the two.
constexpr size_t kCellsAhead = 24, kNodesAhead = 12;
constexpr size_t kAhead = 32;  // a power of two above both

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

// Random visits to tens of MB: with pages of 4 KiB most of their time would go into address translation.
template <typename T>
void reserve_huge(std::vector<T>* v, size_t n) {
  constexpr uintptr_t kHugePage = 2 << 20;
  v->reserve(n);
  const auto begin = (reinterpret_cast<uintptr_t>(v->data()) + kHugePage - 1) & ~(kHugePage - 1);
  const auto end = reinterpret_cast<uintptr_t>(v->data() + n) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: may fail
}

std::string name(uint64_t group, uint32_t slot) {
  return "slot " + std::to_string(slot) + " (group " + std::to_string(group) + ")";
}

}  // namespace

SlotIndex::SlotIndex(const std::vector<uint32_t>& slots_per_class, std::vector<uint32_t> group_classes,
                     uint32_t key_bytes)
    : group_classes_(std::move(group_classes)), key_bytes_(key_bytes) {
  if (key_bytes < 1 || key_bytes > kMaxKeyBytes)
    refuse("key_bytes is " + std::to_string(key_bytes) + "; allowed: 1 to 32");
  if (slots_per_class.empty() || group_classes_.empty())
    refuse("an index needs at least one class and one group");
  uint64_t total = 0;
  for (const uint32_t slots : slots_per_class) {
    if (slots == 0) refuse("a slot class has no slots");
    if (total + slots >= (uint64_t{1} << 31)) refuse("an index holds at most 2^31 - 1 slots");
    Class c{static_cast<uint32_t>(total), slots, FreeSlots(slots)};
    c.counts.free = c.counts.total = slots;
    classes_.push_back(std::move(c));
    total += slots;
  }
  for (const uint32_t c : group_classes_) {
    if (c >= classes_.size())
      refuse("group class " + std::to_string(c) + "; there are " + std::to_string(classes_.size()) +
             " classes");
  }
  uint64_t cells = 16;
  while (cells < 2 * total) cells *= 2;  // at most half full: probes stay short
  mask_ = cells - 1;
  reserve_huge(&nodes_, total);
  reserve_huge(&cells_, cells);
  nodes_.resize(total);
  cells_.resize(cells, {kNoSlot, 0});
}

SlotIndex::Class& SlotIndex::class_of(uint64_t group) {
  if (group >= group_classes_.size())
    refuse("group " + std::to_string(group) + "; there are " + std::to_string(group_classes_.size()));
  return classes_[group_classes_[group]];
}

// --- the map
// -------------------------------------------------------------------------------------------------------

SlotIndex::Key SlotIndex::load(const uint8_t* bytes) const {
  Key key = {};
  if (key_bytes_ == sizeof key.words) {
    std::memcpy(key.words, bytes, sizeof key.words);  // the usual length, known to the compiler
  } else {
    std::memcpy(key.words, bytes, key_bytes_);
  }
  return key;
}

// Keys are hashes already; this only folds them, so that no usual choice of key bytes makes all of them
// collide. Four multiplications that do not wait for each other.
uint64_t SlotIndex::hash(uint64_t group, const Key& key) {
  static_assert(std::size(Key{}.words) == 4);
  constexpr uint64_t kOdd[4] = {0x9e3779b97f4a7c15, 0xbf58476d1ce4e5b9, 0x94d049bb133111eb,
                                0xd6e8feb86659fd93};
  uint64_t h = (group + 1) * kOdd[3];
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t product = (key.words[i] ^ kOdd[i]) * kOdd[i];
    h += product ^ (product >> 32);
  }
  h *= kOdd[1];
  return h ^ (h >> 29);
}

uint32_t SlotIndex::find(uint64_t h, uint64_t group, const Key& key) const {
  for (uint64_t i = h & mask_;; i = (i + 1) & mask_) {
    const Cell& cell = cells_[i];
    if (cell.node == kNoSlot) return kNoSlot;
    if (cell.tag != static_cast<uint32_t>(h)) continue;
    const Node& node = nodes_[cell.node];
    if (node.group == group && node.key == key) return cell.node;
  }
}

// Calls visit(i, node or kNoSlot) for each key until it returns false. A million slots do not fit a cache, so
// what a key needs is fetched while others are compared: its cell, then the node that this names.
template <typename Visit>
void SlotIndex::look_up(uint64_t group, const uint8_t* keys, size_t n, Visit visit) {
  struct Ahead {
    Key key;
    uint64_t hash;
  } ahead[kAhead];
  const auto at = [&](size_t i) -> Ahead& { return ahead[i % kAhead]; };
  size_t cell = 0, node = 0;
  for (size_t i = 0; i < n; ++i) {
    for (; cell < std::min(n, i + kCellsAhead); ++cell) {
      Ahead& a = at(cell);
      a.key = load(keys + cell * key_bytes_);
      a.hash = hash(group, a.key);
      __builtin_prefetch(&cells_[a.hash & mask_]);
    }
    for (; node < std::min(n, i + kNodesAhead); ++node) {
      const uint32_t likely = cells_[at(node).hash & mask_].node;
      if (likely != kNoSlot) __builtin_prefetch(&nodes_[likely], 1);
    }
    if (!visit(i, find(at(i).hash, group, at(i).key))) return;
  }
}

void SlotIndex::insert(uint32_t n) {
  const uint64_t h = hash(nodes_[n].group, nodes_[n].key);
  uint64_t i = h & mask_;
  while (cells_[i].node != kNoSlot) i = (i + 1) & mask_;
  cells_[i] = {n, static_cast<uint32_t>(h)};
}

// Backward shift: no tombstones, so lookups never grow slower.
void SlotIndex::remove(uint32_t n) {
  uint64_t i = hash(nodes_[n].group, nodes_[n].key) & mask_;
  while (cells_[i].node != n) i = (i + 1) & mask_;
  for (uint64_t j = (i + 1) & mask_; cells_[j].node != kNoSlot; j = (j + 1) & mask_) {
    const uint64_t home = cells_[j].tag & mask_;
    if (((j - home) & mask_) < ((j - i) & mask_)) continue;  // it may not lie before its home
    cells_[i] = cells_[j];
    i = j;
  }
  cells_[i].node = kNoSlot;
}

// --- recency and pins
// ----------------------------------------------------------------------------------------------

void SlotIndex::link_newest(Class& c, uint32_t n) {
  nodes_[n].older = c.newest;
  nodes_[n].newer = kNoSlot;
  nodes_[n].listed = true;
  (c.newest == kNoSlot ? c.oldest : nodes_[c.newest].newer) = n;
  c.newest = n;
}

void SlotIndex::unlink(Class& c, uint32_t n) {
  Node& node = nodes_[n];
  if (!node.listed) return;
  node.listed = false;
  (node.older == kNoSlot ? c.oldest : nodes_[node.older].newer) = node.newer;
  (node.newer == kNoSlot ? c.newest : nodes_[node.newer].older) = node.older;
}

// Where unlinking this node will write.
void SlotIndex::fetch_neighbours(const Node& node) const {
  if (!node.listed) return;
  if (node.older != kNoSlot) __builtin_prefetch(&nodes_[node.older], 1);
  if (node.newer != kNoSlot) __builtin_prefetch(&nodes_[node.newer], 1);
}

void SlotIndex::take_pin(Class& c, uint32_t n) {
  if (nodes_[n].pins == UINT32_MAX) refuse("a slot has 2^32 - 1 pins");
  if (nodes_[n].pins++ == 0) ++c.counts.pinned;
}

size_t SlotIndex::match_and_pin(uint64_t group, const uint8_t* keys, size_t n, uint32_t* slots) {
  Class& c = class_of(group);
  size_t length = 0;
  look_up(group, keys, n, [&](size_t i, uint32_t node) {
    if (node == kNoSlot || nodes_[node].state != State::kReady) return false;
    take_pin(c, node);
    slots[i] = node - c.first;
    length = i + 1;
    return true;
  });
  return length;
}

size_t SlotIndex::match(uint64_t group, const uint8_t* keys, size_t n) {
  class_of(group);
  size_t length = 0;
  look_up(group, keys, n, [&](size_t i, uint32_t node) {
    if (node == kNoSlot || nodes_[node].state != State::kReady) return false;
    length = i + 1;
    return true;
  });
  return length;
}

void SlotIndex::contains(uint64_t group, const uint8_t* keys, size_t n, Presence* out) {
  class_of(group);
  look_up(group, keys, n, [&](size_t i, uint32_t node) {
    out[i] = node == kNoSlot                          ? Presence::kAbsent
             : nodes_[node].state == State::kReserved ? Presence::kReserved
                                                      : Presence::kReady;
    return true;
  });
}

void SlotIndex::pin(uint64_t group, const uint8_t* keys, size_t n, uint32_t* slots) {
  Class& c = class_of(group);
  look_up(group, keys, n, [&](size_t i, uint32_t node) {
    if (node == kNoSlot || nodes_[node].state != State::kReady)
      refuse("key " + std::to_string(i) + " of " + std::to_string(n) + " is not ready; nothing was pinned");
    slots[i] = node - c.first;
    return true;
  });
  for (size_t i = 0; i < n; ++i) take_pin(c, c.first + slots[i]);
}

uint32_t SlotIndex::checked(const Class& c, uint64_t group, uint32_t slot) const {
  if (slot >= c.slots)
    refuse(name(group, slot) + " does not exist; its class has " + std::to_string(c.slots));
  const Node& node = nodes_[c.first + slot];
  if (node.state == State::kFree) refuse(name(group, slot) + " is free");
  if (node.group != group) refuse(name(group, slot) + " belongs to group " + std::to_string(node.group));
  return c.first + slot;
}

void SlotIndex::unpin(uint64_t group, const uint32_t* slots, size_t n) {
  Class& c = class_of(group);
  size_t i = 0;
  try {
    for (; i < n; ++i) {
      if (i + kNodesAhead < n && slots[i + kNodesAhead] < c.slots)
        __builtin_prefetch(&nodes_[c.first + slots[i + kNodesAhead]], 1);
      Node& node = nodes_[checked(c, group, slots[i])];
      if (node.pins == 0) refuse(name(group, slots[i]) + " is not pinned (that often)");
      --node.pins;
    }
  } catch (...) {
    while (i-- > 0) ++nodes_[c.first + slots[i]].pins;
    throw;
  }
  for (i = n; i-- > 0;) {
    if (i >= kNodesAhead) fetch_neighbours(nodes_[c.first + slots[i - kNodesAhead]]);
    const uint32_t node = c.first + slots[i];
    if (nodes_[node].pins != 0 || nodes_[node].marked) continue;  // marked: named twice, done already
    nodes_[node].marked = true;
    --c.counts.pinned;
    if (nodes_[node].state == State::kReady) {
      unlink(c, node);
      link_newest(c, node);
    } else {
      --c.counts.ready;
      set_free(c, node);
    }
  }
  for (i = 0; i < n; ++i) nodes_[c.first + slots[i]].marked = false;
}

// --- taking and freeing slots
// --------------------------------------------------------------------------------------

// The caller has taken the node out of the map, the LRU list and its count.
void SlotIndex::set_free(Class& c, uint32_t n) {
  nodes_[n].state = State::kFree;
  c.free.give_back(n - c.first);
  ++c.counts.free;
}

void SlotIndex::forget_ready(Class& c, uint32_t n) {
  remove(n);
  changes_.add(IndexChanges::Kind::kRemoved, nodes_[n].group, nodes_[n].key.bytes(), key_bytes_);
  ++version_;
  unlink(c, n);
  if (nodes_[n].pins != 0) {
    nodes_[n].state = State::kReadyForgotten;
    return;
  }
  --c.counts.ready;
  set_free(c, n);
}

// Evicts up to `wanted` of the oldest slots, but none that is marked.
size_t SlotIndex::evict(Class& c, size_t wanted) {
  const uint64_t now = c.leases != nullptr && wanted != 0 ? monotonic_ns() : 0;
  const auto leased = [&](uint32_t n) {
    return c.leases != nullptr &&
           c.leases->entry(c.slot_class, n - c.first).lease.load(std::memory_order_relaxed) > now;
  };
  scratch_.clear();
  for (uint32_t n = c.oldest; n != kNoSlot && scratch_.size() < wanted;) {
    const uint32_t next = nodes_[n].newer;
    if (next != kNoSlot) __builtin_prefetch(&nodes_[next], 1);
    if (nodes_[n].pins != 0) {
      unlink(c, n);
    } else if (!nodes_[n].marked && !leased(n)) {
      __builtin_prefetch(&cells_[hash(nodes_[n].group, nodes_[n].key) & mask_], 1);
      scratch_.push_back(n);
    }
    n = next;
  }
  for (const uint32_t n : scratch_) forget_ready(c, n);
  evictions_ += scratch_.size();
  return scratch_.size();
}

void SlotIndex::reserve(uint64_t group, const uint8_t* keys, size_t n, int64_t near, uint32_t* slots) {
  Class& c = class_of(group);
  if (near >= int64_t{c.slots})
    refuse("near is " + std::to_string(near) + "; the class has " + std::to_string(c.slots));
  // Keys of this very call are not to be evicted for each other.
  std::vector<uint32_t> present;
  size_t wanted = 0;
  look_up(group, keys, n, [&](size_t i, uint32_t node) {
    slots[i] = kNoSlot;
    if (node == kNoSlot) {
      ++wanted;
      return true;
    }
    nodes_[node].marked = true;
    present.push_back(node);
    slots[i] = kNoSlot - 1;  // present, until the second pass
    return true;
  });
  const size_t room = static_cast<size_t>(c.counts.free);
  size_t granted = std::min(wanted, room);
  if (granted < wanted) granted += evict(c, wanted - granted);
  for (const uint32_t node : present) nodes_[node].marked = false;

  scratch_.clear();
  c.free.take(granted, near, &scratch_);
  size_t used = 0;
  for (size_t i = 0; i < n; ++i) {
    const bool absent = slots[i] == kNoSlot;
    slots[i] = kNoSlot;
    const Key key = load(keys + i * key_bytes_);
    // A key that the call names twice was absent twice: the second one finds the first.
    if (!absent || used == granted || find(hash(group, key), group, key) != kNoSlot) continue;
    const uint32_t slot = scratch_[used++];
    Node& node = nodes_[c.first + slot];
    node = {};
    node.key = key;
    node.group = static_cast<uint32_t>(group);
    node.state = State::kReserved;
    insert(c.first + slot);
    slots[i] = slot;
  }
  for (size_t i = used; i < granted; ++i) c.free.give_back(scratch_[i]);
  c.counts.free -= used;
  c.counts.reserved += used;
}

void SlotIndex::publish(uint64_t group, const uint32_t* slots, size_t n) {
  Class& c = class_of(group);
  size_t i = 0;
  try {
    for (; i < n; ++i) {
      Node& node = nodes_[checked(c, group, slots[i])];
      const bool reserved = node.state == State::kReserved || node.state == State::kReservedForgotten;
      if (!reserved || node.marked) refuse(name(group, slots[i]) + " is not reserved, or is named twice");
      node.marked = true;
    }
  } catch (...) {
    while (i-- > 0) nodes_[c.first + slots[i]].marked = false;
    throw;
  }
  for (i = 0; changes_.on() && i < n; ++i) {
    const Node& node = nodes_[c.first + slots[i]];
    if (node.state == State::kReserved)
      changes_.add(IndexChanges::Kind::kStored, node.group, node.key.bytes(), key_bytes_);
  }
  for (i = n; i-- > 0;) {  // like unpin: the head of a run becomes the most recent
    const uint32_t node = c.first + slots[i];
    nodes_[node].marked = false;
    --c.counts.reserved;
    if (nodes_[node].state == State::kReservedForgotten) {
      set_free(c, node);
      continue;
    }
    nodes_[node].state = State::kReady;
    ++c.counts.ready;
    link_newest(c, node);
  }
  if (n != 0) ++version_;
}

void SlotIndex::abandon(uint64_t group, const uint32_t* slots, size_t n) {
  Class& c = class_of(group);
  size_t i = 0;
  try {
    for (; i < n; ++i) {
      Node& node = nodes_[checked(c, group, slots[i])];
      if (node.state == State::kReadyForgotten || node.marked)
        refuse(name(group, slots[i]) + " is abandoned already");
      node.marked = true;
    }
  } catch (...) {
    while (i-- > 0) nodes_[c.first + slots[i]].marked = false;
    throw;
  }
  for (i = 0; i < n; ++i) {
    const uint32_t node = c.first + slots[i];
    nodes_[node].marked = false;
    if (nodes_[node].state == State::kReady) {
      forget_ready(c, node);
      continue;
    }
    if (nodes_[node].state == State::kReserved) remove(node);
    --c.counts.reserved;
    set_free(c, node);
  }
}

void SlotIndex::disown(uint64_t group, const uint32_t* slots, size_t n) {
  Class& c = class_of(group);
  for (size_t i = 0; i < n; ++i) {
    const State state = nodes_[checked(c, group, slots[i])].state;
    if (state != State::kReserved && state != State::kReservedForgotten)
      refuse(name(group, slots[i]) + " is not reserved");
  }
  for (size_t i = 0; i < n; ++i) {
    const uint32_t node = c.first + slots[i];
    if (nodes_[node].state != State::kReserved) continue;
    remove(node);
    nodes_[node].state = State::kReservedForgotten;
  }
  if (n != 0) ++version_;
}

void SlotIndex::honour_leases(uint64_t slot_class, std::shared_ptr<const HostPool> pool) {
  if (slot_class >= classes_.size())
    refuse("slot class " + std::to_string(slot_class) + "; there are " + std::to_string(classes_.size()));
  Class& c = classes_[slot_class];
  if (pool->classes().size() <= slot_class || pool->classes()[slot_class].slots < c.slots)
    refuse("the pool has fewer slots of class " + std::to_string(slot_class) + " than the index");
  c.slot_class = static_cast<uint32_t>(slot_class);
  c.leases = std::move(pool);
}

bool SlotIndex::reset() {
  for (Class& c : classes_) {
    for (uint32_t n = c.first; n < c.first + c.slots; ++n) {
      if (nodes_[n].state == State::kReady) {
        forget_ready(c, n);
      } else if (nodes_[n].state == State::kReserved) {
        remove(n);
        nodes_[n].state = State::kReservedForgotten;
      }
    }
  }
  ++version_;
  changes_.clear();
  return std::all_of(classes_.begin(), classes_.end(),
                     [](const Class& c) { return c.counts.reserved == 0 && c.counts.pinned == 0; });
}

SlotIndex::Counts SlotIndex::counts(uint64_t slot_class) const {
  if (slot_class >= classes_.size())
    refuse("slot class " + std::to_string(slot_class) + "; there are " + std::to_string(classes_.size()));
  return classes_[slot_class].counts;
}

SlotIndex::Counts SlotIndex::totals() const {
  Counts sum;
  for (const Class& c : classes_) {
    sum.free += c.counts.free, sum.reserved += c.counts.reserved, sum.ready += c.counts.ready;
    sum.pinned += c.counts.pinned, sum.total += c.counts.total;
  }
  return sum;
}

}  // namespace pega
