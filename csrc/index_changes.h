// SPDX-License-Identifier: Apache-2.0
// Which keys have become findable in the index and which no longer are, in order, until somebody takes the
// list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pega {

class IndexChanges {
 public:
  enum class Kind : uint8_t { kStored, kRemoved, kCleared };
  struct Run {  // of changes of one kind and group; kCleared has neither group nor keys
    Kind kind;
    uint32_t group;
    std::string keys;
  };

  // Keeps up to `limit` keys; 0: nothing at all, as before the first call.
  void record(size_t limit) {
    limit_ = limit;
    forget();
  }
  bool on() const { return limit_ != 0; }

  void add(Kind kind, uint32_t group, const uint8_t* key, size_t key_bytes) {
    if (!on()) return;
    // Nobody takes them: a reader who knows too little only misses hits, one who knows wrong things goes
    // astray.
    if (keys_ == limit_) clear();
    if (runs_.empty() || runs_.back().kind != kind || runs_.back().group != group)
      runs_.push_back({kind, group, {}});
    runs_.back().keys.append(reinterpret_cast<const char*>(key), key_bytes);
    ++keys_;
  }

  // No key is findable any more, and what was recorded before matters to nobody.
  void clear() {
    if (!on()) return;
    forget();
    runs_.push_back({Kind::kCleared, 0, {}});
  }

  std::vector<Run> take() {
    keys_ = 0;
    return std::exchange(runs_, {});
  }

 private:
  void forget() {
    keys_ = 0;
    runs_.clear();
  }

  size_t limit_ = 0, keys_ = 0;
  std::vector<Run> runs_;
};

}  // namespace pega
