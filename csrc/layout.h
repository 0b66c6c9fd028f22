// SPDX-License-Identifier: Apache-2.0
// Where the bytes of a block lie on the device: validated once here, trusted everywhere else.
#pragma once

#include <cstdint>
#include <vector>

namespace pega {

// One fragment of every block: `bytes` at `base + block * block_stride`. Only ranges of the same `allocation`
// may merge on the device side: two allocations that happen to touch are still two objects for a driver.
struct Segment {
  uint64_t base;
  uint64_t block_stride;
  uint64_t bytes;
  uint64_t allocation;
};

// The blocks of one cache group. In a slot, segment i lies behind segments 0..i-1, without gaps.
class GroupLayout {
 public:
  // Throws std::invalid_argument: no segment or block, an empty segment, a stride below the segment's size,
  // an address range that overflows, or two segments that share a byte.
  GroupLayout(std::vector<Segment> segments, uint64_t num_blocks);

  const std::vector<Segment>& segments() const { return segments_; }
  uint64_t num_blocks() const { return num_blocks_; }
  uint64_t slot_bytes() const { return slot_bytes_; }

 private:
  std::vector<Segment> segments_;
  uint64_t num_blocks_;
  uint64_t slot_bytes_ = 0;
};

}  // namespace pega
