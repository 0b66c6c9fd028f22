// SPDX-License-Identifier: Apache-2.0
// The host KV pool: block-major slots in one memfd, their keys and generations in another.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

namespace pega {

inline constexpr size_t kMaxKeyBytes = 32;

// One slot's line in the shared table, the same in every process that maps it. A seqlock: `generation` is
// odd while the slot is being written and never goes back; a reader takes it before and after.
struct SlotEntry {
  uint8_t key[kMaxKeyBytes];         // zero padded; all zero and key_bytes 0: nothing is stored here
  std::atomic<uint64_t> generation;  // offset 32
  uint32_t length;                   // offset 40: bytes stored
  uint32_t key_bytes;                // offset 44
  std::atomic<uint64_t> lease;  // offset 48: eviction leaves the slot alone until then (CLOCK_MONOTONIC, ns)
  std::atomic<uint64_t> floor;  // offset 56: up to this generation the slot is not offered to other instances
};
static_assert(sizeof(SlotEntry) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// The machine or its limits leave too little; says what to change.
class NotEnoughMemory : public std::bad_alloc {
 public:
  explicit NotEnoughMemory(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

struct SlotClass {
  uint64_t slot_bytes;
  uint64_t slots;
};

// Both memfds hold the classes one after the other: data at `data_offset`, entries 64 bytes a slot.
class HostPool {
 public:
  // Reserves address space; memory is touched lazily unless `prefault`. Throws std::invalid_argument for
  // sizes that cannot be, NotEnoughMemory when the machine or its cgroup has too little left.
  HostPool(std::vector<SlotClass> classes, bool prefault);
  // Another process's pool, by its descriptors (duplicated here) and its classes. Throws
  // std::invalid_argument if they do not fit together.
  HostPool(int data_fd, int table_fd, std::vector<SlotClass> classes);
  ~HostPool();
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;

  int data_fd() const { return data_.fd; }
  int table_fd() const { return table_.fd; }
  uint8_t* data() const { return static_cast<uint8_t*>(data_.memory); }
  uint64_t nbytes() const { return data_.bytes; }
  const std::vector<SlotClass>& classes() const { return classes_; }

  // Not checked: callers validated class and slot (check_slot).
  uint8_t* slot(uint32_t slot_class, uint64_t slot) const {
    return data() + data_offset_[slot_class] + slot * classes_[slot_class].slot_bytes;
  }
  SlotEntry& entry(uint32_t slot_class, uint64_t slot) const {
    return static_cast<SlotEntry*>(table_.memory)[table_offset_[slot_class] + slot];
  }
  // Throws std::invalid_argument.
  void check_slot(uint64_t slot_class, uint64_t slot) const;

 private:
  uint64_t lay_out();  // fills the offsets; slots in all. Throws std::invalid_argument.

  struct Mapping {
    int fd = -1;
    void* memory = nullptr;
    uint64_t bytes = 0;
    void create(const char* name, uint64_t size);
    void attach(const char* name, int other, uint64_t size);
    bool map(uint64_t size);
    ~Mapping();
  };

  std::vector<SlotClass> classes_;
  std::vector<uint64_t> data_offset_, table_offset_;
  uint64_t data_bytes_ = 0;
  Mapping data_, table_;
};

// What a new pool may still take: the tightest of MemAvailable and the limits of the process's memory cgroups
// (v1 and v2, reclaimable page cache counted as free), and which of them it was.
std::pair<uint64_t, const char*> available_memory();

// The writer's side of the seqlock. begin: odd, before the first byte. end: even, after the last one;
// key_bytes 0 says that the slot holds nothing. forget: what a slot holds is no longer to be believed.
void begin_write(SlotEntry& entry);
void end_write(SlotEntry& entry, const uint8_t* key, uint32_t key_bytes, uint32_t length);
void forget(SlotEntry& entry);

// Nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
uint64_t monotonic_ns();

// Whether the slot holds `key`, completely, and under which generation.
bool holds(const SlotEntry& entry, const uint8_t* key, uint32_t key_bytes, uint64_t* generation);

}  // namespace pega
