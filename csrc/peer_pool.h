// SPDX-License-Identifier: Apache-2.0
// The host pool of another instance of this machine, read through its memory file.
//
// Read with pread, not mapped: as fast where each slot is read once (no page tables to fill), nothing to
// unmap when the other instance ends, and a file that turns out to be shorter is an error instead of a
// SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace pega {

class PeerPool {
 public:
  // One slot class: `slots` slots of `slot_bytes` from `offset` on. `fd` is duplicated. Throws
  // std::invalid_argument unless it is a memory file that holds all of them and that nobody can shorten.
  PeerPool(int fd, uint64_t offset, uint64_t slot_bytes, uint64_t slots);
  ~PeerPool();
  PeerPool(const PeerPool&) = delete;
  PeerPool& operator=(const PeerPool&) = delete;

  // Copies slots `theirs` into slots `ours` of a class of `to`, in pieces of at most 1 MiB, by up to
  // `threads` threads, the caller's among them. When it returns nothing writes any more. False: some bytes
  // could not be read. Whether they may be believed only the other side's generations can tell, asked
  // afterwards. Throws std::invalid_argument.
  bool read(const uint32_t* theirs, HostPool& to, uint32_t slot_class, const uint32_t* ours, size_t n,
            unsigned threads) const;

 private:
  int fd_;
  const uint64_t offset_, slot_bytes_, slots_;
};

}  // namespace pega
