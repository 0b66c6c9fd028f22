// SPDX-License-Identifier: Apache-2.0
#include "cuda_pieces.h"

namespace pega {

// Runs for every range of every chunk, on the thread that feeds both directions: at 512 bytes a range and 50
// GiB/s it has 10 ns for each. Hence one pass, in the order of memory, that looks up a registration only when
// it leaves it.
PieceList list_pieces(const Chunk& chunk, const CudaHostMemory& host_memory, bool staged, Piece* out) {
  const uint64_t warps = std::min(std::max(chunk.grid, 1u), kMaxSplitWarps / kWarpsPerBlock) * kWarpsPerBlock;
  const uint64_t share = (chunk.bytes + warps - 1) / warps;
  const uint64_t largest = std::clamp<uint64_t>(
      (share + kMinPieceBytes - 1) / kMinPieceBytes * kMinPieceBytes, kMinPieceBytes, kMaxPieceBytes);
  const uint64_t base = host_memory.base();
  const Piece* const begin = out;
  PieceList list;
  CudaHostMemory::Region region{};
  uint64_t misalignment = 0, run_end = 0;
  for (size_t i = 0; i < chunk.count; ++i) {
    const Range& range = chunk.ranges[i];
    uint64_t device = range.device, host = range.host, left = range.bytes;
    misalignment |= device | host | left;
    if (host != run_end || i == 0) {
      ++list.runs;
      list.staged_bytes = place_run(list.staged_bytes, host);
    }
    run_end = host + left;
    while (left > 0) {
      if (host - region.host >= region.bytes) {
        const CudaHostMemory::Region* found = host_memory.find(host);
        if (!found) {
          list.registered = false;
          return list;
        }
        region = *found;
      }
      const uint64_t bytes = std::min({left, largest, region.host + region.bytes - host});
      const uint64_t offset = staged ? list.staged_bytes : host - region.host + region.device - base;
      *out++ = {device, offset | (bytes - 1) << 48};
      list.staged_bytes += bytes;
      device += bytes;
      host += bytes;
      left -= bytes;
    }
  }
  list.aligned = (misalignment & 15) == 0;
  list.count = static_cast<uint32_t>(out - begin);
  return list;
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
