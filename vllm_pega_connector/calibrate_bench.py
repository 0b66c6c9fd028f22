# SPDX-License-Identifier: Apache-2.0
"""The bench of `pega calibrate`: memory on one device, a pool, and the native engine between them."""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .config import ConfigError
from .devices import HOST_WORKERS
from .gpu import ask_driver

SPREAD = 2  # blocks on the device for every one that moves, so that moves are scattered
DEADLINE_S = 30.0


class HostPlace:
    """The host device: "device memory" is this process's own."""

    kind = "host"
    gpu_name = ""
    title = f"host device, workers: {HOST_WORKERS} ({platform.machine()})"
    driver = ""
    xp: Any = np

    def open(self) -> Any:
        from . import _native

        return _native.HostDevice(HOST_WORKERS)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def register(self, device: Any, pool: Any) -> None:
        """Nothing to pin."""

    unregister = register

    def settle(self) -> None:
        """Copies by worker threads have ended when the engine says so."""

    def copy_seconds(self, direction: str, device: Any, host: Any) -> float:
        """One contiguous copy."""
        to, source = (device, host) if direction == "load" else (host, device)
        start = time.perf_counter()
        np.copyto(to, source)
        return time.perf_counter() - start


class CudaPlace:
    """One GPU. Raises ConfigError with what is missing."""

    kind = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        from . import _native, kernels

        found = ask_driver()
        if problem := found.problem or _native.cuda_available():
            raise ConfigError([f"no GPU: {problem}; --device host calibrates the host device"])
        try:
            self._cubin = kernels.compile_cubin(ordinal)
            import cupy
        except (ImportError, RuntimeError) as error:
            raise ConfigError([str(error).splitlines()[0]]) from None
        self._ordinal, self.xp = ordinal, cupy
        cupy.cuda.Device(ordinal).use()
        self.gpu_name = self.title = cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode()
        self.driver = f"CUDA {found.version // 1000}.{found.version % 1000 // 10}"
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._flush = cupy.empty(256 << 20, cupy.uint8)  # more than any L2 cache

    def open(self) -> Any:
        from . import _native

        return _native.CudaDevice(self._ordinal, self._cubin)  # with the connector's own options

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def register(self, device: Any, pool: Any) -> None:
        device.register_host(pool.address, pool.nbytes)

    def unregister(self, device: Any, pool: Any) -> None:
        device.unregister_host(pool.address)

    def settle(self) -> None:
        """Nothing left to run, nothing left in the L2 cache."""
        self._flush.fill(1)
        self.xp.cuda.Device().synchronize()

    def copy_seconds(self, direction: str, device: Any, host: Any) -> float:
        """One contiguous pinned DMA, by events."""
        runtime = self.xp.cuda.runtime
        start, end = self.xp.cuda.Event(), self.xp.cuda.Event()
        to, source, kind = self.address(device), host.ctypes.data, runtime.memcpyHostToDevice
        if direction == "save":
            to, source, kind = source, to, runtime.memcpyDeviceToHost
        self.settle()
        start.record(self._stream)
        runtime.memcpyAsync(to, source, host.nbytes, kind, self._stream.ptr)
        end.record(self._stream)
        end.synchronize()
        return float(self.xp.cuda.get_elapsed_time(start, end)) / 1e3


class Bench:
    """Blocks of up to 64 ranges of `range_bytes` each, `total_bytes` of them (or a little less) move at a time.

    The ranges of a block lie apart on the device, as vLLM's layers do; blocks are shuffled, slots are neighbours.
    """

    def __init__(self, place: Any, range_bytes: int, total_bytes: int, segments: int = 0) -> None:
        from . import _native
        from .profile import load_profile

        self._place, self.range_bytes = place, range_bytes
        self._segments = segments or max(1, min(64, (256 << 10) // range_bytes))
        self._slot_bytes = self._segments * range_bytes
        self.moving = max(1, total_bytes // self._slot_bytes)
        self._blocks = self.moving * SPREAD
        self._rng = np.random.default_rng(range_bytes)
        self._gpu = place.xp.zeros(self._blocks * self._slot_bytes, np.uint8)
        self._pool: Any = _native.HostPool([(self._slot_bytes, self.moving)], prefault=True)
        view = np.frombuffer(self._pool.slot_view(0, 0), np.uint8)
        shape = (self.moving, self._slot_bytes)
        self._host = np.lib.stride_tricks.as_strided(view, shape, (self._slot_bytes, 1))
        self._noise = self._rng.integers(0, 256, shape, dtype=np.uint8)
        self._noise_there = place.xp.asarray(self._noise)
        base, stride = place.address(self._gpu), self._blocks * range_bytes
        parts = [_native.Segment(base + i * stride, range_bytes, range_bytes, 0) for i in range(self._segments)]
        layout = _native.GroupLayout(parts, self._blocks)
        self._device: Any = place.open()
        place.register(self._device, self._pool)
        known = _native.DeviceProfile(load_profile("auto", place.gpu_name))
        self._engine: Any = _native.TransferEngine(self._device, self._pool, [layout], [0], known)
        self._jobs = itertools.count(1)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._engine.close(DEADLINE_S):
            raise RuntimeError("the engine did not drain")
        self._place.unregister(self._device, self._pool)
        self._engine = self._device = None

    def moves(self, most_ranges: int = 1 << 40) -> np.ndarray:
        """uint32 rows (group, block, slot) of at most so many ranges, at least one block."""
        count = max(1, min(self.moving, most_ranges // self._segments))
        blocks = self._rng.permutation(self._blocks)[:count]
        columns = [np.zeros(count), blocks, self._rng.permutation(count)]
        return np.stack(columns, axis=1).astype(np.uint32, order="C")

    def ranges(self, moves: np.ndarray) -> int:
        return len(moves) * self._segments

    def transfer(self, direction: str, moves: np.ndarray, policy: Any) -> Any:
        """The result of one job. Raises RuntimeError if it did not succeed."""
        if not self._engine.submit(next(self._jobs), direction, moves, policy=policy):
            raise RuntimeError("the engine took no job")
        if not self._engine.drain(DEADLINE_S):
            raise RuntimeError(f"a transfer did not end within {DEADLINE_S:.0f} s")
        (result,) = self._engine.poll()
        if result.status != "done":
            raise RuntimeError(f"{result.direction} by {result.backend} {result.status}: {result.error}")
        return result

    def timed(self, direction: str, moves: np.ndarray, policy: Any) -> float:
        """Seconds from the first chunk's submission to the last byte."""
        self._place.settle()
        return float(self.transfer(direction, moves, policy).transfer_s)

    def verify(self, direction: str, moves: np.ndarray, policy: Any) -> None:
        """Moves noise onto zeros and compares. Raises RuntimeError if a byte is wrong."""
        xp, slots = self._place.xp, moves[:, 2].astype(np.int64)
        blocks = xp.asarray(moves[:, 1].astype(np.int64))
        by_block = self._gpu.reshape(self._segments, self._blocks, self.range_bytes)
        noise = self._noise_there[: len(moves)]
        as_ranges = (len(moves), self._segments, self.range_bytes)
        if direction == "load":
            self._host[slots] = self._noise[: len(moves)]
            self._gpu.fill(0)
        else:
            by_block[:, blocks] = noise.reshape(as_ranges).transpose(1, 0, 2)
            self._host[:] = 0
        self._place.settle()
        self.transfer(direction, moves, policy)
        if direction == "load":
            moved = by_block[:, blocks].transpose(1, 0, 2).reshape(len(moves), self._slot_bytes)
        else:
            moved = xp.asarray(self._host[slots])
        if not bool((moved == noise).all()):
            raise RuntimeError(f"{direction} of {self.range_bytes}-byte ranges moved wrong bytes")

    def submit_s(self, run: Callable[[], float], direction: str) -> tuple[float, float]:
        """(what `run` returns, seconds that the submitting thread spent in the device); a host device counts none."""
        if not hasattr(self._device, "stats"):
            return run(), 0.0
        before = self._device.stats(direction)["submit_ns"]
        seconds = run()
        return seconds, (self._device.stats(direction)["submit_ns"] - before) / 1e9

    def wire_s(self, direction: str) -> tuple[int, float]:
        """(bytes, seconds) of one contiguous copy."""
        host = self._host.reshape(-1)
        return host.nbytes, self._place.copy_seconds(direction, self._gpu[: host.nbytes], host)
