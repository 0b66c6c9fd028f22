# SPDX-License-Identifier: Apache-2.0
"""Memory, device and engine for one fragment size: the bench on which transfers are measured."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import cupy as cp
import numpy as np

from vllm_pega_connector import _native, kernels
from vllm_pega_connector.profile import load_profile

GIB = 2.0**30
DIRECTIONS = ("load", "save", "both")
# Blocks on the GPU: contiguous in both memories; in order, but one layer here and one block there; at random on the
# GPU only, as an allocator that gives neighbouring slots to neighbouring blocks leaves them; at random on both sides.
PATTERNS = ("contiguous", "strided", "shuffled", "scattered")
SPREAD = 4  # blocks and slots for every one that moves
# Holds back the compute event while the engine plans: planning is hidden behind a step's compute in service too.
GATE = r"""
extern "C" __global__ void gate(unsigned long long ns) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { __nanosleep(1000); asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""


def sides(direction: str) -> tuple[str, ...]:
    return ("load", "save") if direction == "both" else (direction,)


class Rig:
    """Blocks of up to 64 segments of `range_bytes`; `total_bytes`, or a little less, move in each direction.

    The lower half of blocks and slots belongs to loads, the upper half to saves. Group 0 keeps a block's segments
    apart on the GPU, as vLLM keeps layers; group 1 keeps them together.
    """

    def __init__(self, ordinal: int, range_bytes: int, total_bytes: int):
        self.ordinal = ordinal
        self.range_bytes = range_bytes
        self.segments = max(1, min(64, (256 << 10) // range_bytes))
        self.slot_bytes = self.segments * range_bytes
        self.moving = max(1, total_bytes // self.slot_bytes)
        self.half = self.moving * SPREAD
        self.blocks = 2 * self.half
        self.rng = np.random.default_rng(range_bytes)
        self.gpu = [cp.empty(self.blocks * self.slot_bytes, cp.uint8) for _ in range(2)]  # by group
        self.pool: Any = _native.HostPool([(self.slot_bytes, self.blocks)], prefault=True)
        first = np.frombuffer(self.pool.slot_view(0, 0), np.uint8)
        self.host = np.lib.stride_tricks.as_strided(first, (self.blocks, self.slot_bytes), (self.slot_bytes, 1))
        noise = self.rng.integers(0, 1 << 62, self.half * self.slot_bytes // 8).view(np.uint8)
        self.host[: self.half] = noise.reshape(self.half, self.slot_bytes)
        for memory in self.gpu:
            memory[:] = cp.asarray(np.tile(noise, 2))
        base, stride = [memory.data.ptr for memory in self.gpu], self.blocks * range_bytes
        apart = [_native.Segment(base[0] + i * stride, range_bytes, range_bytes, 0) for i in range(self.segments)]
        together = [
            _native.Segment(base[1] + i * range_bytes, self.slot_bytes, range_bytes, 1) for i in range(self.segments)
        ]
        self.layouts = [_native.GroupLayout(segments, self.blocks) for segments in (apart, together)]
        self.stream = cp.cuda.Stream(non_blocking=True)
        self._gate = cp.RawKernel(GATE, "gate")
        self._flush = cp.empty(256 << 20, cp.uint8)  # more than any L2
        self._jobs = itertools.count(1)
        self.device: Any = None
        self.engine: Any = None

    def open(self, profile: str = "h200", objective: str = "throughput", **options: int) -> None:
        """A device with these options (CudaDevice) and an engine on it."""
        self.device = _native.CudaDevice(self.ordinal, kernels.compile_cubin(self.ordinal), **options)
        self.device.register_host(self.pool.address, self.pool.nbytes)
        known = _native.DeviceProfile(load_profile(profile, ""))
        self.engine = _native.TransferEngine(self.device, self.pool, self.layouts, [0, 0], known, objective)

    def close(self) -> None:
        if not self.engine.close(10.0):
            raise RuntimeError(f"the engine did not drain: {self.device.last_error}")
        self.engine = None
        self.device.unregister_host(self.pool.address)
        self.device = None

    def moves(self, side: str, pattern: str, count: int) -> np.ndarray:
        """uint32 rows (group, block, slot) of `count` blocks."""
        blocks, slots = np.arange(count), np.arange(count)
        if pattern in ("shuffled", "scattered"):
            blocks = self.rng.permutation(self.half)[:count]
            slots = self.rng.permutation(self.half)[:count] if pattern == "scattered" else self.rng.permutation(count)
        offset = 0 if side == "load" else self.half
        group = np.full(count, int(pattern == "contiguous"))
        return np.stack([group, blocks + offset, slots + offset], axis=1).astype(np.uint32, order="C")

    def settle(self) -> None:
        """Nothing left to run, nothing left in the L2 cache."""
        self._flush.fill(1)
        cp.cuda.Device().synchronize()

    def transfer(self, moves: dict[str, np.ndarray], policy: Any = None) -> tuple[float, list[Any]]:
        """Seconds from the first chunk's submission to the last byte, and the results by direction."""
        self.settle()
        ranges = sum(map(len, moves.values())) * self.segments
        self._gate((1,), (1,), (np.uint64(1_000_000 + 150 * ranges),), stream=self.stream)
        event = self.engine.record_event(self.stream.ptr)
        given = {}
        for side, rows in moves.items():
            job = next(self._jobs)
            given[job] = time.perf_counter()
            if not self.engine.submit(job, side, rows, event=event, policy=policy):
                raise RuntimeError("the engine took no job")
        self.engine.release_event(event)
        if not self.engine.drain(60.0):
            raise RuntimeError(f"jobs did not end within a minute: {self.device.last_error}")
        results = self.engine.poll()
        for result in results:
            if result.status != "done":
                raise RuntimeError(f"{result.direction} {result.status}: {result.error}")
        starts = [given[r.job_id] + r.queue_s for r in results]
        ends = [start + r.transfer_s for start, r in zip(starts, results, strict=True)]
        return max(ends) - min(starts), results

    def latency_us(self, policy: Any, repeat: int) -> float:
        """Microseconds of a transfer of one block of the smallest size, from submission to completion seen."""
        moves = {"load": self.moves("load", "contiguous", 1)}
        return statistics.median(self.transfer(moves, policy)[0] for _ in range(repeat)) * 1e6

    def submit_ns(self) -> int:
        return sum(self.device.stats(side)["submit_ns"] for side in sides("both"))

    def _by_block(self, group: int) -> Any:
        """The GPU's memory of a group as [segment, block, byte]."""
        if group == 0:
            return self.gpu[0].reshape(self.segments, self.blocks, self.range_bytes)
        return self.gpu[1].reshape(self.blocks, self.segments, self.range_bytes).transpose(1, 0, 2)

    def poison(self, moves: dict[str, np.ndarray]) -> None:
        """Targets hold neither source's bytes."""
        for side, rows in moves.items():
            if side == "load":
                self._by_block(int(rows[0, 0]))[:, : self.half] = 0xAA
            else:
                self.host[rows[:, 2]] = 0x55
        cp.cuda.Device().synchronize()

    def check(self, moves: dict[str, np.ndarray]) -> None:
        """Raises RuntimeError unless every moved block is the same on both sides."""
        for side, rows in moves.items():
            blocks, slots = cp.asarray(rows[:, 1].astype(np.int64)), rows[:, 2].astype(np.int64)
            gpu = self._by_block(int(rows[0, 0]))[:, blocks].transpose(1, 0, 2).reshape(len(rows), self.slot_bytes)
            if not bool((cp.asarray(self.host[slots]) == gpu).all()):
                raise RuntimeError(f"{side} of {self.range_bytes}-byte ranges moved wrong bytes")
