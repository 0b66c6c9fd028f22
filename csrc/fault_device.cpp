// SPDX-License-Identifier: Apache-2.0
#include "fault_device.h"

#include <stdexcept>
#include <utility>

namespace pega {

FaultDevice::FaultDevice(std::shared_ptr<Device> device, std::vector<ChunkFault> faults)
    : device_(std::move(device)) {
  if (device_ == nullptr) throw std::invalid_argument("no device given");
  arm(std::move(faults));
}

void FaultDevice::arm(std::vector<ChunkFault> faults) {
  std::lock_guard<std::mutex> lock(mutex_);
  armed_.clear();
  for (const ChunkFault& fault : faults) armed_.push_back({fault, 0, fault.seed});
}

uint64_t FaultDevice::fired() {
  std::lock_guard<std::mutex> lock(mutex_);
  return fired_;
}

bool FaultDevice::fires(Armed* armed, Direction direction) {
  if (!armed->fault.directions[static_cast<int>(direction)]) return false;
  ++armed->seen;
  if (armed->fault.nth != 0) return armed->seen == armed->fault.nth;
  uint64_t z = (armed->random += 0x9e3779b97f4a7c15);  // splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return static_cast<double>((z ^ (z >> 31)) >> 11) < armed->fault.probability * 0x1p53;
}

Ticket FaultDevice::submit(const Chunk& chunk) {
  Flight flight{0, Progress::kPending, Clock::now(), false, false};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Armed& armed : armed_) {
      if (!fires(&armed, chunk.direction)) continue;
      ++fired_;
      switch (armed.fault.action) {
        case ChunkFault::Action::kFail: flight.fails = true; break;
        case ChunkFault::Action::kDelay: flight.due += armed.fault.delay; break;
        case ChunkFault::Action::kKillThread: flight.kills = true; break;
      }
    }
  }
  if (flight.fails) {
    flight.progress = Progress::kFailed;
  } else {
    flight.inner = device_->submit(chunk);
  }
  flights_.emplace(next_, flight);
  return next_++;
}

Progress FaultDevice::poll(Ticket ticket) {
  const auto it = flights_.find(ticket);
  if (it == flights_.end()) throw std::logic_error("poll of a ticket that is not in flight");
  Flight& flight = it->second;
  if (std::exchange(flight.kills, false)) throw std::runtime_error("injected fault");
  if (flight.inner != 0) {
    flight.progress = device_->poll(flight.inner);
    if (flight.progress == Progress::kPending) return Progress::kPending;
    flight.inner = 0;
  }
  if (Clock::now() < flight.due) return Progress::kPending;
  const Progress progress = flight.progress;
  if (progress == Progress::kFailed) ours_ = flight.fails;
  flights_.erase(it);
  return progress;
}

}  // namespace pega
