// SPDX-License-Identifier: Apache-2.0
// What the transfer engine asks of a device. Three implementations: CudaDevice (driver API loaded at run
// time), HostDevice (CPU vLLM, development and CI) and SimDevice (deterministic simulation with faults).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace pega {

// What a device made of a job's ranges while the job still waited for its event; empty if nothing.
struct Prepared {
  std::vector<uint64_t> words;     // two a range, as its kernels read them
  std::vector<size_t> run_starts;  // ranges that do not lie behind the one before them in host memory
  bool aligned = false;            // every address and size is a multiple of 16

  void clear() { words.clear(), run_starts.clear(); }
};

// A bounded piece of one transfer, submitted as a whole. `ranges` stays valid until its ticket is retired.
// Every range of a chunk fits the decision's limits: the engine has split and packed them.
struct Chunk {
  Direction direction;
  Backend backend;  // never kAuto
  const Range* ranges;
  size_t count;
  uint64_t bytes;          // sum over ranges
  uint32_t grid;           // upper bound of CTAs (workers on a host device)
  uint32_t inflight_slot;  // 0 .. inflight_chunks-1 of its lane; free when this chunk is submitted
  const Prepared* prepared = nullptr;  // of the ranges from `first` on; may be null
  size_t first = 0;
};

enum class Progress : uint8_t { kPending, kDone, kFailed };

using Ticket = uint64_t;   // 0 is never a valid ticket
using EventId = uint64_t;  // 0 = no event: always ready

struct DeviceLimits {
  uint64_t max_chunk_bytes;      // larger decisions are clamped
  uint32_t max_inflight_chunks;  // per lane
  uint32_t max_chunk_descriptors;
  uint32_t max_grid_blocks;
  uint64_t max_staged_bytes = 0;  // of a staged chunk, where that is less than max_chunk_bytes; 0: it is not
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  virtual DeviceLimits limits() const = 0;

  // --- called by the owner of the compute stream (vLLM's thread); cheap, never blocks ---
  // Marks all work submitted so far to `stream` (a native stream handle; ignored by host devices).
  // Returns 0 where there is nothing to wait for. Throws std::runtime_error when the device is broken.
  virtual EventId record_event(uint64_t stream) = 0;

  // --- called by the engine thread only ---
  virtual Progress query_event(EventId event) = 0;
  virtual void release_event(EventId event) = 0;

  // Whatever makes submitting parts of these ranges cheaper. Called while there is time.
  virtual void prepare(const std::vector<Range>& ranges, Prepared* prepared) {
    (void)ranges;
    prepared->clear();
  }

  // Starts a chunk; never blocks, never throws. Always returns a ticket: a chunk that could not be started,
  // or only in part, reports kFailed from poll() once nothing of it can touch memory any more.
  virtual Ticket submit(const Chunk& chunk) = 0;

  // kDone or kFailed only when no copy of this chunk can still touch memory; the ticket is then retired and
  // must not be polled again. May also advance work submitted in slices (memcpy).
  virtual Progress poll(Ticket ticket) = 0;

  // Why the latest failure happened; for logs.
  virtual std::string last_error() const = 0;

  // False once the device can take no more work of this direction (a sticky error): the lane is then disabled
  // and its jobs fail.
  virtual bool healthy(Direction direction) const = 0;

  // Called by the engine thread when chunks are in flight and nothing moved: a GPU device returns at once
  // (poll hard), a host device may sleep until a worker finishes something, at most `limit`.
  virtual void relax(std::chrono::microseconds limit) = 0;
};

}  // namespace pega
