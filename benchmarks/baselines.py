# SPDX-License-Identifier: Apache-2.0
"""What others would do with the same ranges: the driver's own copies, and vLLM's. GiB/s, medians."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
from rig import GIB, Rig, sides

from vllm_pega_connector import _native

# Descriptors of one cuMemcpyBatchAsync: thousands at once hold the driver for milliseconds.
BATCH_CAP = 1024


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: source access order, two location hints (type, id), flags."""

    _fields_ = [(name, ctypes.c_int) for name in ("order", "from_type", "from_id", "to_type", "to_id", "flags")]


class Baselines:
    """Copies over an open rig's memory, from one thread. `most`: ranges that per-range copies move at most."""

    def __init__(self, rig: Rig, repeat: int, most: int):
        self.rig = rig
        self.repeat = repeat
        self.most = most
        self.streams = {side: cp.cuda.Stream(non_blocking=True) for side in sides("both")}
        self._driver = ctypes.CDLL("libcuda.so.1")

    def contiguous(self, direction: str) -> float:
        """One pinned copy of all bytes: the wire."""
        rig, count = self.rig, self.rig.moving * self.rig.slot_bytes
        upper = rig.half * rig.slot_bytes
        gpu, host, copy = rig.gpu[0].data.ptr, rig.pool.address, cp.cuda.runtime.memcpyAsync

        def run(side: str) -> None:
            if side == "load":
                copy(gpu, host, count, cp.cuda.runtime.memcpyHostToDevice, self.streams[side].ptr)
            else:
                copy(host + upper, gpu + upper, count, cp.cuda.runtime.memcpyDeviceToHost, self.streams[side].ptr)

        return self._rate(direction, run, count * len(sides(direction)))

    def per_range(self) -> dict[str, Callable[[str], float]]:
        """By name, functions of a direction that copy shuffled ranges; only what this machine has."""
        out: dict[str, Callable[[str], float]] = {}
        if hasattr(self._driver, "cuMemcpyBatchAsync_v2"):
            out["cuMemcpyBatchAsync"] = self._batch
        try:
            import torch
            from vllm import _custom_ops

            if torch.cuda.is_available() and hasattr(_custom_ops, "swap_blocks_batch"):
                out["vllm.swap_blocks_batch"] = self._vllm
        except ImportError:
            pass
        return out

    def _ranges(self, direction: str) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Per side: addresses to, addresses from, bytes."""
        rig, out = self.rig, {}
        for side in sides(direction):
            moves = rig.moves(side, "shuffled", min(rig.moving, max(1, self.most // rig.segments)))
            plan = np.array(_native.plan(rig.layouts, rig.pool, [0, 0], moves), np.uint64)
            device, host, count = (np.ascontiguousarray(column) for column in plan.T)
            out[side] = (device, host, count) if side == "load" else (host, device, count)
        return out

    def _batch(self, direction: str) -> float:
        ranges = self._ranges(direction)
        attributes = _Attributes(order=1)  # in stream order
        first = ctypes.c_size_t(0)

        def run(side: str) -> None:
            to, source, count = ranges[side]
            for i in range(0, len(count), BATCH_CAP):
                pointers = [ctypes.c_void_p(a[i:].ctypes.data) for a in (to, source, count)]
                error = self._driver.cuMemcpyBatchAsync_v2(
                    *pointers, ctypes.c_size_t(min(BATCH_CAP, len(count) - i)), ctypes.byref(attributes),
                    ctypes.byref(first), ctypes.c_size_t(1), ctypes.c_void_p(self.streams[side].ptr),
                )  # fmt: skip
                if error:
                    raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {error}")

        return self._rate(direction, run, sum(int(r[2].sum()) for r in ranges.values()))

    def _vllm(self, direction: str) -> float:
        import torch
        from vllm import _custom_ops

        ranges = self._ranges(direction)
        tensors = {side: [torch.from_numpy(a.view(np.int64)) for a in r] for side, r in ranges.items()}

        def run(side: str) -> None:
            to, source, count = tensors[side]
            with torch.cuda.stream(torch.cuda.ExternalStream(self.streams[side].ptr)):
                _custom_ops.swap_blocks_batch(source, to, count)

        return self._rate(direction, run, sum(int(r[2].sum()) for r in ranges.values()))

    def _rate(self, direction: str, run: Callable[[str], Any], total: int) -> float:
        seconds = []
        for _ in range(self.repeat + 1):
            self.rig.settle()
            start = time.perf_counter()
            for side in sides(direction):
                run(side)
            for side in sides(direction):
                self.streams[side].synchronize()
            seconds.append(time.perf_counter() - start)
        return total / GIB / statistics.median(seconds[1:])  # the first one warms up
