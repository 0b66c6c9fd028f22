# SPDX-License-Identifier: Apache-2.0
"""Chunks of ranges for a CUDA device, real or fake: random places on both sides, and what memory must hold after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Case:
    """`ranges`: rows of (device offset, host offset, bytes), disjoint on both sides, in host order."""

    ranges: np.ndarray
    device_bytes: int
    host_bytes: int

    def rows(self, device_base: int, host_base: int) -> np.ndarray:
        return self.ranges + np.array([device_base, host_base, 0], np.uint64)

    def expected(self, direction: str, device: np.ndarray, host: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Both sides as they must be after the copy; what no range covers keeps its bytes."""
        device, host = device.copy(), host.copy()
        for d, h, n in self.ranges.astype(np.int64):
            if direction == "load":
                device[d : d + n] = host[h : h + n]
            else:
                host[h : h + n] = device[d : d + n]
        return device, host


def _place(sizes: np.ndarray, alignments: np.ndarray, gaps: np.ndarray) -> tuple[np.ndarray, int]:
    """Offsets (each = alignment mod 16) of ranges with `gaps` bytes or a little more between them, and their end."""
    offsets, end = [], 0
    for size, alignment, gap in zip(sizes.tolist(), alignments.tolist(), gaps.tolist(), strict=True):
        start = end + gap
        start += (alignment - start) % 16
        offsets.append(start)
        end = start + size
    return np.array(offsets, np.uint64), end + 64


def scattered(rng: np.random.Generator, sizes: np.ndarray, device_align: np.ndarray, host_align: np.ndarray) -> Case:
    """Ranges of these sizes and alignments (mod 16), shuffled on the device, with gaps of 1 to 63 bytes everywhere."""
    n = len(sizes)
    host, host_bytes = _place(sizes, host_align, rng.integers(1, 64, n))
    order = rng.permutation(n)
    placed, device_bytes = _place(sizes[order], device_align[order], rng.integers(1, 64, n))
    device = np.empty(n, np.uint64)
    device[order] = placed
    return Case(np.stack([device, host, sizes.astype(np.uint64)], axis=1), device_bytes, host_bytes)


def adjacent_on_host(rng: np.random.Generator, sizes: np.ndarray, runs: int, align: int) -> Case:
    """Ranges that form `runs` runs of host memory, each at `align` mod 16, shuffled on the device: fit for staging."""
    n = len(sizes)
    starts = set(np.linspace(0, n, runs, endpoint=False).astype(int).tolist())
    host, end = [], 0
    for i, size in enumerate(sizes.tolist()):
        if i in starts:
            end += 32 + (align - end) % 16
        host.append(end)
        end += size
    order = rng.permutation(n)
    placed, device_bytes = _place(sizes[order], np.full(n, align), rng.integers(1, 64, n))
    device = np.empty(n, np.uint64)
    device[order] = placed
    return Case(np.stack([device, np.array(host, np.uint64), sizes.astype(np.uint64)], axis=1), device_bytes, end + 64)


def every_alignment(rng: np.random.Generator, sizes: list[int]) -> Case:
    """Each size with each of the 256 pairs of alignments."""
    pairs = [(size, a, b) for size in sizes for a in range(16) for b in range(16)]
    size, device, host = np.array(pairs).T
    return scattered(rng, size, device, host)


def mixed_sizes(rng: np.random.Generator, n: int, largest: int) -> Case:
    """`n` ranges of 1 to `largest` bytes, evenly over the orders of magnitude, at any alignment."""
    sizes = np.maximum(1, np.exp(rng.uniform(0, np.log(largest), n)).astype(np.int64))
    sizes[0] = largest
    return scattered(rng, sizes, rng.integers(0, 16, n), rng.integers(0, 16, n))
