// SPDX-License-Identifier: Apache-2.0
// Host memory that the GPU may touch: which of it is registered, and under which address the GPU sees it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cuda_driver.h"
#include "types.h"

namespace pega {

class CudaHostMemory {
 public:
  // One registration: `bytes` at `host`, which kernels must address as `device`.
  struct Region {
    uint64_t host;
    uint64_t bytes;
    uint64_t device;
    uint64_t pool;  // address of the add() call that it belongs to
  };

  explicit CudaHostMemory(std::shared_ptr<const CudaDriver> driver) : cu_(std::move(driver)) {}

  // Page-locks and maps memory. All or nothing. Throws std::invalid_argument for an empty, unaligned or
  // overlapping range and std::runtime_error, with the limit to raise, when the driver refuses.
  void add(uint64_t address, uint64_t bytes);
  // Undoes add(address, ...). Throws std::invalid_argument if there was none.
  void remove(uint64_t address);
  void remove_all();

  // The lowest address that the GPU sees: pieces carry 48-bit offsets from it.
  uint64_t base() const { return base_; }

  // How much of [host, host + bytes) lies in the registration of its first byte.
  uint64_t contiguous(uint64_t host, uint64_t bytes) const {
    const Region* region = find(host);
    return region ? std::min(bytes, region->host + region->bytes - host) : 0;
  }

  bool covers(const Range& range) const {
    uint64_t done = 0;
    while (done < range.bytes) {
      const uint64_t part = contiguous(range.host + done, range.bytes - done);
      if (part == 0) return false;
      done += part;
    }
    return true;
  }

  // The registration that holds this byte, or nullptr.
  const Region* find(uint64_t host) const;

 private:
  void unregister(const Region& region);
  void update_base();

  std::shared_ptr<const CudaDriver> cu_;
  std::vector<Region> regions_;  // by host address
  uint64_t base_ = 0;
};

}  // namespace pega
