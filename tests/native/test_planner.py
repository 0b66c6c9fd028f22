# SPDX-License-Identifier: Apache-2.0
"""Layouts refuse what cannot be; plans move exactly the bytes of the naive expansion."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_pega_connector import _native as native

from .rig import GroupSpec, Rig, SegmentSpec, block_outermost, layers, random_groups, random_moves, rows


def plan(rig: Rig, moves, max_range_bytes: int = 0) -> list[tuple[int, int, int]]:
    ranges = native.plan(rig.layouts, rig.pool, rig.classes, rows(moves), max_range_bytes)
    return [(d - rig.base, h - rig.pool.address, n) for d, h, n in ranges]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40), st.sampled_from([0, 0, 1, 16, 100, 5000]))
def test_a_plan_moves_the_bytes_of_the_naive_expansion(seed, count, max_range_bytes):
    rng = random.Random(seed)
    rig = Rig(random_groups(rng), slots=rng.randint(3, 40))
    moves = random_moves(rng, rig, count)
    ranges = plan(rig, moves, max_range_bytes)

    source = {}  # host byte -> device byte, and the allocation of the device byte
    allocation = {}
    for d, h, n, a in rig.fragments(moves):
        for i in range(n):
            source[h + i] = d + i
            allocation[d + i] = a
    planned = {}
    for d, h, n in ranges:
        assert n > 0
        assert max_range_bytes == 0 or n <= max_range_bytes
        assert len({allocation[d + i] for i in range(n)}) == 1, "a range crosses allocations"
        for i in range(n):
            assert h + i not in planned
            planned[h + i] = d + i
    assert planned == source
    assert [h for _, h, _ in ranges] == sorted(h for _, h, _ in ranges)
    if max_range_bytes == 0:
        for (d, h, n), (d2, h2, _) in itertools.pairwise(ranges):
            touching = d + n == d2 and h + n == h2
            assert not touching or allocation[d + n - 1] != allocation[d2], "neighbours were not merged"


def test_neighbouring_blocks_in_neighbouring_slots_are_one_range():
    rig = Rig([block_outermost(8, [100, 60])], slots=8)
    assert plan(rig, [(0, b, b + 1) for b in (2, 0, 1)]) == [(64, 160, 480)]


def test_touching_allocations_stay_apart():
    rig = Rig([block_outermost(8, [100, 60], allocations=2)], slots=8)
    assert plan(rig, [(0, 0, 0)]) == [(64, 0, 100), (164, 100, 60)]


def test_many_slots_sort_by_every_digit():
    rig = Rig([layers(1, [1])], slots=5000)
    wide = Rig([layers(5000, [1])], slots=5000)
    slots = np.random.default_rng(1).permutation(5000)
    ranges = plan(wide, [(0, b, int(s)) for b, s in enumerate(slots)])
    assert sum(n for _, _, n in ranges) == 5000
    assert [h for _, h, _ in ranges] == sorted(h for _, h, _ in ranges)
    assert plan(rig, [(0, 0, 4999)]) == [(64, 4999, 1)]


@pytest.mark.parametrize(
    ("segments", "blocks", "complaint"),
    [
        ([], 4, "at least one segment"),
        ([(64, 16, 0, 1)], 4, "bytes is 0"),
        ([(0, 16, 16, 1)], 4, "no address"),
        ([(64, 15, 16, 1)], 4, "block_stride 15 is below"),
        ([(64, 16, 16, 1)], 0, "num_blocks is 0"),
        ([(64, 1 << 55, 16, 1)], 4, "beyond the address space"),
        ([(64, 32, 16, 1), (79, 32, 16, 1)], 4, "shares bytes"),
        ([(64, 32, 16, 1), (64 + 33, 32, 16, 2)], 4, "shares bytes"),
        ([(64, 32, 16, 1), (64, 32, 16, 1)], 1, "shares bytes"),
        ([(64, 100, 10, 1), (80, 42, 10, 1)], 9, "shares bytes"),
    ],
)
def test_layouts_that_cannot_be(segments, blocks, complaint):
    with pytest.raises(ValueError, match=complaint):
        native.GroupLayout([native.Segment(*s) for s in segments], blocks)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from([8, 12, 20, 24, 40]), st.integers(1, 12)), min_size=1, max_size=3
    ),
    st.integers(1, 6),
)
def test_overlap_is_found_exactly(segments, blocks):
    footprint = [base + b * stride + i for base, stride, size in segments for b in range(blocks) for i in range(size)]
    overlaps = len(set(footprint)) != len(footprint)
    try:
        native.GroupLayout([native.Segment(*s, 1) for s in segments], blocks)
    except ValueError:
        assert overlaps
    else:
        assert not overlaps


def test_a_block_must_fit_its_slot():
    rig = Rig([layers(4, [100])], slots=4)
    small = native.HostPool([(99, 4)])
    with pytest.raises(ValueError, match="100 bytes, a slot of its class 0 only 99"):
        native.plan(rig.layouts, small, [0], b"")
    with pytest.raises(ValueError, match="the pool has 1"):
        native.plan(rig.layouts, small, [1], b"")
    with pytest.raises(ValueError, match="one class per group"):
        native.plan(rig.layouts, small, [0, 0], b"")


def test_moves_are_uint32_rows():
    rig = Rig([layers(4, [16])], slots=4)
    good = rows([(0, 1, 2)])
    expected = plan(rig, [(0, 1, 2)])
    for moves in (good.tobytes(), memoryview(good)):
        assert native.plan(rig.layouts, rig.pool, rig.classes, moves) == native.plan(
            rig.layouts, rig.pool, rig.classes, good
        )
    assert expected == [(80, 32, 16)]
    for moves in (good.astype(np.int32), good.astype(np.uint64), good.reshape(3), good.tobytes()[:-1]):
        with pytest.raises(ValueError, match="uint32 array"):
            native.plan(rig.layouts, rig.pool, rig.classes, moves)
    with pytest.raises((ValueError, BufferError)):
        native.plan(rig.layouts, rig.pool, rig.classes, np.asfortranarray(rows([(0, 1, 2), (0, 2, 1)])))


def test_a_single_segment_group_reports_itself():
    spec = GroupSpec((SegmentSpec(64, 100, 60, 1),), 7)
    layout = Rig([spec], slots=1).layouts[0]
    assert (layout.slot_bytes, layout.num_blocks, layout.segments_per_block) == (60, 7, 1)
