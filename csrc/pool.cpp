// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pega {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kUnlimited = std::numeric_limits<int64_t>::max() & ~(kPage - 1);  // cgroup v1's "no limit"

uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

std::string gib(uint64_t bytes) {
  std::ostringstream out;
  out.precision(3);
  out << static_cast<double>(bytes) / (1u << 30) << " GiB";
  return out.str();
}

// The first number in a file, or `otherwise` ("max", no such file).
uint64_t number_in(const std::string& path, uint64_t otherwise) {
  std::ifstream file(path);
  uint64_t value;
  return file >> value ? value : otherwise;
}

// The value after `key` in a file of "key value" lines, 0 if absent.
uint64_t field_in(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream in(line);
    std::string name;
    uint64_t value;
    if (in >> name >> value && name == key) return value;
  }
  return 0;
}

// What the memory cgroups of this process, from its own up to the root, still allow.
uint64_t cgroup_headroom() {
  uint64_t least = std::numeric_limits<uint64_t>::max();
  std::ifstream self("/proc/self/cgroup");
  std::string line;
  while (std::getline(self, line)) {  // "4:memory:/path" (v1) or "0::/path" (v2)
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string root = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
    for (std::string path = line.substr(second + 1);; path.resize(path.rfind('/'))) {
      const std::string dir = root + (path == "/" ? "" : path);
      const uint64_t limit = number_in(dir + (v2 ? "/memory.max" : "/memory.limit_in_bytes"), kUnlimited);
      if (limit < kUnlimited) {
        const uint64_t used = number_in(dir + (v2 ? "/memory.current" : "/memory.usage_in_bytes"), 0);
        const uint64_t cache = field_in(dir + "/memory.stat", v2 ? "inactive_file" : "total_inactive_file");
        const uint64_t firm = used - std::min(cache, used);
        least = std::min(least, limit - std::min(firm, limit));
      }
      if (path.find('/') == std::string::npos) break;  // the root was the last one
    }
  }
  return least;
}

}  // namespace

std::pair<uint64_t, const char*> available_memory() {
  const uint64_t machine = field_in("/proc/meminfo", "MemAvailable:") * 1024;
  const uint64_t cgroup = cgroup_headroom();
  return cgroup < machine ? std::make_pair(cgroup, "the memory cgroup's limit")
                          : std::make_pair(machine, "the machine's available memory");
}

void HostPool::Mapping::create(const char* name, uint64_t size) {
  const auto fail = [&](const char* call) {
    throw NotEnoughMemory(std::string("host pool: ") + call + " of " + gib(size) +
                          " failed: " + std::strerror(errno) + "; lower host_pool_gib");
  };
  fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) fail("memfd_create");
  if (ftruncate(fd, static_cast<off_t>(size)) != 0) fail("ftruncate");
  // A peer that shrank the file would turn our next copy into SIGBUS.
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("sealing");
  if (!map(size)) fail("mmap");
}

void HostPool::Mapping::attach(const char* name, int other, uint64_t size) {
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(std::string("host pool: descriptor ") + std::to_string(other) + " (" + name +
                                ") " + why);
  };
  struct stat status;
  if (fstat(other, &status) != 0) refuse(std::string("cannot be used: ") + std::strerror(errno));
  if (static_cast<uint64_t>(status.st_size) != size)
    refuse("has " + std::to_string(status.st_size) + " bytes; these slot classes take " +
           std::to_string(size));
  fd = fcntl(other, F_DUPFD_CLOEXEC, 3);
  if (fd < 0) refuse(std::string("cannot be duplicated: ") + std::strerror(errno));
  if (!map(size)) refuse(std::string("cannot be mapped: ") + std::strerror(errno));
}

bool HostPool::Mapping::map(uint64_t size) {
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) return false;
  memory = mapped;
  bytes = size;
  return true;
}

HostPool::Mapping::~Mapping() {
  if (memory != nullptr) munmap(memory, bytes);
  if (fd >= 0) ::close(fd);
}

uint64_t HostPool::lay_out() {
  if (classes_.empty()) throw std::invalid_argument("a pool needs at least one slot class; none was given");
  uint64_t bytes = 0, slots = 0;
  for (size_t c = 0; c < classes_.size(); ++c) {
    const SlotClass& k = classes_[c];
    const uint64_t limit = uint64_t{1} << 46;  // 64 TiB: larger than any host, small enough never to overflow
    if (k.slot_bytes == 0 || k.slot_bytes > UINT32_MAX || k.slots == 0 || k.slots >= UINT32_MAX ||
        k.slots > limit / k.slot_bytes || bytes > limit)
      throw std::invalid_argument(
          "slot class " + std::to_string(c) + ": " + std::to_string(k.slots) + " slots of " +
          std::to_string(k.slot_bytes) +
          " bytes; allowed: 1 to 2^32 - 2 slots of 1 to 2^32 - 1 bytes, 64 TiB in all. "
          "Is host_pool_gib large enough for one block?");
    data_offset_.push_back(bytes);
    table_offset_.push_back(slots);
    bytes = round_up(bytes + k.slot_bytes * k.slots, kPage);
    slots += k.slots;
  }
  data_bytes_ = bytes;
  return slots;
}

HostPool::HostPool(int data_fd, int table_fd, std::vector<SlotClass> classes) : classes_(std::move(classes)) {
  const uint64_t slots = lay_out();
  data_.attach("data", data_fd, data_bytes_);
  table_.attach("table", table_fd, round_up(slots * sizeof(SlotEntry), kPage));
}

HostPool::HostPool(std::vector<SlotClass> classes, bool prefault) : classes_(std::move(classes)) {
  const uint64_t slots = lay_out(), bytes = data_bytes_;
  const auto [available, limiter] = available_memory();
  const uint64_t table_bytes = round_up(slots * sizeof(SlotEntry), kPage);
  if (bytes + table_bytes > available)
    throw NotEnoughMemory("host pool: " + gib(bytes + table_bytes) + " asked for, but " + limiter +
                          " leaves " + gib(available) +
                          "; lower host_pool_gib (it counts per worker rank) or raise the limit");
  data_.create("pega-pool", bytes);
  table_.create("pega-slots", table_bytes);  // a fresh memfd reads as zeros: generation 0, no key
  if (prefault) {
#ifdef MADV_POPULATE_WRITE
    if (madvise(data_.memory, bytes, MADV_POPULATE_WRITE) == 0) return;
#endif
    for (uint64_t at = 0; at < bytes; at += kPage) static_cast<volatile uint8_t*>(data_.memory)[at] = 0;
  }
}

HostPool::~HostPool() = default;

void HostPool::check_slot(uint64_t slot_class, uint64_t slot) const {
  if (slot_class >= classes_.size())
    throw std::invalid_argument("slot class " + std::to_string(slot_class) + "; this pool has " +
                                std::to_string(classes_.size()));
  if (slot >= classes_[slot_class].slots)
    throw std::invalid_argument("slot " + std::to_string(slot) + " of class " + std::to_string(slot_class) +
                                "; it has " + std::to_string(classes_[slot_class].slots) + " slots");
}

void begin_write(SlotEntry& entry) {
  // Visible before any byte that follows: those are written by somebody to whom the work is handed over only
  // now (a worker under a mutex, a driver). Odd already: a writer was given up before it ended; so it stays.
  entry.generation.fetch_or(1, std::memory_order_acq_rel);
}

void end_write(SlotEntry& entry, const uint8_t* key, uint32_t key_bytes, uint32_t length) {
  std::memset(entry.key, 0, sizeof entry.key);
  if (key_bytes != 0) std::memcpy(entry.key, key, key_bytes);
  entry.key_bytes = key_bytes;
  entry.length = length;
  entry.generation.store((entry.generation.load(std::memory_order_relaxed) | 1) + 1,
                         std::memory_order_release);
}

void forget(SlotEntry& entry) {
  begin_write(entry);
  end_write(entry, nullptr, 0, 0);
}

uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

bool holds(const SlotEntry& entry, const uint8_t* key, uint32_t key_bytes, uint64_t* generation) {
  *generation = entry.generation.load(std::memory_order_acquire);
  return (*generation & 1) == 0 && entry.key_bytes == key_bytes &&
         std::memcmp(entry.key, key, key_bytes) == 0;
}

}  // namespace pega
