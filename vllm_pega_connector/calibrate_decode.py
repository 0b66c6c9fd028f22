# SPDX-License-Identifier: Apache-2.0
"""What decode feels: a synthetic decode loop and bursts of transfers beside it.

A step is what a model runner makes of it: token ids go up, small kernels prepare, a CUDA graph of memory-bound kernels
runs, small kernels sample, tokens come back, and the host waits for them. That read-back shares the copy engine with
saves, which is why the directions differ (on an H200 with vLLM 0.26: a load at wire speed is free, a save is not).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

STEP_MS = 5.0
_SCALE = r"""
extern "C" __global__ void scale(float4* data, unsigned int n) {
  for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    float4 v = data[i];
    v.x *= 0.999f; v.y *= 0.999f; v.z *= 0.999f; v.w *= 0.999f;
    data[i] = v;
  }
}
"""


class HostDecode:
    """A memory-bound loop; numpy leaves the GIL meanwhile, as a model's kernels would."""

    def __init__(self) -> None:
        self._weights = np.ones(1 << 20, np.float32)

    def step(self) -> None:
        for _ in range(4):
            np.multiply(self._weights, np.float32(1.0), out=self._weights)


class CudaDecode:
    """About STEP_MS of kernels that each stream 16 MiB of a buffer much larger than the L2 cache."""

    _SLICE = 16 << 20
    _SMALL = 16  # launches before and after the graph

    def __init__(self, cupy: Any) -> None:
        self._runtime = cupy.cuda.runtime
        self._weights = cupy.ones((512 << 20) // 4, cupy.float32)
        self._tokens = cupy.zeros(1024, cupy.float32)
        self._up, self._down = (cupy.cuda.alloc_pinned_memory(4096) for _ in range(2))
        self._scale = cupy.RawKernel(_SCALE, "scale")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._launch(self._tokens, 1)
        self._stream.synchronize()  # compiled and loaded: a capture allows neither
        self._graph = self._capture(64)
        took = min(self._timed() for _ in range(5))
        self._graph = self._capture(max(8, round(64 * STEP_MS / 1e3 / took)))

    def _launch(self, array: Any, grid: int) -> None:
        self._scale((grid,), (256,), (array, np.uint32(array.size // 4)), stream=self._stream)

    def _capture(self, kernels: int) -> Any:
        slices = self._weights.reshape(-1, self._SLICE // 4)
        with self._stream:
            self._stream.begin_capture()
            for i in range(kernels):
                self._launch(slices[i % len(slices)], 264)
            return self._stream.end_capture()

    def _timed(self) -> float:
        start = time.perf_counter()
        self._graph.launch(self._stream)
        self._stream.synchronize()
        return time.perf_counter() - start

    def step(self) -> None:
        copy, tokens, stream = self._runtime.memcpyAsync, self._tokens, self._stream
        copy(tokens.data.ptr, self._up.ptr, 4096, self._runtime.memcpyHostToDevice, stream.ptr)
        for _ in range(self._SMALL):
            self._launch(tokens, 1)
        self._graph.launch(stream)
        for _ in range(self._SMALL):
            self._launch(tokens, 1)
        copy(self._down.ptr, tokens.data.ptr, 4096, self._runtime.memcpyDeviceToHost, stream.ptr)
        stream.synchronize()


def open_decode(place: Any) -> Any:
    return CudaDecode(place.xp) if place.kind == "cuda" else HostDecode()


def step_times(decode: Any, seconds: float, least: int) -> list[float]:
    """Seconds of each step, for so long, and at least so many; two steps first are warm-up."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < least + 2 or time.perf_counter() < end:
        start = time.perf_counter()
        decode.step()
        times.append(time.perf_counter() - start)
    return times[2:]


class Bursts:
    """Moves `moves` every `period_s` from a thread of its own; a burst that is late delays the next."""

    def __init__(self, bench: Any, direction: str, moves: np.ndarray, policy: Any, period_s: float) -> None:
        self._move = lambda: bench.transfer(direction, moves, policy)
        self._period_s = period_s
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._done = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Bursts:
        self._thread.start()
        return self

    def _run(self) -> None:
        due = time.perf_counter()
        try:
            while not self._stop.is_set():
                self._move()
                self._done += 1
                due = max(due + self._period_s, time.perf_counter())
                self._stop.wait(max(0.0, due - time.perf_counter()))
        except Exception as error:
            self._error = error

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None or not self._done:
            raise RuntimeError(f"nothing moved beside decode: {self._error}")
