# SPDX-License-Identifier: Apache-2.0
"""The host pool: two memfds that another process can map, and clear refusals."""

import fcntl
import mmap
import os
import struct

import pytest

from vllm_pega_connector import _native as native

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
SEAL_SHRINK_GROW = 0x2 | 0x4
TABLE_ENTRY = struct.Struct("<32sQIIQQ")  # key, generation, length, key bytes, lease, unused


def test_slots_lie_side_by_side_and_others_can_map_them():
    pool = native.HostPool([(1000, 5), (64, 3)])
    assert pool.nbytes == 8192 + 4096  # classes begin on pages
    assert [pool.slot_address(0, i) - pool.address for i in range(5)] == [0, 1000, 2000, 3000, 4000]
    assert pool.slot_address(1, 2) - pool.address == 8192 + 128
    view = pool.slot_view(0, 3)
    assert (len(view), view.readonly) == (1000, False)
    view[:4] = b"abcd"
    with mmap.mmap(pool.data_fd, pool.nbytes) as other:
        assert other[3000:3004] == b"abcd"
        other[8192:8194] = b"xy"
    assert bytes(pool.slot_view(1, 0)[:2]) == b"xy"


def test_the_table_has_one_line_a_slot():
    pool = native.HostPool([(16, 2), (32, 2)])
    with mmap.mmap(pool.table_fd, os.fstat(pool.table_fd).st_size) as table:
        assert TABLE_ENTRY.size == 64
        table[3 * 64 : 4 * 64] = TABLE_ENTRY.pack(b"k" * 20, 6, 32, 20, 0, 0)
    assert pool.slot_state(1, 1) == (6, b"k" * 20, 32)
    assert pool.slot_state(0, 0) == (0, b"", 0)


def test_nobody_can_shrink_it_under_our_copies():
    pool = native.HostPool([(4096, 2)])
    for fd in (pool.data_fd, pool.table_fd):
        assert fcntl.fcntl(fd, F_GET_SEALS) & SEAL_SHRINK_GROW == SEAL_SHRINK_GROW
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)


def test_views_outlive_close():
    pool = native.HostPool([(4096, 2)])
    view = pool.slot_view(0, 1)
    view[0] = 7
    pool.close()
    pool.close()
    assert view[0] == 7
    with pytest.raises(ValueError, match="closed"):
        _ = pool.address


def test_prefault_touches_all_of_it():
    pool = native.HostPool([(1 << 20, 8)], prefault=True)
    assert os.fstat(pool.data_fd).st_blocks * 512 >= 8 << 20
    lazy = native.HostPool([(1 << 20, 8)])
    assert os.fstat(lazy.data_fd).st_blocks == 0


@pytest.mark.parametrize("classes", [[], [(0, 4)], [(16, 0)], [(1 << 32, 1)], [(1 << 30, 1 << 30)]])
def test_sizes_that_cannot_be(classes):
    with pytest.raises(ValueError, match="slot class"):
        native.HostPool(classes)


def test_too_little_memory_says_what_to_change():
    with pytest.raises(MemoryError, match="lower host_pool_gib"):
        native.HostPool([(1 << 30, 1 << 13)])


@pytest.mark.parametrize(("slot_class", "slot"), [(1, 0), (0, 4)])
def test_slots_that_do_not_exist(slot_class, slot):
    pool = native.HostPool([(16, 4)])
    for ask in (pool.slot_address, pool.slot_view, pool.slot_state):
        with pytest.raises(ValueError, match="slot"):
            ask(slot_class, slot)
