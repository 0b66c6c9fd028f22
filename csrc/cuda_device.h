// SPDX-License-Identifier: Apache-2.0
// The transfer engine's device on an NVIDIA GPU. Four ways to move a chunk:
//   memcpy          one copy-engine command per range, submitted in small slices
//   kernel/chunked  one launch of a copy kernel (csrc/copy_kernels.cu) that reads or writes the host pool
//   staged          a kernel gathers into (or scatters from) a small buffer on the GPU; the copy engine moves
//                   that as one run per run of host memory
//
// A lane's copies follow one another, and so do its launches, so that chunks of a pipeline end one after the
// other (with a stream for each, two copies share the wire, end together, and then it idles). A copy engine
// stays with a stream that has its next copy ready, and other streams' copies wait all the while, such as
// those of a decode step. So copies go through two streams in turn, each chunk's waiting for an event that
// follows the one before: there the engine looks around (full speed both ways, H200: ITL p99 from +145 to
// +20 % for 0.3 % of the rate; docs/benchmarks.md).
// As each slice ends, a stream writes a word of host memory: the engine thread polls that, and leaves the
// driver's lock to those who launch the model. That write comes with a fence which would hold up the next
// copy (by 2 us, 3 % of the wire both ways), so copies have it done by a third stream.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"
#include "cuda_host_memory.h"
#include "cuda_pieces.h"
#include "device.h"

namespace pega {

struct CudaOptions {
  // GPU memory of one staged chunk; times 2 directions times inflight_chunks. Between two chunks the copy
  // engine idles for some 5 us, so that 16 MiB reach 2 to 4 % more of the wire than 8 (H200).
  uint64_t stage_bytes = 16 << 20;
  uint32_t inflight_chunks = 4;  // per direction
  // Copy-engine commands given to the driver without a pause, and the pause, in which others get at its lock.
  // On an H200 32 reach what more do for ranges of 64 KiB (8: 0.6 to 0.8 of the wire, 32 and 128: 0.9), and
  // neither shows in the process' own launches (benchmarks/launch_delay.py); a queue that is full would.
  uint32_t copies_per_slice = 32;
  uint32_t slice_pause_us = 20;
  bool batch_copies = true;  // a slice is one cuMemcpyBatchAsync where there is one
  // How long a chunk may be in flight, without word from the GPU, until the driver is asked: errors are rare,
  // and asking takes the driver's lock.
  uint32_t ask_driver_us = 1000;
};

// What the device saw, for tests and tools. Per direction unless said.
struct CudaStats {
  uint64_t launches = 0;
  uint32_t max_grid = 0;
  uint64_t copies = 0;
  uint32_t max_copies_per_slice = 0;
  uint64_t outstanding_bytes = 0;
  uint64_t peak_outstanding_bytes = 0;
  uint64_t submit_ns = 0;  // time spent in submit() and in later slices of copies
  uint64_t unstaged_chunks =
      0;  // staged chunks that went by kernel instead: too big or too scattered to stage
  std::array<uint64_t, kBackends> chunks{};
};

// One file opens and closes the device and knows its events, cuda_device.cpp; the other, cuda_chunks.cpp,
// moves chunks.
class CudaDevice : public Device {
 public:
  static constexpr uint32_t kMaxDescriptors = 64 << 10;
  static constexpr uint64_t kMaxChunkBytes = 256 << 20;
  static constexpr uint32_t kMaxInflightChunks = 127;  // what a ticket can tell apart

  // `cubin`: csrc/copy_kernels.cu compiled for this GPU. Throws std::runtime_error naming the call that
  // failed.
  CudaDevice(std::shared_ptr<const CudaDriver> driver, int ordinal, const std::string& cubin,
             const CudaOptions& options = {});
  ~CudaDevice() override;  // waits for the streams
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  // Page-locks host memory; chunks may touch no other. Before the engine starts, and undone after it has
  // stopped. Throws as CudaHostMemory::add and remove.
  void register_host(uint64_t address, uint64_t bytes);
  void unregister_host(uint64_t address);

  const char* name() const override { return name_.c_str(); }
  DeviceLimits limits() const override;
  EventId record_event(uint64_t stream) override;
  Progress query_event(EventId event) override;
  void release_event(EventId event) override;
  void prepare(const std::vector<Range>& ranges, Prepared* prepared) override {
    prepare_pieces(ranges, host_, prepared);
  }
  Ticket submit(const Chunk& chunk) override;
  Progress poll(Ticket ticket) override;
  std::string last_error() const override;
  bool healthy(Direction) const override { return !dead_ && !disabled_; }
  void relax(std::chrono::microseconds) override {}

  CudaStats stats(Direction direction) const { return stats_[static_cast<int>(direction)]; }

 private:
  enum class Phase : uint8_t {
    kIdle,
    kRefused,   // never started
    kCopying,   // copy-engine commands are still to be submitted
    kRunning,   // all is submitted
    kDraining,  // failed; what was submitted may still run
  };

  static constexpr uint32_t kThreadsPerBlock = 32 * kWarpsPerBlock;
  // What a stage has beyond stage_bytes: every run in it keeps the alignment of its host address, for < 16
  // bytes.
  static constexpr uint64_t kStageSlack = 64 << 10;
  // A staged chunk pays one copy-engine command (2.6 us on an H200's host, less in a batch) per run of host
  // memory; a run of 64 KiB takes 1.3 us on PCIe 5. Where runs are shorter on average, the kernel writes host
  // memory itself.
  static constexpr uint64_t kMinStagedRun = 64 << 10;

  // What the GPU tells of one operation: how many of its slices have ended, counted since the device was
  // made.
  struct Word {
    std::atomic<uint32_t> ended{0};
    uint32_t rest_of_cache_line[15];
  };

  // One chunk in flight.
  struct Operation {
    Phase phase = Phase::kIdle;
    Ticket ticket = 0;
    Chunk chunk{};
    bool staged = false;
    PieceList list;
    uint64_t stage = 0;           // its buffer on the GPU
    Piece* pieces = nullptr;      // its piece list as the host sees it ...
    uint64_t pieces_device = 0;   // ... and as kernels do
    std::vector<StagedRun> runs;  // what copies move if it is staged; else they move the ranges themselves
    // How far the copies got: the next run or range, and the bytes of it that are done.
    size_t next = 0;
    uint64_t next_done = 0;
    std::chrono::steady_clock::time_point resume{};  // no slice before this
    CuEvent handoff = nullptr;  // what one stream did for this chunk and the other waits for
    CuStream last = nullptr;    // the stream on which it ends
    Word* word = nullptr;       // as the host sees it ...
    uint64_t word_device = 0;   // ... and as the stream writes it
    uint32_t marked = 0;        // slices whose end the stream was told to write, since the device was made
    uint32_t ended = 0;         // of them, those seen to have ended
    uint32_t first_slice = 0;   // `marked` when the chunk was submitted
    std::chrono::steady_clock::time_point ask{};  // when the driver is asked, should no word come
    bool drain_marked = false;
    uint32_t failed_polls = 0;
  };

  struct Lane {
    std::array<CuStream, 2> turns{};  // of the copies
    uint32_t turn = 0;
    CuStream kernel = nullptr;
    CuStream signal = nullptr;
    CuFunction function = nullptr;
    std::vector<Operation> operations;  // by inflight slot
    // Where the next copies go. What is queued there follows all that was queued on the other.
    CuStream dma() const { return turns[turn]; }
  };

  void create(const std::string& cubin);
  void destroy();
  void require(const char* call, CuResult result) const;  // throws
  bool succeeded(const char* call, CuResult result);      // notes the error; a sticky one ends the device
  void note_error(const std::string& why);
  bool enter();
  std::vector<CuStream> streams() const;  // all that were created

  bool start(Operation& op);
  bool advance(Operation& op);
  bool submit_slice(Operation& op);
  bool copy_slice(Operation& op);
  bool next_copy(Operation& op, uint64_t* host, uint64_t* device, uint64_t* bytes);
  bool copied(const Operation& op) const;
  void list(Operation& op);
  bool stageable(const Chunk& chunk, const PieceList& list) const;
  bool launch(Operation& op);
  bool hand_over(Operation& op, CuStream from, CuStream to);
  bool pass_turn(Operation& op);
  bool mark(Operation& op, CuStream stream);
  Progress ended(Operation& op, uint32_t slices);
  Progress query(CuStream stream);
  std::chrono::microseconds ask_every() const { return std::chrono::microseconds(options_.ask_driver_us); }
  bool drained(Operation& op);
  void give_up(Operation& op);
  Progress retire(Operation& op, Progress progress);

  Lane& lane(const Operation& op) { return lanes_[static_cast<int>(op.chunk.direction)]; }
  CudaStats& stats(const Operation& op) { return stats_[static_cast<int>(op.chunk.direction)]; }

  std::shared_ptr<const CudaDriver> driver_;
  const CudaDriver& cu_;
  CudaOptions options_;
  std::string name_ = "cuda";
  CuDevice device_ = 0;
  CuContext context_ = nullptr;
  CuModule module_ = nullptr;
  CudaHostMemory host_;
  std::array<Lane, kDirections> lanes_;
  std::array<CudaStats, kDirections> stats_;
  void* words_ = nullptr;             // page-locked; one per operation
  bool writes_words_ = false;         // whether streams can
  std::vector<CuAddress> to_, from_;  // one slice of copies
  std::vector<size_t> bytes_;
  uint32_t max_grid_ = 1;
  uint64_t tickets_ = 0;

  // Events of the compute stream: recorded by its owner, queried and released by the engine thread.
  std::mutex events_mutex_;
  std::vector<CuEvent> events_;
  std::vector<uint32_t> free_events_;

  std::atomic<bool> disabled_{false};  // takes no more work
  std::atomic<bool> dead_{false};      // and nothing of it runs any more: the context has ended
  mutable std::mutex error_mutex_;
  std::string error_;
};

}  // namespace pega
