// SPDX-License-Identifier: Apache-2.0
#include "layout.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace pega {
namespace {

// 2^56: above every user-space address of today's 64-bit CPUs and GPUs, so sums of two never overflow.
constexpr uint64_t kMaxAddress = uint64_t{1} << 56;

uint64_t end_of(const Segment& s, uint64_t num_blocks) {
  return s.base + (num_blocks - 1) * s.block_stride + s.bytes;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether any block of `a` shares a byte with any block of `b`. Each one's own blocks are known to be
// disjoint.
bool overlap(const Segment& a, const Segment& b, uint64_t num_blocks) {
  if (end_of(a, num_blocks) <= b.base || end_of(b, num_blocks) <= a.base) return false;
  const auto n = static_cast<int64_t>(num_blocks);
  if (a.block_stride == b.block_stride && n > 1) {
    // Block i of a and block i+m of b overlap iff -b.bytes < distance + m * stride < a.bytes.
    const auto stride = static_cast<int64_t>(a.block_stride);
    const auto distance = static_cast<int64_t>(b.base) - static_cast<int64_t>(a.base);
    const int64_t first = -floor_div(distance + static_cast<int64_t>(b.bytes) - 1, stride);
    const int64_t last = floor_div(static_cast<int64_t>(a.bytes) - 1 - distance, stride);
    return std::max(first, 1 - n) <= std::min(last, n - 1);
  }
  for (uint64_t i = 0, j = 0; i < num_blocks && j < num_blocks;) {
    const uint64_t x = a.base + i * a.block_stride, y = b.base + j * b.block_stride;
    if (x < y + b.bytes && y < x + a.bytes) return true;
    x + a.bytes < y + b.bytes ? ++i : ++j;
  }
  return false;
}

[[noreturn]] void refuse(size_t i, const std::string& what) {
  throw std::invalid_argument("segment " + std::to_string(i) + " of the group: " + what);
}

}  // namespace

GroupLayout::GroupLayout(std::vector<Segment> segments, uint64_t num_blocks)
    : segments_(std::move(segments)), num_blocks_(num_blocks) {
  if (segments_.empty()) throw std::invalid_argument("a group needs at least one segment; none was given");
  if (num_blocks == 0 || num_blocks > UINT32_MAX)
    throw std::invalid_argument("num_blocks is " + std::to_string(num_blocks) + "; allowed: 1 to 2^32 - 1");
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& s = segments_[i];
    if (s.bytes == 0 || s.bytes >= kMaxAddress)
      refuse(i, "bytes is " + std::to_string(s.bytes) + "; must be > 0");
    if (s.base == 0 || s.base >= kMaxAddress) refuse(i, "base " + std::to_string(s.base) + " is no address");
    if (num_blocks > 1 && s.block_stride < s.bytes)
      refuse(i, "block_stride " + std::to_string(s.block_stride) + " is below its " +
                    std::to_string(s.bytes) + " bytes, so its own blocks would overlap");
    if (num_blocks > 1 && s.block_stride > (kMaxAddress - s.base) / num_blocks)
      refuse(i, "its " + std::to_string(num_blocks) + " blocks with stride " +
                    std::to_string(s.block_stride) + " end beyond the address space");
    slot_bytes_ += s.bytes;
    if (slot_bytes_ > UINT32_MAX)
      refuse(i, "the blocks of a group may have at most 4 GiB - 1; they have more");
  }
  std::vector<size_t> order(segments_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return segments_[a].base < segments_[b].base; });
  for (size_t i = 0; i < order.size(); ++i) {
    const Segment& a = segments_[order[i]];
    for (size_t j = i + 1; j < order.size() && segments_[order[j]].base < end_of(a, num_blocks); ++j) {
      if (overlap(a, segments_[order[j]], num_blocks))
        refuse(order[i], "it shares bytes with segment " + std::to_string(order[j]) +
                             ": register each byte once (aliased views must be deduplicated)");
    }
  }
}

}  // namespace pega
