// SPDX-License-Identifier: Apache-2.0
#include "estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pega {
namespace {

// Kernels move 16 bytes per lane and load; narrower accesses keep fewer bytes in flight, in proportion.
// Gathering for `staged` reads GPU memory, which is several times faster than the wire, and so has that much
// to lose first.
constexpr double kFullAlignment = 16;
constexpr double kGatherHeadroom = 4;

// In order of preference between equals: the copy engine costs no SM, a ring of stages next to none.
constexpr Backend kPreference[] = {Backend::kMemcpy, Backend::kStaged, Backend::kChunked, Backend::kKernel};

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

class Estimator {
 public:
  Estimator(const TransferShape& shape, const DeviceProfile& profile)
      : shape_(shape), side_(profile.direction[static_cast<size_t>(shape.direction)]) {}

  double submit_us(Backend backend) const {
    double each = side_.submit_us_per_range[static_cast<size_t>(backend)];
    return std::isfinite(each) && each > 0 ? each * static_cast<double>(shape_.ranges) : 0;
  }

  // False if nothing of this backend was measured. `given`: a person set part of the setting, so that the
  // nearest measurement is the best there is to say.
  bool estimate(const PolicySpec& setting, bool given, Candidate* c) const {
    double gib_per_s = throughput(setting);
    if (!(gib_per_s > 0)) return false;
    double latency = side_.latency_us[static_cast<size_t>(setting.backend)];
    if (!std::isfinite(latency) || latency < 0) latency = 0;
    double moving = static_cast<double>(shape_.total_bytes) / (gib_per_s * (1 << 30)) * 1e6;
    c->setting = setting;
    c->us = latency + std::max(submit_us(setting.backend), moving);  // submitting and copying overlap
    c->growth = growth(setting, given);
    return true;
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

}  // namespace

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
        PolicySpec merged = fill(policy, setting_of(p));
        merged.backend = backend;
        bool seen = std::any_of(all.begin(), all.end(), [&](const Candidate& c) {
          return c.setting.backend == backend && same(c.setting, merged);
        });
        Candidate c;
        if (!seen && estimator.estimate(merged, given, &c)) all.push_back(c);
      }
    };
    add(side.interference);
    add(side.curve);
  }
  return all;
}

double submit_us(const TransferShape& shape, const DeviceProfile& profile, Backend backend) {
  return Estimator(shape, profile).submit_us(backend);
}

PolicySpec fill(PolicySpec first, const PolicySpec& second) {
  if (!first.max_grid_blocks) first.max_grid_blocks = second.max_grid_blocks;
  if (!first.chunk_descriptors) first.chunk_descriptors = second.chunk_descriptors;
  if (!first.chunk_bytes) first.chunk_bytes = second.chunk_bytes;
  if (!first.inflight_chunks) first.inflight_chunks = second.inflight_chunks;
  return first;
}

}  // namespace pega
