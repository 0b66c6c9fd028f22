// SPDX-License-Identifier: Apache-2.0
// What a copy kernel is given: a chunk's ranges as a list of pieces (csrc/copy_kernels.cu reads it).
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda_host_memory.h"
#include "device.h"

namespace pega {

struct alignas(16) Piece {
  uint64_t device;
  uint64_t host;  // bits 0-47: offset from the base address given to the launch; bits 48-63: bytes - 1
};

constexpr uint64_t pack(uint64_t offset, uint64_t bytes) { return offset | (bytes - 1) << 48; }
constexpr uint64_t offset_of(uint64_t packed) { return packed & ((uint64_t{1} << 48) - 1); }

inline constexpr uint32_t kMaxPieceBytes = 64 << 10;  // the format's limit
// Pieces never shrink below this to spread a range over more warps: one warp has 8 KiB in flight.
inline constexpr uint32_t kMinPieceBytes = 8 << 10;
inline constexpr uint32_t kMaxSplitWarps = 2048;  // more warps than this gain nothing by smaller pieces
inline constexpr uint32_t kWarpsPerBlock = 8;
inline constexpr uint32_t kMaxPiecesPerBatch = 32;  // one a lane

// Ranges that are neighbours in host memory lie one behind the other in a stage: one copy-engine command.
struct StagedRun {
  uint64_t host;
  uint64_t bytes;
  uint64_t offset;  // in the stage
};

struct PieceList {
  uint32_t count = 0;
  bool registered = true;     // else the list is unfinished
  bool aligned = true;        // every address and size is a multiple of 16
  uint64_t runs = 0;          // of contiguous host memory
  uint64_t staged_bytes = 0;  // what they fill of a stage
  uint64_t base = 0;          // added to the pieces' offsets
};

// How many pieces a list may get: a cut costs one per kMaxPieceBytes or per warp; so does, rarely, the end of
// a registration.
constexpr uint64_t piece_capacity(uint64_t max_ranges, uint64_t max_bytes) {
  return max_ranges + std::max<uint64_t>(kMaxSplitWarps, max_bytes / kMaxPieceBytes) + 64;
}

// Writes the list of a chunk: offsets are from host_memory.base() or, staged, from the start of the stage;
// `base` is left to the caller.
// Large ranges are cut so that every warp of the grid gets a part.
PieceList list_pieces(const Chunk& chunk, const CudaHostMemory& host_memory, Piece* out);
// The same for a stage; its first `max_runs` runs are noted too.
PieceList list_staged_pieces(const Chunk& chunk, const CudaHostMemory& host_memory, Piece* out,
                             StagedRun* runs, size_t max_runs);

// Staged runs lie one behind the other, each on its host address' alignment so that wide copies stay wide:
// where the run at `host` starts if the one before it ended at `end`.
inline uint64_t place_run(uint64_t end, uint64_t host) { return end + ((host - end) & 15); }

// The pieces of whole ranges, in host memory, for all chunks that they will be part of. Nothing where a range
// may be more than one piece.
void prepare_pieces(const std::vector<Range>& ranges, const CudaHostMemory& host_memory, Prepared* prepared);
// The list of a chunk that was prepared. Staged, it must be one run, which is noted. False: list it as above.
bool copy_prepared(const Chunk& chunk, const CudaHostMemory& host_memory, bool staged, Piece* out,
                   StagedRun* run, PieceList* list);

// How a list is spread over a grid of at most `max_grid` CTAs.
struct LaunchShape {
  uint32_t grid;
  uint32_t batch;  // pieces that a warp takes at a time
};
LaunchShape shape_launch(uint32_t pieces, uint32_t max_grid);

}  // namespace pega
