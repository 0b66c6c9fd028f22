// SPDX-License-Identifier: Apache-2.0
#include "cuda_pieces.h"

#include <algorithm>
#include <cstring>

namespace pega {

namespace {

uint64_t largest_piece(const Chunk& chunk) {
  const uint64_t warps = std::min(std::max(chunk.grid, 1u), kMaxSplitWarps / kWarpsPerBlock) * kWarpsPerBlock;
  const uint64_t share = (chunk.bytes + warps - 1) / warps;
  return std::clamp<uint64_t>((share + kMinPieceBytes - 1) / kMinPieceBytes * kMinPieceBytes, kMinPieceBytes,
                              kMaxPieceBytes);
}

// A range that is more than one piece, because it is large or because a registration ends in it.
template <bool kStaged>
Piece* cut(const Range& range, const CudaHostMemory& host_memory, uint64_t largest, uint64_t staged,
           Piece* out) {
  for (uint64_t done = 0; done < range.bytes;) {
    const uint64_t host = range.host + done;
    const CudaHostMemory::Region* region = host_memory.find(host);
    if (!region) return nullptr;
    const uint64_t bytes = std::min({range.bytes - done, largest, region->host + region->bytes - host});
    const uint64_t mapped = host - region->host + region->device - host_memory.base();
    *out++ = {range.device + done, pack(kStaged ? staged + done : mapped, bytes)};
    done += bytes;
  }
  return out;
}

// Runs for every range of every chunk, on the thread that feeds both directions: at 512 bytes a range and 50
// GiB/s there are 10 ns for each. Hence one pass in the order of memory, and little to do for a range that is
// one piece of the same registration as the first.
template <bool kStaged>
PieceList list(const Chunk& chunk, const CudaHostMemory& host_memory, Piece* out, StagedRun* to_runs,
               size_t max_runs) {
  PieceList list;
  const CudaHostMemory::Region* first = host_memory.find(chunk.ranges[0].host);
  list.registered = first != nullptr;
  if (!first) return list;
  const uint64_t largest = largest_piece(chunk);
  const uint64_t region = first->host, region_bytes = first->bytes;
  const uint64_t to_offset = kStaged ? 0 : first->device - first->host - host_memory.base();
  const Piece* const begin = out;
  uint64_t misalignment = 0, run_end = 0, runs = 0, staged = 0;
  StagedRun run{};
  const auto note_run = [&] {
    run.bytes = run_end - run.host;
    if (kStaged && runs != 0 && runs <= max_runs) to_runs[runs - 1] = run;
  };
  for (const Range *range = chunk.ranges, *end = range + chunk.count; range != end; ++range) {
    const uint64_t host = range->host, bytes = range->bytes;
    misalignment |= range->device | host | bytes;
    if (host != run_end || runs == 0) {
      note_run();
      ++runs;
      staged = place_run(staged, host);
      run = {host, 0, staged};
    }
    run_end = host + bytes;
    if (bytes - 1 < largest && host - region < region_bytes && run_end - region <= region_bytes) {
      *out++ = {range->device, pack(kStaged ? staged : host + to_offset, bytes)};
    } else {
      out = cut<kStaged>(*range, host_memory, largest, staged, out);
      if (!out) {
        list.registered = false;
        return list;
      }
    }
    staged += bytes;
  }
  note_run();
  list.aligned = (misalignment & 15) == 0;
  list.count = static_cast<uint32_t>(out - begin);
  list.runs = runs;
  list.staged_bytes = staged;
  return list;
}

}  // namespace

PieceList list_pieces(const Chunk& chunk, const CudaHostMemory& host_memory, Piece* out) {
  return list<false>(chunk, host_memory, out, nullptr, 0);
}

PieceList list_staged_pieces(const Chunk& chunk, const CudaHostMemory& host_memory, Piece* out,
                             StagedRun* runs, size_t max_runs) {
  return list<true>(chunk, host_memory, out, runs, max_runs);
}

void prepare_pieces(const std::vector<Range>& ranges, const CudaHostMemory& host_memory, Prepared* prepared) {
  prepared->clear();
  const auto is_one_piece = [](const Range& range) { return range.bytes - 1 < kMinPieceBytes; };
  if (ranges.empty() || !is_one_piece(ranges[0])) return;  // nearly always they are alike
  const CudaHostMemory::Region* region = host_memory.find(ranges[0].host);
  if (!region) return;
  const uint64_t to_offset = region->device - region->host - host_memory.base();
  uint64_t misalignment = 0, run_end = 0;
  prepared->words.resize(2 * ranges.size());
  uint64_t* word = prepared->words.data();
  for (const Range& range : ranges) {
    const uint64_t end = range.host + range.bytes;
    if (!is_one_piece(range) || range.host < region->host || end > region->host + region->bytes) {
      prepared->clear();
      return;
    }
    if (range.host != run_end) prepared->run_starts.push_back(&range - ranges.data());
    run_end = end;
    misalignment |= range.device | range.host | range.bytes;
    *word++ = range.device;
    *word++ = pack(range.host + to_offset, range.bytes);
  }
  prepared->aligned = (misalignment & 15) == 0;
}

bool copy_prepared(const Chunk& chunk, const CudaHostMemory& host_memory, bool staged, Piece* out,
                   StagedRun* run, PieceList* list) {
  if (!chunk.prepared) return false;
  const auto& starts = chunk.prepared->run_starts;
  const auto next = std::upper_bound(starts.begin(), starts.end(), chunk.first);
  if (staged && next != starts.end() && *next < chunk.first + chunk.count) return false;
  const uint64_t* words = chunk.prepared->words.data() + 2 * chunk.first;
  std::memcpy(out, words, chunk.count * sizeof(Piece));
  *list = {};
  list->count = static_cast<uint32_t>(chunk.count);
  list->aligned = chunk.prepared->aligned;
  list->base = host_memory.base();
  if (staged) {
    *run = {chunk.ranges[0].host, chunk.bytes, place_run(0, chunk.ranges[0].host)};
    list->runs = 1;
    list->staged_bytes = run->offset + run->bytes;
    list->base = run->offset - offset_of(words[1]);  // from the stage's start
  }
  return true;
}

LaunchShape shape_launch(uint32_t pieces, uint32_t max_grid) {
  const uint32_t grid = std::min(std::max(max_grid, 1u), (pieces + kWarpsPerBlock - 1) / kWarpsPerBlock);
  // As few rounds as batches of 32 allow, then as small a batch as these rounds allow: so all warps end
  // together.
  const uint32_t warps = grid * kWarpsPerBlock;
  const uint32_t rounds = (pieces + warps * kMaxPiecesPerBatch - 1) / (warps * kMaxPiecesPerBatch);
  return {grid, (pieces + warps * rounds - 1) / (warps * rounds)};
}

}  // namespace pega
