# SPDX-License-Identifier: Apache-2.0
"""Device memory, a host pool and plain-Python models of what the native engine should do with them."""

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_pega_connector import _native as native

Move = tuple[int, int, int]  # group, block, slot
PROFILE = native.DeviceProfile({"name": "test"})
BACKENDS = ("memcpy", "kernel", "chunked", "staged")


@dataclass(frozen=True)
class SegmentSpec:
    """A segment in terms of the rig's device buffer: `offset` and `stride` in bytes from its start."""

    offset: int
    stride: int
    size: int
    allocation: int


@dataclass(frozen=True)
class GroupSpec:
    segments: tuple[SegmentSpec, ...]
    blocks: int

    @property
    def slot_bytes(self) -> int:
        return sum(s.size for s in self.segments)


def layers(blocks: int, sizes: Sequence[int], gap: int = 0, base: int = 64) -> GroupSpec:
    """One allocation per layer, layer after layer; `gap` bytes between blocks that nobody may touch."""
    segments = []
    for i, size in enumerate(sizes):
        segments.append(SegmentSpec(base, size + gap, size, i + 1))
        base += blocks * (size + gap)
    return GroupSpec(tuple(segments), blocks)


def block_outermost(blocks: int, sizes: Sequence[int], gap: int = 0, base: int = 64, allocations: int = 1) -> GroupSpec:
    """All layers of a block side by side; with two `allocations` they alternate although they touch."""
    stride = sum(sizes) + gap
    segments = []
    for i, size in enumerate(sizes):
        segments.append(SegmentSpec(base, stride, size, 1 + i % allocations))
        base += size
    return GroupSpec(tuple(segments), blocks)


def random_groups(rng: random.Random) -> list[GroupSpec]:
    """One to three groups behind each other in device memory, of random shape."""
    groups: list[GroupSpec] = []
    base = 64
    for _ in range(rng.randint(1, 3)):
        blocks = rng.randint(4, 16)
        sizes = [rng.choice((1, 7, 16, 64, 96, 256, 1024)) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.5:
            sizes = [sizes[0]] * len(sizes)
        gap = rng.choice((0, 0, 16, 5))
        if rng.random() < 0.5:
            groups.append(layers(blocks, sizes, gap, base))
        else:
            groups.append(block_outermost(blocks, sizes, gap, base, rng.randint(1, 2)))
        base = max(s.offset + s.stride * blocks for s in groups[-1].segments) + 64
    return groups


class Rig:
    """Groups over one device buffer filled with random bytes, and a pool with one class per distinct slot size."""

    def __init__(self, groups: Sequence[GroupSpec], slots: int, seed: int = 0) -> None:
        self.groups = list(groups)
        end = max(s.offset + s.stride * g.blocks for g in groups for s in g.segments)
        rng = np.random.default_rng(seed)
        self.device = rng.integers(0, 256, end + 64, dtype=np.uint8)
        self.base = self.device.ctypes.data
        sizes = sorted({g.slot_bytes for g in groups})
        self.slots = slots
        self.pool = native.HostPool([(size, slots) for size in sizes])
        self.classes = [sizes.index(g.slot_bytes) for g in groups]
        self.host = np.frombuffer((ctypes.c_uint8 * self.pool.nbytes).from_address(self.pool.address), dtype=np.uint8)
        self.host[:] = rng.integers(0, 256, self.host.size, dtype=np.uint8)
        self.layouts = [
            native.GroupLayout(
                [native.Segment(self.base + s.offset, s.stride, s.size, s.allocation) for s in g.segments], g.blocks
            )
            for g in groups
        ]

    def engine(self, device: native.Device, **options) -> native.TransferEngine:
        return native.TransferEngine(device, self.pool, self.layouts, self.classes, PROFILE, **options)

    def slot_offset(self, group: int, slot: int) -> int:
        return self.pool.slot_address(self.classes[group], slot) - self.pool.address

    def slot_state(self, group: int, slot: int) -> tuple[int, bytes, int]:
        return self.pool.slot_state(self.classes[group], slot)

    def fragments(self, moves: Sequence[Move]) -> list[tuple[int, int, int, int]]:
        """(device offset, host offset, bytes, allocation), one per segment and move: no sorting, no merging."""
        out = []
        for group, block, slot in moves:
            host = self.slot_offset(group, slot)
            for s in self.groups[group].segments:
                out.append((s.offset + block * s.stride, host, s.size, s.allocation))
                host += s.size
        return out

    def copy(self, direction: str, moves: Sequence[Move], device: np.ndarray, host: np.ndarray) -> None:
        """What a finished job does, fragment by fragment, on any pair of arrays shaped like the rig's."""
        for d, h, size, _ in self.fragments(moves):
            if direction == "load":
                device[d : d + size] = host[h : h + size]
            else:
                host[h : h + size] = device[d : d + size]


def rows(moves: Sequence[Move]) -> np.ndarray:
    return np.array(moves, dtype=np.uint32).reshape(-1, 3)


def keys_for(moves: Sequence[Move], tag: int = 0) -> bytes:
    """32 bytes a move, different for every (tag, move)."""
    return b"".join(bytes((1, tag % 256, tag // 256 % 256, g)) + b.to_bytes(4, "little") * 7 for g, b, _ in moves)


def random_moves(rng: random.Random, rig: Rig, count: int) -> list[Move]:
    """Up to `count` moves; no slot and no block twice."""
    slots = {c: rng.sample(range(rig.slots), rig.slots) for c in set(rig.classes)}
    blocks = {g: rng.sample(range(spec.blocks), spec.blocks) for g, spec in enumerate(rig.groups)}
    moves = []
    for _ in range(count):
        g = rng.randrange(len(rig.groups))
        if blocks[g] and slots[rig.classes[g]]:
            moves.append((g, blocks[g].pop(), slots[rig.classes[g]].pop()))
    return moves
