// SPDX-License-Identifier: Apache-2.0
#include "peer_pool.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace pega {
namespace {

constexpr uint64_t kPartBytes = 1 << 20;
// Below this a second thread takes longer to start than it saves.
constexpr uint64_t kThreadBytes = 8 << 20;

struct Part {
  uint64_t from;
  uint8_t* to;
  uint64_t bytes;
};

bool read_part(int fd, Part part) {
  while (part.bytes != 0) {
    const ssize_t got = pread(fd, part.to, part.bytes, static_cast<off_t>(part.from));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    part.from += got;
    part.to += got;
    part.bytes -= got;
  }
  return true;
}

// Slots that follow each other on both sides are one range, cut into parts.
void add(std::vector<Part>& parts, uint64_t from, uint8_t* to, uint64_t bytes) {
  if (!parts.empty()) {
    Part& last = parts.back();
    if (last.from + last.bytes == from && last.to + last.bytes == to) {
      const uint64_t more = std::min(bytes, kPartBytes - last.bytes);
      last.bytes += more;
      from += more;
      to += more;
      bytes -= more;
    }
  }
  for (; bytes != 0;) {
    const uint64_t n = std::min(bytes, kPartBytes);
    parts.push_back({from, to, n});
    from += n;
    to += n;
    bytes -= n;
  }
}

}  // namespace

PeerPool::PeerPool(int fd, uint64_t offset, uint64_t slot_bytes, uint64_t slots)
    : offset_(offset), slot_bytes_(slot_bytes), slots_(slots) {
  const auto refuse = [](const std::string& why) { throw std::invalid_argument("peer's pool: it " + why); };
  if (slot_bytes == 0 || slots == 0 || slots > UINT32_MAX || slot_bytes > UINT32_MAX)
    refuse("has no such slots");
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) refuse("is no memory file of a fixed size");
  struct stat status;
  if (fstat(fd, &status) != 0) refuse(std::string("cannot be used: ") + std::strerror(errno));
  const uint64_t size = static_cast<uint64_t>(status.st_size);
  if (offset > size || slots * slot_bytes > size - offset)
    refuse("has " + std::to_string(size) + " bytes; its slots would need " +
           std::to_string(slots * slot_bytes) + " from " + std::to_string(offset) + " on");
  fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (fd_ < 0) refuse(std::string("cannot be duplicated: ") + std::strerror(errno));
}

PeerPool::~PeerPool() { ::close(fd_); }

bool PeerPool::read(const uint32_t* theirs, HostPool& to, uint32_t slot_class, const uint32_t* ours, size_t n,
                    unsigned threads) const {
  std::vector<Part> parts;
  for (size_t i = 0; i < n; ++i) {
    if (theirs[i] >= slots_)
      throw std::invalid_argument("peer's pool: slot " + std::to_string(theirs[i]) + "; it has " +
                                  std::to_string(slots_));
    to.check_slot(slot_class, ours[i]);
  }
  if (n != 0 && to.classes()[slot_class].slot_bytes != slot_bytes_)
    throw std::invalid_argument("peer's pool: its slots have " + std::to_string(slot_bytes_) +
                                " bytes, ours " + std::to_string(to.classes()[slot_class].slot_bytes));
  for (size_t i = 0; i < n; ++i)
    add(parts, offset_ + theirs[i] * slot_bytes_, to.slot(slot_class, ours[i]), slot_bytes_);

  std::atomic<size_t> next{0};
  std::atomic<bool> good{true};
  const auto work = [&] {
    for (size_t i; good && (i = next++) < parts.size();)
      if (!read_part(fd_, parts[i])) good = false;
  };
  std::vector<std::thread> helpers;
  const uint64_t useful = std::max<uint64_t>(1, n * slot_bytes_ / kThreadBytes);
  try {
    for (uint64_t i = 1; i < std::min<uint64_t>(threads, useful); ++i) helpers.emplace_back(work);
  } catch (const std::exception&) {  // no more threads, or no memory for them: fewer will do
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  // What is asked about the source's generations afterwards must not be answered from before.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return good;
}

}  // namespace pega
