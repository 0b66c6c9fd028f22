// SPDX-License-Identifier: Apache-2.0
#include "policy.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace pega {
namespace {

// How much longer than the fastest setting a transfer may take, and whether every chunk's completion must be
// awaited. Among the settings that qualify, the one that disturbs decode least wins, then the faster one.
struct Rule {
  double slowdown;
  bool awaited;
  bool heed_decode;
};

// 3 %: what one measurement differs from the next.
constexpr Rule kFastest{1.03, false, true};
// A load half as slow again is not felt by its request; the decode steps beside it feel what this buys.
constexpr Rule kBalanced{1.5, false, true};
// Beyond three times as long, the tail only moves into the mean: on the RTX 5090 chunks of 1,024 ranges
// instead of 2,048 took decode p99 from +20 % to +14 %, but the mean from +4.5 % to +9 %.
constexpr Rule kTail{3.0, true, true};
constexpr Rule kStrict{std::numeric_limits<double>::infinity(), false, true};
// No decode step notices what is shorter than 2 % of it (a step of 5 ms).
constexpr Rule kShort{1.03, false, false};
constexpr double kShortUs = 100;

Rule rule_of(Objective objective) {
  switch (objective) {
    case Objective::kThroughput: return kFastest;
    case Objective::kBalanced: return kBalanced;
    case Objective::kTail: return kTail;
    case Objective::kStrict: break;
  }
  return kStrict;
}

constexpr double kGrowthNoise = 0.02;  // p99 of equal decode runs differs by this much at the least (H200)
constexpr double kTimeNoise = 0.05;    // so do single runs of the same transfer
constexpr double kLatencyNoiseUs = 2;  // and this much is what polling for completion adds or not
// Kernels move 16 bytes per lane and load; narrower accesses keep fewer bytes in flight, in proportion.
// Gathering for `staged` reads GPU memory, which is several times faster than the wire, and so has that much
// to lose first.
constexpr double kFullAlignment = 16;
constexpr double kGatherHeadroom = 4;

// In order of preference between equals: the copy engine costs no SM, a ring of stages next to none.
constexpr Backend kPreference[] = {Backend::kMemcpy, Backend::kStaged, Backend::kChunked, Backend::kKernel};

// Used where a profile's defaults are silent too. One launch of `kernel` takes all there is.
PolicySpec fallback(Backend backend) {
  if (backend == Backend::kKernel) return {backend, 16, 1u << 20, 1ull << 30, 1};
  return {backend, 8, 1024, 4ull << 20, 2};
}

size_t at(Backend backend) { return static_cast<size_t>(backend); }

// `first`, with what it leaves unset taken from `second`.
PolicySpec fill(PolicySpec first, const PolicySpec& second) {
  if (!first.max_grid_blocks) first.max_grid_blocks = second.max_grid_blocks;
  if (!first.chunk_descriptors) first.chunk_descriptors = second.chunk_descriptors;
  if (!first.chunk_bytes) first.chunk_bytes = second.chunk_bytes;
  if (!first.inflight_chunks) first.inflight_chunks = second.inflight_chunks;
  return first;
}

bool same(const PolicySpec& a, const PolicySpec& b) {
  return a.max_grid_blocks == b.max_grid_blocks && a.chunk_descriptors == b.chunk_descriptors &&
         a.chunk_bytes == b.chunk_bytes;
}

// How far apart two settings are, in doublings of grid, chunk and bytes; what one leaves open does not count.
double distance(const PolicySpec& a, const PolicySpec& b) {
  auto octaves = [](double x, double y) { return x > 0 && y > 0 ? std::fabs(std::log2(x / y)) : 0; };
  return octaves(a.max_grid_blocks, b.max_grid_blocks) + octaves(a.chunk_descriptors, b.chunk_descriptors) +
         octaves(static_cast<double>(a.chunk_bytes), static_cast<double>(b.chunk_bytes));
}

template <typename Point>
PolicySpec setting_of(const Point& p) {
  return {p.backend, p.grid, p.chunk_descriptors, p.chunk_bytes, 0};
}

bool usable(const CurvePoint& p) {
  return std::isfinite(p.gib_per_s) && p.gib_per_s > 0 && p.range_bytes > 0;
}
bool usable(const InterferencePoint& p) { return std::isfinite(p.p99_growth); }

// The measured neighbours of `range_bytes`, at `setting` or else at the measured setting nearest to it.
template <typename Point>
struct Neighbours {
  const Point* below = nullptr;  // largest size <= range_bytes
  const Point* above = nullptr;  // smallest size >= range_bytes
  bool exact = false;            // this very setting was measured

  Neighbours(const std::vector<Point>& points, const PolicySpec& setting, uint64_t range_bytes) {
    auto ours = [&](const Point& p) { return p.backend == setting.backend && usable(p); };
    auto look = [&](const PolicySpec& wanted) {
      for (const Point& p : points) {
        if (!ours(p) || !same(setting_of(p), wanted)) continue;
        if (p.range_bytes <= range_bytes && (!below || p.range_bytes > below->range_bytes)) below = &p;
        if (p.range_bytes >= range_bytes && (!above || p.range_bytes < above->range_bytes)) above = &p;
      }
    };
    look(setting);
    exact = below || above;
    if (exact) return;
    PolicySpec nearest;
    double least = std::numeric_limits<double>::infinity();
    for (const Point& p : points) {
      if (!ours(p)) continue;
      PolicySpec own = setting_of(p);
      double d = distance(setting, own);
      if (d < least) least = d, nearest = own;  // of equally near ones, the first
    }
    look(nearest);
  }

  // Where `range_bytes` lies between the two sizes, 0..1 on a logarithmic scale.
  double weight(uint64_t range_bytes) const {
    if (below->range_bytes == above->range_bytes) return 0;
    double low = std::log2(std::max<double>(1, static_cast<double>(below->range_bytes)));
    double high = std::log2(static_cast<double>(above->range_bytes));
    double here = std::log2(static_cast<double>(range_bytes));
    return high > low ? std::clamp((here - low) / (high - low), 0.0, 1.0) : 0;
  }
};

struct Candidate {
  PolicySpec setting;
  double us = 0;
  double growth = 0;
  bool measured = false;
};

class Estimator {
 public:
  Estimator(const TransferShape& shape, const DeviceProfile& profile)
      : shape_(shape), side_(profile.direction[static_cast<size_t>(shape.direction)]) {}

  double submit_us(Backend backend) const {
    double each = side_.submit_us_per_range[at(backend)];
    return std::isfinite(each) && each > 0 ? each * static_cast<double>(shape_.ranges) : 0;
  }

  // `given`: a person set part of the setting, so that the nearest measurement is the best there is to say.
  Candidate estimate(const PolicySpec& setting, bool given) const {
    Candidate c;
    c.setting = setting;
    double gib_per_s = throughput(setting);
    c.measured = gib_per_s > 0;
    double latency = side_.latency_us[at(setting.backend)];
    if (!std::isfinite(latency) || latency < 0) latency = 0;
    // Submitting and copying overlap.
    double moving = c.measured ? static_cast<double>(shape_.total_bytes) / (gib_per_s * (1 << 30)) * 1e6 : 0;
    c.us = latency + std::max(submit_us(setting.backend), moving);
    c.growth = growth(setting, given);
    return c;
  }

 private:
  // GiB/s; 0 if this backend was never measured in this direction.
  double throughput(const PolicySpec& setting) const {
    Neighbours<CurvePoint> near(side_.curve, setting, shape_.avg_range_bytes);
    double gib_per_s = 0;
    if (near.below && near.above) {
      double w = near.weight(shape_.avg_range_bytes);
      gib_per_s = std::pow(near.below->gib_per_s, 1 - w) * std::pow(near.above->gib_per_s, w);
    } else if (near.below) {
      gib_per_s = near.below->gib_per_s;
    } else if (near.above) {  // below the smallest measured size a range costs what the smallest costs
      gib_per_s = near.above->gib_per_s * static_cast<double>(shape_.avg_range_bytes) /
                  static_cast<double>(near.above->range_bytes);
    }
    double width = std::clamp<double>(shape_.alignment, 1, kFullAlignment) / kFullAlignment;
    if (setting.backend == Backend::kMemcpy) width = 1;
    if (setting.backend == Backend::kStaged) width = std::min(1.0, width * kGatherHeadroom);
    return gib_per_s * width;
  }

  // Growth of decode p99. A setting that was never measured beside decode counts as the worst that was.
  double growth(const PolicySpec& setting, bool given) const {
    Neighbours<InterferencePoint> near(side_.interference, setting, shape_.avg_range_bytes);
    if (!near.exact && !given) {
      bool known = near.below || near.above;  // some setting of this backend was
      double worst = 0;
      for (const InterferencePoint& p : side_.interference) {
        if (usable(p) && (!known || p.backend == setting.backend)) worst = std::max(worst, p.p99_growth);
      }
      return worst;
    }
    if (near.below && near.above) {
      double w = near.weight(shape_.avg_range_bytes);
      return near.below->p99_growth * (1 - w) + near.above->p99_growth * w;
    }
    const InterferencePoint* only = near.below ? near.below : near.above;
    return only ? only->p99_growth : 0;
  }

  const TransferShape& shape_;
  const DirectionProfile& side_;
};

// Every measured setting of the backends that `policy` allows, its explicit fields put in.
std::vector<Candidate> candidates(const TransferShape& shape, const DeviceProfile& profile,
                                  const PolicySpec& policy) {
  const DirectionProfile& side = profile.direction[static_cast<size_t>(shape.direction)];
  bool given = policy.max_grid_blocks || policy.chunk_descriptors || policy.chunk_bytes;
  Estimator estimator(shape, profile);
  std::vector<Candidate> all;
  for (Backend backend : kPreference) {
    if (policy.backend != Backend::kAuto && policy.backend != backend) continue;
    auto add = [&](const auto& points) {
      for (const auto& p : points) {
        if (p.backend != backend || !usable(p)) continue;
        PolicySpec setting = setting_of(p);
        PolicySpec merged = fill(policy, setting);
        merged.backend = backend;
        bool seen = std::any_of(all.begin(), all.end(), [&](const Candidate& c) {
          return c.setting.backend == backend && same(c.setting, merged);
        });
        if (seen) continue;
        Candidate c = estimator.estimate(merged, given);
        if (c.measured) all.push_back(c);
      }
    };
    add(side.interference);
    add(side.curve);
  }
  return all;
}

template <typename Keep>
void keep_if(std::vector<Candidate>& all, Keep keep) {
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& c) { return !keep(c); }), all.end());
}

double least(const std::vector<Candidate>& all, double Candidate::* field) {
  double value = std::numeric_limits<double>::infinity();
  for (const Candidate& c : all) value = std::min(value, c.*field);
  return value;
}

// `all` is not empty.
Candidate choose(std::vector<Candidate> all, const Rule& rule) {
  auto awaited = [](const Candidate& c) { return c.setting.backend != Backend::kKernel; };
  if (rule.awaited && std::any_of(all.begin(), all.end(), awaited)) keep_if(all, awaited);
  double us = least(all, &Candidate::us) * rule.slowdown + kLatencyNoiseUs;
  keep_if(all, [=](const Candidate& c) { return c.us <= us; });
  double growth = least(all, &Candidate::growth) + kGrowthNoise;
  if (rule.heed_decode) keep_if(all, [=](const Candidate& c) { return c.growth <= growth; });
  us = least(all, &Candidate::us) * (1 + kTimeNoise) + kLatencyNoiseUs;
  keep_if(all, [=](const Candidate& c) { return c.us <= us; });
  Backend backend = all.front().setting.backend;  // candidates come in order of preference
  keep_if(all, [=](const Candidate& c) { return c.setting.backend == backend; });
  return *std::min_element(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) {
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
  std::vector<Candidate> all;
  if (shape.total_bytes > 0) all = candidates(shape, profile, policy);

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
    chosen = choose(all, is_short ? kShort : rule_of(objective));
    reason = head(shape) + to_string(chosen.setting.backend) + (fixed ? " as configured, " : ", ") +
             time_text(chosen.us);
    if (is_short && !fixed) {
      reason += ": too short for a decode step to notice";
    } else {
      reason += ", " + growth_text(chosen.growth);
      if (!fixed) reason += comparison(all, chosen, Estimator(shape, profile).submit_us(Backend::kMemcpy));
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
  decision.reason = reason;
  return decision;
}

}  // namespace pega
