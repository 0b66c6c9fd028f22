# SPDX-License-Identifier: Apache-2.0
"""The copy kernels and the copy engine on a real GPU: every byte of both memories, moved or not, is compared."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from tests.support import chunk_cases
from vllm_pega_connector import _native

BACKENDS = ["memcpy", "kernel", "chunked", "staged"]
DIRECTIONS = ["load", "save"]


class Machine:
    """Both sides' memory, filled with noise, and a device that may touch the host's."""

    def __init__(self, cubin: bytes, case: chunk_cases.Case, seed: int):
        import cupy

        rng = np.random.default_rng(seed)
        self.gpu = cupy.asarray(rng.integers(0, 256, case.device_bytes, np.uint8))
        self._map = mmap.mmap(-1, case.host_bytes)
        self.host = np.frombuffer(self._map, np.uint8)
        self.host[:] = rng.integers(0, 256, case.host_bytes, np.uint8)
        cupy.cuda.Device().synchronize()
        self.device = _native.CudaDevice(0, cubin)
        self.device.register_host(self.host.ctypes.data, case.host_bytes)

    def check(self, case: chunk_cases.Case, direction: str, backend: str, grid: int) -> None:
        gpu, host = case.expected(direction, self.gpu.get(), self.host)
        rows = case.rows(self.gpu.data.ptr, self.host.ctypes.data)
        self.device.copy(direction, backend, rows, grid)
        np.testing.assert_array_equal(self.gpu.get(), gpu)
        np.testing.assert_array_equal(self.host, host)


@pytest.mark.parametrize("backend", ["memcpy", "kernel"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_pair_of_alignments(cubin, direction, backend):
    case = chunk_cases.every_alignment(np.random.default_rng(1), [1, 2, 15, 16, 17, 33, 511, 512, 513, 4099])
    Machine(cubin, case, 1).check(case, direction, backend, 8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("seed", "ranges", "largest"), [(2, 100, 8 << 20), (3, 5000, 20_000), (4, 1, 8 << 20), (5, 9, 77)]
)
def test_random_sizes(cubin, direction, backend, seed, ranges, largest):
    case = chunk_cases.mixed_sizes(np.random.default_rng(seed), ranges, largest)
    Machine(cubin, case, seed).check(case, direction, backend, grid=1 + seed % 3 * 7)


@pytest.mark.parametrize("size", [16, 48, 512, 528, 4096, 65536, 65552, 1 << 20])
@pytest.mark.parametrize("grid", [1, 3, 16])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_aligned_ranges_in_bulk(cubin, direction, grid, size):
    n = min(3000, (24 << 20) // size)
    zero = np.zeros(n, np.int64)
    case = chunk_cases.scattered(np.random.default_rng(size + grid), np.full(n, size), zero, zero)
    Machine(cubin, case, size).check(case, direction, "kernel", grid)


@pytest.mark.parametrize("align", [0, 4, 7])
@pytest.mark.parametrize("size", [512, 4096, 65536])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_staged_runs(cubin, direction, size, align):
    n = (4 << 20) // size
    case = chunk_cases.adjacent_on_host(np.random.default_rng(size), np.full(n, size - (align > 0)), 5, align)
    machine = Machine(cubin, case, size)
    machine.check(case, direction, "staged", 8)
    seen = machine.device.stats(direction)
    assert (seen["unstaged_chunks"], seen["copies"], seen["launches"], seen["max_grid"]) == (0, 5, 1, 8)
