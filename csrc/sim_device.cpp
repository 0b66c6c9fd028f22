// SPDX-License-Identifier: Apache-2.0
#include "sim_device.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace pega {
namespace {

// Small, so that simulated jobs of a few KiB meet the limits.
constexpr DeviceLimits kLimits{64 << 10, 4, 64, 32};

void copy(Direction direction, const Range& r) {
  auto* d = reinterpret_cast<uint8_t*>(r.device);
  auto* h = reinterpret_cast<uint8_t*>(r.host);
  direction == Direction::kLoad ? std::memcpy(d, h, r.bytes) : std::memcpy(h, d, r.bytes);
}

}  // namespace

SimDevice::SimDevice(uint64_t seed, uint32_t max_delay_steps, double fail_rate, double break_rate)
    : state_(seed), max_delay_(max_delay_steps), fail_rate_(fail_rate), break_rate_(break_rate) {
  if (!(fail_rate >= 0 && fail_rate <= 1 && break_rate >= 0 && break_rate <= 1))
    throw std::invalid_argument("fail_rate and break_rate are probabilities: 0 to 1");
}

DeviceLimits SimDevice::limits() const { return kLimits; }

uint64_t SimDevice::random(uint64_t bound) {  // splitmix64: the same sequence on every platform
  uint64_t z = (state_ += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return (z ^ (z >> 31)) % bound;
}

bool SimDevice::chance(double probability) {
  return static_cast<double>(random(1u << 30)) < probability * static_cast<double>(1u << 30);
}

EventId SimDevice::record_event(uint64_t) {
  events_[next_id_] = static_cast<uint32_t>(random(max_delay_ + 1));
  return next_id_++;
}

Progress SimDevice::query_event(EventId event) {
  advance();
  const auto it = events_.find(event);
  if (it == events_.end()) {
    violation("query of event " + std::to_string(event) + ", which is not live");
    return Progress::kFailed;
  }
  if (it->second == 0) return Progress::kDone;
  --it->second;
  return Progress::kPending;
}

void SimDevice::release_event(EventId event) {
  if (events_.erase(event) == 0)
    violation("release of event " + std::to_string(event) + ", which is not live");
}

std::vector<EventId> SimDevice::unready_events() const {
  std::vector<EventId> unready;
  for (const auto& [event, queries] : events_) {
    if (queries != 0) unready.push_back(event);
  }
  return unready;
}

Ticket SimDevice::submit(const Chunk& chunk) {
  const auto direction = static_cast<int>(chunk.direction);
  advance();
  for (const auto& [ticket, flight] : flights_) {
    if (flight.chunk.direction == chunk.direction && flight.chunk.inflight_slot == chunk.inflight_slot)
      violation("inflight slot " + std::to_string(chunk.inflight_slot) + " was not free");
  }
  if (chunk.backend == Backend::kAuto) violation("a chunk without a backend");
  if (chunk.count == 0 || chunk.count > kLimits.max_chunk_descriptors ||
      chunk.bytes > kLimits.max_chunk_bytes || chunk.grid == 0 || chunk.grid > kLimits.max_grid_blocks ||
      chunk.inflight_slot >= kLimits.max_inflight_chunks)
    violation("a chunk beyond the device's limits");
  if (broken_[direction]) violation("a chunk for a broken direction");

  Flight flight{chunk, {}, static_cast<uint32_t>(random(max_delay_ + 1)), false, chance(break_rate_)};
  flight.fails = flight.breaks || chance(fail_rate_);
  uint64_t bytes = 0;
  for (size_t i = 0; i < chunk.count; ++i) {
    const Range& r = chunk.ranges[i];
    bytes += r.bytes;
    if (r.bytes == 0) violation("an empty range");
    const uint64_t cut = random(r.bytes + 1);
    if (cut != 0) flight.left.push_back({r.device, r.host, cut});
    if (cut != r.bytes) flight.left.push_back({r.device + cut, r.host + cut, r.bytes - cut});
  }
  if (bytes != chunk.bytes) violation("a chunk's bytes are not the sum of its ranges");
  ++chunks_;
  max_grid_ = std::max(max_grid_, chunk.grid);
  outstanding_[direction] += chunk.bytes;
  max_outstanding_[direction] = std::max(max_outstanding_[direction], outstanding_[direction]);
  flights_.emplace(next_id_, std::move(flight));
  return next_id_++;
}

// Somewhere, something is copied: any piece of any flight, in any order.
void SimDevice::advance() {
  for (auto& [ticket, flight] : flights_) {
    for (uint64_t n = random(4); n > 0 && !flight.left.empty(); --n) copy_one(&flight);
  }
}

void SimDevice::copy_one(Flight* flight) {
  std::swap(flight->left[random(flight->left.size())], flight->left.back());
  copy(flight->chunk.direction, flight->left.back());
  flight->left.pop_back();
}

Progress SimDevice::poll(Ticket ticket) {
  advance();
  const auto it = flights_.find(ticket);
  if (it == flights_.end()) {
    violation("poll of ticket " + std::to_string(ticket) + ", which is not in flight");
    return Progress::kFailed;
  }
  Flight& flight = it->second;
  if (flight.polls_left != 0) {
    --flight.polls_left;
    return Progress::kPending;
  }
  const auto direction = static_cast<int>(flight.chunk.direction);
  const bool fails = flight.fails;
  if (fails) {
    error_ = flight.breaks ? "simulated: this direction broke" : "simulated: this chunk failed";
    broken_[direction] = broken_[direction] || flight.breaks;
  } else {
    while (!flight.left.empty()) copy_one(&flight);
  }
  outstanding_[direction] -= flight.chunk.bytes;
  flights_.erase(it);
  return fails ? Progress::kFailed : Progress::kDone;
}

std::vector<Range> SimDevice::touching() const {
  std::vector<Range> ranges;
  for (const auto& [ticket, flight] : flights_)
    ranges.insert(ranges.end(), flight.chunk.ranges, flight.chunk.ranges + flight.chunk.count);
  return ranges;
}

}  // namespace pega
