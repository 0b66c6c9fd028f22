// SPDX-License-Identifier: Apache-2.0
// Copies many small pieces with few CTAs. What fills PCIe is bytes in flight, not CTAs: every lane has sixteen
// 16-byte loads on their way before its first store, across piece boundaries, so that 512-byte pieces keep as
// much in flight as large ones (8 KiB a warp). Two CTAs fill PCIe 5 (H200; with eight loads four were needed).
//
// No #include: NVRTC compiles this file at start-up (vllm_pega_connector/kernels.py). csrc/cuda_device.cpp writes
// the pieces and knows this file's launch contract:
//   * `pieces` lies in mapped host memory. Warps take batches of `batch` (1 to 32) in turn: each lane reads one piece,
//     so that a batch costs one PCIe round trip, and the next batch is on its way while one is copied.
//   * A piece is 1 to 65,536 bytes; larger ranges are cut by the caller, which spreads them over warps.
//   * `aligned` is set when every address and size is a multiple of 16.

typedef unsigned long long u64;
typedef unsigned int u32;

struct __align__(16) Piece {
  u64 device;  // address on the GPU's side of the copy
  u64 host;    // bits 0-47: offset from host_base; bits 48-63: bytes - 1
};

namespace {

constexpr u32 kLanes = 32;
constexpr u32 kInFlight = 16;              // loads of a lane in the common, aligned case; registers bound it
constexpr u32 kInFlightAny = 8;            // and at any alignment
constexpr u32 kRow = kLanes * 16;          // bytes that one warp-wide load moves
constexpr u32 kAll = 0xffffffffu;

// Streaming hints: every byte is touched once, so it should not push decode's data out of the caches.
__device__ __forceinline__ uint4 load(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void store(uint4* p, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u64 load(const u64* p) {
  u64 v;
  asm volatile("ld.global.cs.u64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ void store(u64* p, u64 v) {
  asm volatile("st.global.cs.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ u32 load(const u32* p) {
  u32 v;
  asm volatile("ld.global.cs.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ void store(u32* p, u32 v) {
  asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u32 load(const unsigned char* p) {
  u32 v;
  asm volatile("ld.global.cs.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ void store(unsigned char* p, u32 v) {
  asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// `count` units of T by one warp.
template <typename T>
__device__ __forceinline__ void copy_units(u64 to, u64 from, u32 count, u32 lane) {
  const T* src = reinterpret_cast<const T*>(from);
  T* dst = reinterpret_cast<T*>(to);
  for (u32 i = lane; i < count; i += kLanes * kInFlightAny) {
    decltype(load(src)) value[kInFlightAny];
#pragma unroll
    for (u32 u = 0; u < kInFlightAny; ++u) {
      if (i + u * kLanes < count) value[u] = load(src + i + u * kLanes);
    }
#pragma unroll
    for (u32 u = 0; u < kInFlightAny; ++u) {
      if (i + u * kLanes < count) store(dst + i + u * kLanes, value[u]);
    }
  }
}

// The widest unit that fits both addresses after `head` bytes; the ends go byte by byte.
template <typename T>
__device__ void copy_peeled(u64 to, u64 from, u32 bytes, u32 lane) {
  const u32 head = min(bytes, static_cast<u32>(-to & (sizeof(T) - 1)));
  const u32 units = (bytes - head) / sizeof(T);
  const u32 body_end = head + units * static_cast<u32>(sizeof(T));
  copy_units<unsigned char>(to, from, head, lane);
  copy_units<T>(to + head, from + head, units, lane);
  copy_units<unsigned char>(to + body_end, from + body_end, bytes - body_end, lane);
}

__device__ void copy_any(u64 to, u64 from, u32 bytes, u32 lane) {
  const u32 skew = static_cast<u32>(to ^ from);
  if ((skew & 15) == 0) {
    copy_peeled<uint4>(to, from, bytes, lane);
  } else if ((skew & 7) == 0) {
    copy_peeled<u64>(to, from, bytes, lane);
  } else if ((skew & 3) == 0) {
    copy_peeled<u32>(to, from, bytes, lane);
  } else {
    copy_units<unsigned char>(to, from, bytes, lane);
  }
}

__device__ __forceinline__ u32 piece_bytes(u64 host) { return static_cast<u32>(host >> 48) + 1; }
__device__ __forceinline__ u64 piece_offset(u64 host) { return host & 0xffffffffffffull; }

// All pieces of up to 32, one per lane (`valid` of them), as one sequence of 512-byte rows.
template <bool kToHost>
__device__ __forceinline__ void copy_rows(u64 device, u64 host, u32 bytes, u32 lane) {
  const u32 rows = (bytes + kRow - 1) / kRow;
  u32 end = rows;  // inclusive prefix sum: the row behind this lane's piece
#pragma unroll
  for (u32 step = 1; step < kLanes; step *= 2) {
    const u32 below = __shfl_up_sync(kAll, end, step);
    if (lane >= step) end += below;
  }
  const u32 total = __shfl_sync(kAll, end, kLanes - 1);
  const u32 begin = end - rows;
  for (u32 first = 0; first < total; first += kInFlight) {
    u64 source[kInFlight], target[kInFlight];  // target 0: nothing to store for this lane
    uint4 value[kInFlight];
#pragma unroll
    for (u32 u = 0; u < kInFlight; ++u) {
      // The row's piece: the first whose end lies behind it. Past the last row it is the first piece of all.
      const u32 row = first + u;
      const u32 owner = __popc(__ballot_sync(kAll, end <= row)) & (kLanes - 1);
      const u64 dev = __shfl_sync(kAll, device, owner);
      const u64 hst = __shfl_sync(kAll, host, owner);
      const u32 size = __shfl_sync(kAll, bytes, owner);
      const u32 offset = (row - __shfl_sync(kAll, begin, owner)) * kRow + lane * 16;
      target[u] = row < total && offset < size ? (kToHost ? hst : dev) + offset : 0;
      // Lanes past the end load the piece's last bytes once more. A load that not all lanes make is worse: the
      // compiler moves its result to other registers, waits for that, and half as much is in flight.
      source[u] = (kToHost ? dev : hst) + min(offset, size - 16);
    }
#pragma unroll
    for (u32 u = 0; u < kInFlight; ++u) value[u] = load(reinterpret_cast<const uint4*>(source[u]));
#pragma unroll
    for (u32 u = 0; u < kInFlight; ++u) {
      if (target[u]) store(reinterpret_cast<uint4*>(target[u]), value[u]);
    }
  }
}

template <bool kToHost>
__device__ __forceinline__ void copy_pieces(const Piece* pieces, u32 count, u32 batch, u64 host_base, u32 aligned) {
  const u32 lane = threadIdx.x % kLanes;
  const u32 warps = gridDim.x * (blockDim.x / kLanes);
  const u32 warp = blockIdx.x * (blockDim.x / kLanes) + threadIdx.x / kLanes;
  const uint4* list = reinterpret_cast<const uint4*>(pieces);
  const u32 stride = warps * batch;
  u32 first = warp * batch;
  if (first >= count) return;
  uint4 raw = load(list + min(first + lane, count - 1));
  for (; first < count; first += stride) {
    const u32 mine = min(batch, count - first);
    const u64 device = static_cast<u64>(raw.y) << 32 | raw.x;
    const u64 packed = static_cast<u64>(raw.w) << 32 | raw.z;
    const u64 host = host_base + piece_offset(packed);
    const u32 bytes = lane < mine ? piece_bytes(packed) : 0;
    raw = load(list + min(first + stride + lane, count - 1));
    if (aligned) {
      copy_rows<kToHost>(device, host, bytes, lane);
    } else {
      for (u32 i = 0; i < mine; ++i) {
        const u64 dev = __shfl_sync(kAll, device, i);
        const u64 hst = __shfl_sync(kAll, host, i);
        const u32 size = __shfl_sync(kAll, bytes, i);
        copy_any(kToHost ? hst : dev, kToHost ? dev : hst, size, lane);
      }
    }
  }
}

}  // namespace

// Host (or stage) -> device.
extern "C" __global__ void __launch_bounds__(256)
pega_load(const Piece* pieces, u32 count, u32 batch, u64 host_base, u32 aligned) {
  copy_pieces<false>(pieces, count, batch, host_base, aligned);
}

// Device -> host (or stage).
extern "C" __global__ void __launch_bounds__(256)
pega_save(const Piece* pieces, u32 count, u32 batch, u64 host_base, u32 aligned) {
  copy_pieces<true>(pieces, count, batch, host_base, aligned);
}
