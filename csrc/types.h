// SPDX-License-Identifier: Apache-2.0
// The vocabulary of the engine: directions, backends, ranges, shapes, decisions.
#pragma once

#include <cstdint>
#include <string>

namespace pega {

enum class Direction : uint8_t { kLoad = 0 /* host -> device */, kSave = 1 /* device -> host */ };
inline constexpr int kDirections = 2;

enum class Backend : uint8_t { kAuto = 0, kMemcpy = 1, kKernel = 2, kChunked = 3, kStaged = 4 };
inline constexpr int kBackends = 5;

enum class Objective : uint8_t { kThroughput = 0, kBalanced = 1, kTail = 2, kStrict = 3 };
inline constexpr int kObjectives = 4;

// One contiguous run of bytes on both sides. Addresses are what the device interface understands:
// device = GPU virtual address (host address on HostDevice), host = address inside the host pool.
struct Range {
  uint64_t device;
  uint64_t host;
  uint64_t bytes;
};

// What a transfer looks like after sorting and merging: the input of the Auto policy.
struct TransferShape {
  Direction direction = Direction::kLoad;
  uint64_t ranges = 0;
  uint64_t total_bytes = 0;
  uint64_t avg_range_bytes = 0;
  uint64_t min_range_bytes = 0;
  uint32_t alignment = 16;  // largest of 16/8/4/2/1 that divides every address and size
};

// A policy as the user wrote it; 0 = unset (the device profile decides).
struct PolicySpec {
  Backend backend = Backend::kAuto;
  uint32_t max_grid_blocks = 0;
  uint32_t chunk_descriptors = 0;
  uint64_t chunk_bytes = 0;
  uint32_t inflight_chunks = 0;
  int64_t spread_us = -1;  // -1 = unset; 0 = as fast as it goes
};

// What will be done; every field is set.
struct TransferDecision {
  Backend backend = Backend::kMemcpy;
  uint32_t max_grid_blocks = 1;
  uint32_t chunk_descriptors = 1;
  uint64_t chunk_bytes = 1;
  uint32_t inflight_chunks = 1;
  // Its chunks are submitted evenly over this time: decode steps then share what one of them would feel
  // alone.
  uint32_t spread_us = 0;
  std::string reason;
};

const char* to_string(Direction d);
const char* to_string(Backend b);
const char* to_string(Objective o);

}  // namespace pega
