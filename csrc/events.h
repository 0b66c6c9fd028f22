// SPDX-License-Identifier: Apache-2.0
// Compute events, shared by the jobs that wait for them. Lives on the engine thread.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "device.h"

namespace pega {

class Events {
 public:
  explicit Events(Device& device) : device_(device) {}

  void add_share(EventId event) {
    if (event != 0) ++shares_[event].jobs;
  }

  // A job waits no longer.
  void drop_share(EventId event) {
    const auto it = shares_.find(event);
    if (event == 0 || --it->second.jobs != 0 || it->second.caller_holds) return;
    shares_.erase(it);
    device_.release_event(event);
  }

  // The caller will give it to no further job.
  void release(EventId event) {
    const auto it = shares_.find(event);
    if (it != shares_.end()) {
      it->second.caller_holds = false;
      if (it->second.jobs != 0) return;
      shares_.erase(it);
    }
    device_.release_event(event);
  }

  // Asks the device at most once per `step` and never again once the answer was final.
  Progress query(EventId event, uint64_t step) {
    if (event == 0) return Progress::kDone;
    Share& share = shares_.at(event);
    if (share.progress == Progress::kPending && share.asked != step) {
      share.asked = step;
      share.progress = device_.query_event(event);
    }
    return share.progress;
  }

 private:
  struct Share {
    uint32_t jobs = 0;
    bool caller_holds = true;
    Progress progress = Progress::kPending;
    uint64_t asked = 0;
  };

  Device& device_;
  std::unordered_map<EventId, Share> shares_;
};

}  // namespace pega
