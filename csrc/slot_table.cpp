// SPDX-License-Identifier: Apache-2.0
#include "slot_table.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace pega {
namespace {

// Shorter keys are padded: the table pads them with zeros, too.
uint64_t prefix_of(const uint8_t* key, uint32_t key_bytes) {
  uint64_t prefix = 0;
  std::memcpy(&prefix, key, key_bytes < sizeof prefix ? key_bytes : sizeof prefix);
  return prefix;
}

}  // namespace

SlotTable::SlotTable(std::shared_ptr<HostPool> pool, uint32_t slot_class, uint32_t key_bytes)
    : pool_(std::move(pool)), slot_class_(slot_class), key_bytes_(key_bytes) {
  pool_->check_slot(slot_class, 0);
  if (key_bytes == 0 || key_bytes > kMaxKeyBytes)
    throw std::invalid_argument("key_bytes is " + std::to_string(key_bytes) + "; allowed: 1 to " +
                                std::to_string(kMaxKeyBytes));
  seen_.resize(slots());
  prefix_.resize(slots());
}

void SlotTable::check(const uint32_t* slots, size_t n) const {
  for (size_t i = 0; i < n; ++i) pool_->check_slot(slot_class_, slots[i]);
}

bool SlotTable::located(const uint8_t* key, uint32_t* slot, uint64_t* generation) const {
  const auto at = where_.find(prefix_of(key, key_bytes_));
  if (at == where_.end()) return false;
  *slot = at->second;
  return holds_now(*slot, key, generation);
}

bool SlotTable::holds_now(uint32_t slot, const uint8_t* key, uint64_t* generation) const {
  return holds(entry(slot), key, key_bytes_, generation) &&
         *generation > entry(slot).floor.load(std::memory_order_acquire);
}

void SlotTable::refresh() {
  for (uint32_t slot = 0; slot < slots(); ++slot) {
    const SlotEntry& e = entry(slot);
    const uint64_t generation = e.generation.load(std::memory_order_acquire);
    if (generation == seen_[slot] || (generation & 1) != 0) continue;
    uint8_t key[kMaxKeyBytes];
    std::memcpy(key, e.key, sizeof key);
    const bool keyed = e.key_bytes == key_bytes_;
    std::atomic_thread_fence(std::memory_order_acquire);
    if (e.generation.load(std::memory_order_relaxed) != generation) continue;  // next time
    const auto old = where_.find(prefix_[slot]);
    if (seen_[slot] != 0 && old != where_.end() && old->second == slot) where_.erase(old);
    if (keyed) {
      prefix_[slot] = prefix_of(key, key_bytes_);
      where_[prefix_[slot]] = slot;
    }
    seen_[slot] = generation;
  }
}

size_t SlotTable::find(const uint8_t* keys, size_t n, uint32_t* slots, uint64_t* generations) {
  const std::lock_guard<std::mutex> lock(finding_);
  bool fresh = false;
  for (size_t i = 0; i < n; ++i) {
    while (!located(keys + i * key_bytes_, &slots[i], &generations[i])) {
      if (fresh) return i;
      refresh();
      fresh = true;
    }
  }
  return n;
}

void SlotTable::still(const uint32_t* slots, const uint64_t* generations, size_t n, uint8_t* out) const {
  check(slots, n);
  std::atomic_thread_fence(std::memory_order_acquire);
  for (size_t i = 0; i < n; ++i) {
    const uint64_t now = entry(slots[i]).generation.load(std::memory_order_acquire);
    out[i] = now == generations[i] && now > entry(slots[i]).floor.load(std::memory_order_acquire);
  }
}

void SlotTable::holding(const uint32_t* slots, const uint8_t* keys, size_t n, uint64_t* generations) const {
  check(slots, n);
  for (size_t i = 0; i < n; ++i) {
    if (!holds_now(slots[i], keys + i * key_bytes_, &generations[i])) generations[i] = 0;
  }
}

void SlotTable::begin(const uint32_t* slots, size_t n) {
  check(slots, n);
  for (size_t i = 0; i < n; ++i) begin_write(entry(slots[i]));
}

void SlotTable::end(const uint32_t* slots, const uint8_t* keys, size_t n, uint32_t length) {
  check(slots, n);
  for (size_t i = 0; i < n; ++i) {
    if (keys != nullptr)
      end_write(entry(slots[i]), keys + i * key_bytes_, key_bytes_, length);
    else
      end_write(entry(slots[i]), nullptr, 0, 0);
  }
}

void SlotTable::lease(const uint32_t* slots, size_t n, uint64_t until) {
  check(slots, n);
  for (size_t i = 0; i < n; ++i) entry(slots[i]).lease.store(until, std::memory_order_relaxed);
}

void SlotTable::forget(const uint32_t* slots, size_t n) {
  check(slots, n);
  for (size_t i = 0; i < n; ++i) {
    SlotEntry& e = entry(slots[i]);
    const uint64_t generation = e.generation.load(std::memory_order_acquire);
    e.floor.store(generation + (generation & 1), std::memory_order_release);  // odd: it is being written
  }
}

void SlotTable::forget_all() {
  for (uint32_t slot = 0; slot < slots(); ++slot) forget(&slot, 1);
}

void SlotTable::distrust(const uint32_t* slots, size_t n) {
  check(slots, n);
  for (size_t i = 0; i < n; ++i) entry(slots[i]).floor.store(UINT64_MAX, std::memory_order_release);
}

}  // namespace pega
