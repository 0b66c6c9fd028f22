// SPDX-License-Identifier: Apache-2.0
// The engine without Python, for sanitizers: cmake -DPEGA_SANITIZE=address|undefined|thread, then
//
//     engine_test [seeds]
//
// Simulation on one thread, the threaded engine under several callers, and the slot index under random calls.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "engine.h"
#include "host_device.h"
#include "index.h"
#include "sim_device.h"

// Not assert(): that one is gone from release builds.
#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

namespace pega {
namespace {

using Random = std::mt19937_64;
using Engine = std::unique_ptr<TransferEngine, void (*)(TransferEngine*)>;

constexpr uint32_t kBlocks = 32, kSlots = 48;
constexpr uint64_t kPage = 96;
constexpr uint32_t kLayers = 3;

uint64_t pick(Random& random, uint64_t bound) { return random() % bound; }

// Blocks of kLayers pages, layer after layer, and a pool for them. All bytes random.
struct Memory {
  explicit Memory(Random& random) : device(kBlocks * kPage * kLayers) {
    for (uint8_t& byte : device) byte = static_cast<uint8_t>(random());
    pool = std::make_shared<HostPool>(std::vector<SlotClass>{{kPage * kLayers, kSlots}}, false);
    for (uint64_t i = 0; i < kSlots * kPage * kLayers; ++i) pool->data()[i] = static_cast<uint8_t>(random());
  }
  Geometry geometry() const {
    std::vector<Segment> segments;
    for (uint32_t layer = 0; layer < kLayers; ++layer)
      segments.push_back({reinterpret_cast<uint64_t>(&device[layer * kBlocks * kPage]), kPage, kPage, layer});
    return Geometry(pool, {GroupLayout(segments, kBlocks)}, {0});
  }
  bool same(const Move& m) const {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      if (std::memcmp(&device[(layer * kBlocks + m.block) * kPage], pool->slot(0, m.slot) + layer * kPage,
                      kPage) != 0)
        return false;
    }
    return true;
  }
  std::vector<uint8_t> device;
  std::shared_ptr<HostPool> pool;
};

PolicySpec random_policy(Random& random) {
  PolicySpec p;
  p.backend = static_cast<Backend>(1 + pick(random, 4));
  p.max_grid_blocks = 1 + static_cast<uint32_t>(pick(random, 40));
  p.chunk_descriptors = 1 + static_cast<uint32_t>(pick(random, 80));
  p.chunk_bytes = 1 + pick(random, 2000);
  p.inflight_chunks = 1 + static_cast<uint32_t>(pick(random, 5));
  return p;
}

// Disjoint rows from [first, first + count) of blocks and of slots.
std::vector<Move> random_moves(Random& random, uint32_t first, uint32_t count) {
  std::vector<uint32_t> blocks(count), slots(count);
  std::iota(blocks.begin(), blocks.end(), first);
  std::iota(slots.begin(), slots.end(), first);
  std::shuffle(blocks.begin(), blocks.end(), random);
  std::shuffle(slots.begin(), slots.end(), random);
  std::vector<Move> moves;
  for (uint64_t i = pick(random, count + 1); i-- > 0;) moves.push_back({0, blocks[i], slots[i]});
  return moves;
}

Submission submission(uint64_t id, Direction direction, const std::vector<Move>& moves,
                      const PolicySpec& policy) {
  Submission s;
  s.job_id = id;
  s.direction = direction;
  s.moves = moves.data();
  s.count = moves.size();
  s.policy = &policy;
  return s;
}

// --- one thread, simulated device
// ------------------------------------------------------------------------------------

void simulate(uint64_t seed, std::map<Status, int>* ended) {
  Random random(seed);
  Memory memory(random);
  const bool faults = pick(random, 2) != 0;
  auto device = std::make_shared<SimDevice>(seed, static_cast<uint32_t>(pick(random, 20)), faults ? 0.1 : 0,
                                            faults ? 0.01 : 0);
  EngineOptions options;
  options.threaded = false;
  options.manual_clock = true;
  Engine engine(new TransferEngine(device, memory.geometry(), DeviceProfile(), options),
                &TransferEngine::dispose);

  struct Known {
    Direction direction;
    std::vector<Move> moves;
  };
  std::map<uint64_t, Known> jobs;
  std::set<uint32_t> busy;  // thirds of the memory: a job has one for itself
  uint64_t next_id = 1;
  const auto collect = [&] {
    for (const JobResult& result : engine->poll()) {
      const Known& job = jobs.at(result.job_id);
      ++(*ended)[result.status];
      for (const Move& m : job.moves) {
        const SlotEntry& entry = memory.pool->entry(0, m.slot);
        CHECK(entry.generation % 2 == 0);
        CHECK(result.status != Status::kDone || memory.same(m));
        busy.erase(m.slot / (kBlocks / 4));
      }
      for (const Range& r : device->touching()) {
        for (const Move& m : job.moves) {
          const auto slot = reinterpret_cast<uint64_t>(memory.pool->slot(0, m.slot));
          CHECK(r.host + r.bytes <= slot || slot + kPage * kLayers <= r.host);
        }
      }
      jobs.erase(result.job_id);
    }
  };
  for (int i = 0; i < 200; ++i) {
    const auto part = static_cast<uint32_t>(pick(random, 4));
    if (i < 150 && pick(random, 4) == 0 && busy.count(part) == 0) {
      Known job{static_cast<Direction>(pick(random, 2)),
                random_moves(random, part * (kBlocks / 4), kBlocks / 4)};
      const PolicySpec policy = random_policy(random);
      Submission s = submission(next_id, job.direction, job.moves, policy);
      s.event = pick(random, 2) != 0 ? engine->record_event(0) : 0;
      s.timeout_s = pick(random, 8) == 0 ? 0.01 : 1e6;
      CHECK(engine->submit(s));
      engine->release_event(s.event);
      if (!job.moves.empty()) busy.insert(part);
      jobs.emplace(next_id++, std::move(job));
    }
    if (!jobs.empty() && pick(random, 20) == 0) engine->cancel(jobs.begin()->first);
    engine->step(0.001);
    collect();
  }
  CHECK(engine->close(60));
  collect();
  CHECK(jobs.empty() && engine->pending() == 0);
  CHECK(device->violations().empty() && device->touching().empty() && device->live_events() == 0);
}

// --- threads
// ---------------------------------------------------------------------------------------------------------

// Each caller owns a quarter of the memory: saves it, changes the blocks, loads it back, sometimes
// cancelling.
void call_from_threads(uint64_t seed, bool close_early, std::map<Status, int>* ended) {
  Random random(seed);
  Memory memory(random);
  EngineOptions options;
  Engine engine(
      new TransferEngine(std::make_shared<HostDevice>(2), memory.geometry(), DeviceProfile(), options),
      &TransferEngine::dispose);
  constexpr uint32_t kCallers = 4, kShare = kBlocks / kCallers;
  std::mutex mutex;
  std::map<uint64_t, JobResult> results;  // poll() gives any caller anybody's results
  std::atomic<bool> closed{false};
  const auto finish = [&](uint64_t id, JobResult* result) {
    for (;;) {
      std::lock_guard<std::mutex> lock(mutex);
      for (JobResult& r : engine->poll()) CHECK(results.emplace(r.job_id, r).second);
      const auto it = results.find(id);
      if (it == results.end()) continue;
      *result = it->second;
      ++(*ended)[result->status];
      return;
    }
  };
  const auto call = [&](uint32_t caller) {
    Random own(seed * kCallers + caller);
    for (uint64_t i = 0; i < 30; ++i) {
      const std::vector<Move> moves = random_moves(own, caller * kShare, kShare);
      for (const Direction direction : {Direction::kSave, Direction::kLoad}) {
        const uint64_t id = (caller * 1000 + i) * 2 + static_cast<uint64_t>(direction);
        const PolicySpec policy = random_policy(own);
        try {
          CHECK(engine->submit(submission(id, direction, moves, policy)));
        } catch (const std::runtime_error&) {
          CHECK(closed);
          return;
        }
        if (pick(own, 5) == 0) engine->cancel(id);
        JobResult result;
        finish(id, &result);
        if (result.status != Status::kDone) break;
        for (const Move& m : moves) {
          CHECK(memory.same(m));
          if (direction == Direction::kSave)
            memory.device[m.block * kPage] ^= 1;  // the load has to bring it back
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t caller = 0; caller < kCallers; ++caller) threads.emplace_back(call, caller);
  if (close_early) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    closed = true;
    CHECK(engine->close(60));
  }
  for (std::thread& t : threads) t.join();
  CHECK(engine->close(60));
  CHECK(engine->pending() == 0);
}

// --- index
// -----------------------------------------------------------------------------------------------------------

void exercise_index(uint64_t seed) {
  Random random(seed);
  constexpr uint32_t kCapacity = 100, kKeys = 300;
  SlotIndex index({kCapacity}, {0, 0}, 8);
  std::vector<uint64_t> keys(kKeys);
  for (uint64_t& key : keys) key = random();
  std::vector<uint32_t> reserved, pinned, slots(16);
  size_t hits = 0;
  for (int i = 0; i < 3000; ++i) {
    const size_t n = 1 + pick(random, 16), first = pick(random, kKeys - n);
    const auto* joined = reinterpret_cast<const uint8_t*>(&keys[first]);
    switch (pick(random, 4)) {
      case 0:
        index.reserve(0, joined, n, static_cast<int64_t>(pick(random, kCapacity + 1)) - 1, slots.data());
        std::copy_if(slots.begin(), slots.begin() + n, std::back_inserter(reserved),
                     [](uint32_t s) { return s != SlotIndex::kNoSlot; });
        break;
      case 1: {
        const size_t matched = index.match_and_pin(0, joined, n, slots.data());
        pinned.insert(pinned.end(), slots.begin(), slots.begin() + matched);
        hits += matched;
        break;
      }
      case 2:
        pick(random, 4) == 0 ? index.abandon(0, reserved.data(), reserved.size())
                             : index.publish(0, reserved.data(), reserved.size());
        reserved.clear();
        break;
      default:
        index.unpin(0, pinned.data(), pinned.size());
        pinned.clear();
        if (pick(random, 50) == 0) index.reset();
    }
    const SlotIndex::Counts c = index.counts(0);
    CHECK(c.free + c.reserved + c.ready == kCapacity && c.pinned <= c.ready && c.reserved == reserved.size());
  }
  CHECK(hits > 0 && index.evictions() > 0);
}

}  // namespace
}  // namespace pega

int main(int argc, char** argv) {
  const uint64_t seeds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 200;
  std::map<pega::Status, int> simulated, threaded;
  for (uint64_t seed = 0; seed < seeds; ++seed) pega::simulate(seed, &simulated);
  for (uint64_t seed = 0; seed < seeds / 10; ++seed) pega::call_from_threads(seed, seed % 2 != 0, &threaded);
  for (uint64_t seed = 0; seed < seeds / 20; ++seed) pega::exercise_index(seed);
  for (const auto& [name, counts] : {std::make_pair("simulated", simulated), {"threaded", threaded}}) {
    for (const auto& [status, n] : counts) std::printf("%s %s: %d\n", name, to_string(status), n);
  }
  if (seeds < 20) return 0;
  CHECK(simulated[pega::Status::kDone] > 0 && simulated[pega::Status::kFailed] > 0);
  CHECK(simulated[pega::Status::kCancelled] > 0 && simulated[pega::Status::kTimeout] > 0);
  CHECK(threaded[pega::Status::kDone] > 0 && threaded[pega::Status::kCancelled] > 0);
}
