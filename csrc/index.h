// SPDX-License-Identifier: Apache-2.0
// Which key lies in which slot: hash map, LRU and pins. Used by the scheduler's thread alone.
//
// Slots: free -> reserved -> ready. A pinned slot leaves the LRU list when eviction meets it there, so that
// pinning visits no other slot and eviction steps over it once at most. What is forgotten while somebody
// still holds it (a pin, or a writer) leaves the map at once and becomes free with its last holder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <vector>

#include "free_slots.h"
#include "index_changes.h"
#include "pool.h"  // kMaxKeyBytes

namespace pega {

class SlotIndex {
 public:
  static constexpr uint32_t kNoSlot = UINT32_MAX;
  enum class Presence : uint8_t { kAbsent = 0, kReserved = 1, kReady = 2 };
  struct Counts {
    uint64_t free = 0, reserved = 0, ready = 0, pinned = 0, total = 0;
  };

  // Throws std::invalid_argument. All functions below throw it too: for an unknown group, and for a slot that
  // is not in the state that the call asks for; then nothing has changed.
  SlotIndex(const std::vector<uint32_t>& slots_per_class, std::vector<uint32_t> group_classes,
            uint32_t key_bytes);

  uint32_t key_bytes() const { return key_bytes_; }

  // The longest ready run of `keys` (n x key_bytes): its slots, each pinned. `slots` has room for n.
  size_t match_and_pin(uint64_t group, const uint8_t* keys, size_t n, uint32_t* slots);
  size_t match(uint64_t group, const uint8_t* keys, size_t n);
  void contains(uint64_t group, const uint8_t* keys, size_t n, Presence* out);
  // Pins all keys, or throws.
  void pin(uint64_t group, const uint8_t* keys, size_t n, uint32_t* slots);
  // From the last to the first, so that of one run the head becomes the most recent: a tail is useless
  // without it.
  void unpin(uint64_t group, const uint32_t* slots, size_t n);
  // Slots for absent keys, kNoSlot for the others and for those without room. `near`: a slot to lie behind,
  // or -1.
  void reserve(uint64_t group, const uint8_t* keys, size_t n, int64_t near, uint32_t* slots);
  void publish(uint64_t group, const uint32_t* slots, size_t n);
  void abandon(uint64_t group, const uint32_t* slots, size_t n);
  // Reserved slots whose keys somebody else may now compute or fetch: the keys leave the map, the slots stay
  // reserved until they are abandoned (or, though published, freed).
  void disown(uint64_t group, const uint32_t* slots, size_t n);
  bool reset();

  // Eviction passes over the slots of this class that carry a lease in the pool's table.
  void honour_leases(uint64_t slot_class, std::shared_ptr<const HostPool> pool);

  // Off until `record` is called on it.
  IndexChanges& changes() { return changes_; }
  uint64_t version() const { return version_; }
  uint64_t evictions() const { return evictions_; }
  Counts counts(uint64_t slot_class) const;
  Counts totals() const;

 private:
  enum class State : uint8_t { kFree, kReserved, kReady, kReservedForgotten, kReadyForgotten };
  struct Key {  // padded with zeros
    uint64_t words[kMaxKeyBytes / 8];
    bool operator==(const Key& other) const {
      uint64_t differ = 0;
      for (size_t i = 0; i < std::size(words); ++i) differ |= words[i] ^ other.words[i];
      return differ == 0;
    }
    const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(words); }
  };
  struct alignas(64) Node {  // one cache line: a lookup of thousands of keys waits for memory and little else
    Key key;
    uint32_t group;
    uint32_t pins;
    uint32_t older, newer;  // in the LRU list
    State state;
    bool listed;  // in the LRU list: ready, and not met by eviction while pinned
    bool marked;  // scratch
  };
  // A cell of the open-addressing table; the tag spares most visits of nodes: no other key's when looking one
  // up, and none at all to see where a cell's key belongs.
  struct Cell {
    uint32_t node;  // kNoSlot: empty
    uint32_t tag;   // of the key's hash; a table has at most 2^32 cells
  };
  struct Class {
    uint32_t first;  // node of slot 0
    uint32_t slots;
    FreeSlots free;
    uint32_t oldest = kNoSlot, newest = kNoSlot;
    Counts counts = {};
    uint32_t slot_class = 0;
    std::shared_ptr<const HostPool> leases = nullptr;  // may be null
  };

  Class& class_of(uint64_t group);
  Key load(const uint8_t* key) const;
  static uint64_t hash(uint64_t group, const Key& key);
  uint32_t find(uint64_t hash, uint64_t group, const Key& key) const;
  template <typename Visit>
  void look_up(uint64_t group, const uint8_t* keys, size_t n, Visit visit);
  void insert(uint32_t node);
  void remove(uint32_t node);
  void link_newest(Class& c, uint32_t node);
  void unlink(Class& c, uint32_t node);
  void fetch_neighbours(const Node& node) const;
  void take_pin(Class& c, uint32_t node);
  void set_free(Class& c, uint32_t node);
  void forget_ready(Class& c, uint32_t node);
  size_t evict(Class& c, size_t wanted);
  uint32_t checked(const Class& c, uint64_t group, uint32_t slot) const;

  const std::vector<uint32_t> group_classes_;
  const uint32_t key_bytes_;
  std::vector<Class> classes_;
  std::vector<Node> nodes_;
  std::vector<Cell> cells_;
  uint64_t mask_ = 0;
  uint64_t version_ = 0, evictions_ = 0;
  std::vector<uint32_t> scratch_;
  IndexChanges changes_;
};

}  // namespace pega
