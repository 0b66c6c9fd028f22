// SPDX-License-Identifier: Apache-2.0
#include "planner.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>

namespace pega {

Geometry::Geometry(std::shared_ptr<HostPool> pool_, std::vector<GroupLayout> layouts_,
                   std::vector<uint32_t> classes_)
    : pool(std::move(pool_)), layouts(std::move(layouts_)), group_classes(std::move(classes_)) {
  if (pool == nullptr) throw std::invalid_argument("no pool given");
  if (layouts.empty() || layouts.size() != group_classes.size())
    throw std::invalid_argument(std::to_string(layouts.size()) + " layouts but " +
                                std::to_string(group_classes.size()) +
                                " group_classes: give one class per group");
  for (size_t g = 0; g < layouts.size(); ++g) {
    if (group_classes[g] >= pool->classes().size())
      throw std::invalid_argument("group " + std::to_string(g) + " has slot class " +
                                  std::to_string(group_classes[g]) + "; the pool has " +
                                  std::to_string(pool->classes().size()));
    const uint64_t room = pool->classes()[group_classes[g]].slot_bytes;
    if (layouts[g].slot_bytes() > room)
      throw std::invalid_argument("a block of group " + std::to_string(g) + " has " +
                                  std::to_string(layouts[g].slot_bytes()) + " bytes, a slot of its class " +
                                  std::to_string(group_classes[g]) + " only " + std::to_string(room));
  }
}

void Geometry::check(const Move* moves, size_t count) const {
  for (size_t i = 0; i < count; ++i) {
    const Move& m = moves[i];
    const auto refuse = [&](const char* what, uint64_t given, uint64_t limit) {
      throw std::invalid_argument("move " + std::to_string(i) + ": " + what + " " + std::to_string(given) +
                                  " is out of range; there are " + std::to_string(limit));
    };
    if (m.group >= layouts.size()) refuse("group", m.group, layouts.size());
    if (m.block >= layouts[m.group].num_blocks()) refuse("block", m.block, layouts[m.group].num_blocks());
    const uint64_t slots = pool->classes()[group_classes[m.group]].slots;
    if (m.slot >= slots) refuse("slot", m.slot, slots);
  }
}

// Radix sort by (class, slot), 11 bits a pass and only as many passes as the largest key has digits: 65,536
// shuffled blocks take 0.4 ms here, 5 ms with std::sort.
void Planner::sort(const Move* moves, size_t count, std::vector<uint32_t>* order) {
  constexpr int kDigit = 11;
  keyed_.resize(count);
  uint64_t seen = 0, previous = 0;
  bool in_order = true;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t key = uint64_t{geometry_.group_classes[moves[i].group]} << 32 | moves[i].slot;
    keyed_[i] = {key, static_cast<uint32_t>(i)};
    in_order = in_order && previous <= key;
    previous = key;
    seen |= key;
  }
  for (int shift = 0; !in_order && shift < 64 && seen >> shift != 0; shift += kDigit) {
    if ((seen >> shift & ((1u << kDigit) - 1)) == 0) continue;
    std::array<uint32_t, (1u << kDigit) + 1> start{};
    for (const auto& k : keyed_) ++start[(k.first >> shift & ((1u << kDigit) - 1)) + 1];
    for (size_t d = 1; d < start.size(); ++d) start[d] += start[d - 1];
    sorted_.resize(count);
    for (const auto& k : keyed_) sorted_[start[k.first >> shift & ((1u << kDigit) - 1)]++] = k;
    keyed_.swap(sorted_);
  }
  order->resize(count);
  for (size_t i = 0; i < count; ++i) (*order)[i] = keyed_[i].second;
}

void Planner::plan(const Move* moves, size_t count, std::vector<uint32_t>* order,
                   std::vector<Range>* ranges) {
  sort(moves, count, order);
  ranges->clear();
  uint64_t allocation = 0;  // of the last range
  for (const uint32_t i : *order) {
    const Move& m = moves[i];
    const GroupLayout& layout = geometry_.layouts[m.group];
    auto host = reinterpret_cast<uint64_t>(geometry_.pool->slot(geometry_.group_classes[m.group], m.slot));
    for (const Segment& s : layout.segments()) {
      const uint64_t device = s.base + m.block * s.block_stride;
      Range* last = ranges->empty() ? nullptr : &ranges->back();
      if (last != nullptr && last->host + last->bytes == host && last->device + last->bytes == device &&
          allocation == s.allocation) {
        last->bytes += s.bytes;
      } else {
        ranges->push_back({device, host, s.bytes});
        allocation = s.allocation;
      }
      host += s.bytes;
    }
  }
}

std::vector<Range> split(const std::vector<Range>& ranges, uint64_t max_bytes) {
  std::vector<Range> pieces;
  for (const Range& r : ranges) {
    for (uint64_t at = 0; at < r.bytes; at += max_bytes)
      pieces.push_back({r.device + at, r.host + at, std::min(max_bytes, r.bytes - at)});
  }
  return pieces;
}

TransferShape shape_of(Direction direction, const std::vector<Range>& ranges) {
  TransferShape shape;
  shape.direction = direction;
  shape.ranges = ranges.size();
  if (ranges.empty()) return shape;
  uint64_t bits = 16;
  shape.min_range_bytes = ranges.front().bytes;
  for (const Range& r : ranges) {
    shape.total_bytes += r.bytes;
    shape.min_range_bytes = std::min(shape.min_range_bytes, r.bytes);
    bits |= r.device | r.host | r.bytes;
  }
  shape.avg_range_bytes = shape.total_bytes / shape.ranges;
  shape.alignment = static_cast<uint32_t>(bits & (~bits + 1));
  return shape;
}

}  // namespace pega
