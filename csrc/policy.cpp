// SPDX-License-Identifier: Apache-2.0
#include "policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "estimate.h"

namespace pega {
namespace {

// Among the settings that qualify, the one that disturbs decode least wins, then the faster one.
struct Rule {
  double slowdown;   // how many times as long as the fastest setting a transfer may take
  bool awaited;      // whether completion must be awaited chunk by chunk
  bool heed_decode;  // whether it matters what decode feels
  // Of equally good settings that with the largest chunks, or that with the fewest CTAs. At full speed both
  // ways on the H200, stages of 4 MiB doubled the p99 of vLLM's steps on the wall where 8 MiB added 17 %:
  // half as many driver calls hold its lock. What is equal one way is not both ways: 16 MiB reach 3 % more
  // than 8.
  bool large_chunks = false;
};

// 3 %: what one measurement differs from the next.
constexpr Rule kFastest{1.03, false, true, true};
// A load half as slow again is not felt by its request; the decode steps beside it feel what this buys.
constexpr Rule kBalanced{1.5, false, true};
// Nobody waits for a save, and decode feels how fast it is: on the H200 the gentlest setting takes twice as
// long.
constexpr Rule kBalancedSave{2.5, false, true};
// Beyond three times as long, the tail only moves into the mean: on the RTX 5090 chunks of 1,024 ranges
// instead of 2,048 took decode p99 from +20 % to +14 %, but the mean from +4.5 % to +9 %.
constexpr Rule kTail{3.0, true, true};
constexpr Rule kStrict{std::numeric_limits<double>::infinity(), false, true};
// No decode step notices what is shorter than 2 % of it (a step of 5 ms).
constexpr Rule kShort{1.03, false, false};
constexpr double kShortUs = 100;

Rule rule_of(Objective objective, Direction direction) {
  switch (objective) {
    case Objective::kThroughput: return kFastest;
    case Objective::kBalanced: return direction == Direction::kSave ? kBalancedSave : kBalanced;
    case Objective::kTail: return kTail;
    case Objective::kStrict: break;
  }
  return kStrict;
}

constexpr double kGrowthNoise = 0.02;  // p99 of equal decode runs differs by this much at the least (H200)
constexpr double kTimeNoise = 0.05;    // so do single runs of the same transfer
constexpr double kLatencyNoiseUs = 2;  // and this much is what polling for completion adds or not

// Spread over a time, every setting takes that time, if it needs no more than this part of it: others may
// share the lane. Then the fewest CTAs and the smallest chunks are best. On the H200, 4 KiB both ways at 25
// GiB/s: a step's p99 on the wall grew by 16 % with chunks of 16 MiB, 8 % with 4 MiB, and within the noise
// with 2 MiB, for its own small copies wait for the chunk that is on the wire.
constexpr double kSpreadShare = 0.5;

// Used where a profile's defaults are silent too. One launch of `kernel` takes all there is.
PolicySpec fallback(Backend backend) {
  if (backend == Backend::kKernel) return {backend, 16, 1u << 20, 1ull << 30, 1};
  return {backend, 8, 1024, 4ull << 20, 2};
}

size_t at(Backend backend) { return static_cast<size_t>(backend); }

template <typename Keep>
void keep_if(std::vector<Candidate>& all, Keep keep) {
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return !keep(c); }), all.end());
}

double least(const std::vector<Candidate>& all, double Candidate::* field) {
  double value = std::numeric_limits<double>::infinity();
  for (const Candidate& c : all) value = std::min(value, c.*field);
  return value;
}

// `all` is not empty. `spread_us`: over how long the transfer is spread, if it is faster than that.
Candidate choose(std::vector<Candidate> all, const Rule& rule, double spread_us = 0) {
  auto awaited = [](const Candidate& c) { return c.setting.backend != Backend::kKernel; };
  if (rule.awaited && std::any_of(all.begin(), all.end(), awaited)) keep_if(all, awaited);
  double us = least(all, &Candidate::us) * rule.slowdown + kLatencyNoiseUs;
  keep_if(all, [=](const Candidate& c) { return c.us <= us; });
  double growth = least(all, &Candidate::growth) + kGrowthNoise;
  if (rule.heed_decode) keep_if(all, [=](const Candidate& c) { return c.growth <= growth; });
  us = least(all, &Candidate::us) * (1 + kTimeNoise) + kLatencyNoiseUs;
  const auto first = std::find_if(all.begin(), all.end(), [=](const Candidate& c) { return c.us <= us; });
  const Backend backend = first->setting.backend;  // candidates come in order of preference
  us = std::max(us, spread_us * kSpreadShare);
  keep_if(all, [=](const Candidate& c) { return c.us <= us && c.setting.backend == backend; });
  return *std::min_element(all.begin(), all.end(), [&](const Candidate& a, const Candidate& b) {
    if (rule.large_chunks && a.setting.chunk_bytes != b.setting.chunk_bytes) {
      return a.setting.chunk_bytes > b.setting.chunk_bytes;
    }
    if (a.setting.max_grid_blocks != b.setting.max_grid_blocks) {
      return a.setting.max_grid_blocks < b.setting.max_grid_blocks;
    }
    return a.setting.chunk_bytes < b.setting.chunk_bytes;
  });
}

// --- words for people ---

std::string print(const char* format, double value, const char* unit) {
  char text[48];
  std::snprintf(text, sizeof text, format, value, unit);
  return text;
}

std::string size_text(uint64_t bytes) {
  static const char* const kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return print(value == std::floor(value) || value >= 10 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
}

std::string time_text(double us) {
  const char* unit = us < 1e3 ? "us" : us < 1e6 ? "ms" : "s";
  double value = us < 1e3 ? us : us < 1e6 ? us / 1e3 : us / 1e6;
  return print(value < 9.95 ? "%.1f %s" : "%.0f %s", value, unit);
}

std::string growth_text(double growth) { return print("decode p99 %+.0f %s", growth * 100 + 0.0, "%"); }

std::string head(const TransferShape& shape) {
  bool equal = shape.min_range_bytes == 0 || shape.min_range_bytes == shape.avg_range_bytes;
  std::string text = std::to_string(shape.ranges) + (shape.ranges == 1 ? " range of " : " ranges of ");
  return text + (equal ? "" : "about ") + size_text(shape.avg_range_bytes) + ": ";
}

// What speaks against the obvious alternative: memcpy or, where that was chosen, the fastest of the others.
std::string comparison(std::vector<Candidate> all, const Candidate& chosen, double memcpy_submit_us) {
  bool is_memcpy = chosen.setting.backend == Backend::kMemcpy;
  keep_if(all, [=](const Candidate& c) { return (c.setting.backend == Backend::kMemcpy) != is_memcpy; });
  if (all.empty()) return "";
  Candidate other = choose(all, kFastest);
  std::string text = std::string("; ") + to_string(other.setting.backend) + " would ";
  if (!is_memcpy && memcpy_submit_us > 2 * chosen.us) {
    return text + "need " + time_text(memcpy_submit_us) + " of submission";
  }
  if (other.growth > chosen.growth + kGrowthNoise) return text + "cost " + growth_text(other.growth);
  if (other.us > chosen.us) return text + "take " + time_text(other.us);
  return "";
}

}  // namespace

TransferDecision decide(const TransferShape& given, const DeviceProfile& profile, Objective objective,
                        const PolicySpec& policy) {
  TransferShape shape = given;
  if (shape.total_bytes > 0) shape.ranges = std::max<uint64_t>(1, shape.ranges);
  if (shape.ranges > 0 && !shape.avg_range_bytes) {
    shape.avg_range_bytes = std::max<uint64_t>(1, shape.total_bytes / shape.ranges);
  }
  bool fixed = policy.backend != Backend::kAuto;
  // Who names a backend gets just that, unless a time is named too.
  const double over = profile.spread_us[static_cast<size_t>(objective)];
  int64_t spread = policy.spread_us >= 0 ? policy.spread_us : fixed || !(over > 0) ? 0 : std::lround(over);
  std::vector<Candidate> all;
  if (shape.total_bytes > 0) all = candidates(shape, profile, policy);
  // Growth was measured beside transfers at full speed. Spread, one is under way for this part of the time.
  for (Candidate& c : all) {
    if (static_cast<double>(spread) > c.us) c.growth *= c.us / static_cast<double>(spread);
  }

  Candidate chosen;
  std::string reason;
  if (all.empty()) {
    Backend backend = fixed ? policy.backend : Backend::kMemcpy;
    chosen.setting = policy;
    chosen.setting.backend = backend;
    if (shape.total_bytes == 0) {
      reason = "nothing to move";
    } else {
      reason = head(shape) + to_string(backend) + (fixed ? " as configured; " : "; ") + profile.name +
               (fixed ? " has no measurement of it" : " has no measurements");
    }
  } else {
    bool is_short = least(all, &Candidate::us) <= kShortUs;
    chosen = choose(all, is_short ? kShort : rule_of(objective, shape.direction),
                    is_short ? 0 : static_cast<double>(spread));
    if (static_cast<double>(spread) <= chosen.us || (is_short && policy.spread_us < 0)) spread = 0;
    reason = head(shape) + to_string(chosen.setting.backend) + (fixed ? " as configured, " : ", ") +
             time_text(chosen.us) +
             (spread > 0 ? " spread over " + time_text(static_cast<double>(spread)) : "");
    if (is_short && !fixed) {
      reason += ": too short for a decode step to notice";
    } else {
      reason += ", " + growth_text(chosen.growth);
      if (!fixed) reason += comparison(all, chosen, submit_us(shape, profile, Backend::kMemcpy));
    }
  }

  Backend backend = chosen.setting.backend;
  PolicySpec full = fill(fill(chosen.setting, profile.defaults[at(backend)]), fallback(backend));
  TransferDecision decision;
  decision.backend = backend;
  decision.max_grid_blocks = full.max_grid_blocks;
  decision.chunk_descriptors = full.chunk_descriptors;
  decision.chunk_bytes = full.chunk_bytes;
  decision.inflight_chunks = full.inflight_chunks;
  decision.spread_us = static_cast<uint32_t>(spread);
  decision.reason = reason;
  return decision;
}

}  // namespace pega
