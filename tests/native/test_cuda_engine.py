# SPDX-License-Identifier: Apache-2.0
"""The transfer engine on CudaDevice over a fake driver: any driver call of a whole save and a whole load may fail."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.cuda_engine import Blocks
from vllm_pega_connector import _native

TRANSIENT, STICKY = 2, 700
SEGMENTS, COUNT, SIZE = 3, 12, 24576
SAVED = [(block, block) for block in range(6)]
LOADED = [(6 + slot, slot) for slot in range(6)]


def policy(backend: str) -> _native.Policy:
    return _native.Policy(backend, 2, 20, 160_000, 2)


def machine(seed: int, eagerness: int = 6, count: int = COUNT, size: int = SIZE) -> tuple[_native.FakeDriver, Blocks]:
    fake = _native.FakeDriver(seed, eagerness)
    nbytes = Blocks.bytes_for(SEGMENTS, count, size)
    base = fake.allocate(nbytes)
    view = fake.view(base, nbytes)
    view[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    options = {"stage_bytes": 1 << 20, "copies_per_slice": 4, "slice_pause_us": 0, "ask_driver_us": 0}
    device = _native.CudaDevice(0, b"cubin", driver=fake, **options)
    return fake, Blocks(device, base, view.copy, lambda data: np.copyto(view, data), SEGMENTS, count, size)


@pytest.mark.parametrize("backend", ["memcpy", "kernel", "chunked", "staged"])
def test_blocks_come_back(backend):
    fake, blocks = machine(1)
    before = blocks.read()
    save = blocks.run("save", SAVED, policy(backend))
    assert (save.status, save.bytes, save.backend) == (
        "done",
        len(SAVED) * SEGMENTS * SIZE,
        backend,
    ) and save.chunks > 2
    for block, slot in SAVED:
        np.testing.assert_array_equal(blocks.slot(slot), blocks.block(before, block))
        generation, key, length = blocks.pool.slot_state(0, slot)
        assert (generation % 2, key, length) == (0, slot.to_bytes(8, "little"), SEGMENTS * SIZE)
    load = blocks.run("load", LOADED, policy(backend))
    assert load.status == "done"
    after = blocks.read()
    for block, slot in LOADED:
        np.testing.assert_array_equal(blocks.block(after, block), blocks.block(before, slot))
        np.testing.assert_array_equal(blocks.block(after, slot), blocks.block(before, slot))
    for direction, result in (("save", save), ("load", load)):
        seen = blocks.device.stats(direction)
        assert seen["chunks"][backend] == result.chunks and seen["max_grid"] <= 2
        assert seen["peak_outstanding_bytes"] == result.peak_outstanding_bytes <= 320_000
        assert seen["outstanding_bytes"] == 0
    assert blocks.close() and fake.violations == []


@pytest.mark.parametrize("size", [512, 1000, 4096])  # of one piece each: listed while the job waits
@pytest.mark.parametrize("backend", ["kernel", "chunked", "staged"])
@pytest.mark.parametrize("slots", ["in a row", "with a gap", "apart"])
def test_small_fragments_come_back(size, backend, slots):
    fake, blocks = machine(4, count=128, size=size)
    to = {"in a row": range(48), "with a gap": [*range(3, 20), *range(25, 56)], "apart": range(0, 96, 2)}[slots]
    saved = list(zip(np.random.default_rng(size).permutation(64)[:48].tolist(), to, strict=True))
    loaded = [(64 + block, slot) for block, slot in saved]
    chunks = _native.Policy(backend, 2, 1000, 40 * SEGMENTS * size // 4, 2)
    before = blocks.read()
    save = blocks.run("save", saved, chunks)
    assert save.status == "done" and save.backend == backend and (save.chunks > 3 or backend == "kernel")
    for block, slot in saved:
        np.testing.assert_array_equal(blocks.slot(slot), blocks.block(before, block))
    assert blocks.run("load", loaded, chunks).status == "done"
    after = blocks.read()
    np.testing.assert_array_equal(after.reshape(blocks.shape)[:, :64], before.reshape(blocks.shape)[:, :64])
    for block, slot in loaded:
        np.testing.assert_array_equal(blocks.block(after, block), blocks.slot(slot))
    if slots == "in a row" and backend == "staged":
        assert all(blocks.device.stats(d)["unstaged_chunks"] == 0 for d in ("save", "load"))
    assert blocks.close() and fake.violations == []


def test_a_copy_engine_looks_around_after_every_chunk():
    """It stays with a stream that has its next copy ready, and a decode step's copies then wait for all of them."""
    most = {"staged": [], "memcpy": []}
    for seed, backend in itertools.product(range(20), most):
        fake, blocks = machine(seed, eagerness=2)
        chunks = _native.Policy(backend, 2, 1000, SEGMENTS * SIZE, 4)
        for direction, moves in (("save", SAVED), ("load", LOADED)):
            result = blocks.run(direction, moves, chunks)
            assert (result.status, result.backend, result.chunks) == ("done", backend, len(moves))
            assert blocks.device.stats(direction)["copies"] == len(moves) * (1 if backend == "staged" else SEGMENTS)
        most[backend].append(fake.most_copies_ready)
        assert blocks.close() and fake.violations == []
    assert max(most["staged"]) == 1 and 1 < max(most["memcpy"]) <= SEGMENTS, most


def test_no_more_than_two_slices_of_copies_are_queued():
    fake, blocks = machine(2, eagerness=0)  # nothing runs by itself
    rows = np.array([(0, block, slot) for block, slot in SAVED], np.uint32)
    assert blocks.engine.submit(1, "save", rows, policy=_native.Policy("memcpy", 1, 1000, 1 << 20, 1))
    for _ in range(100):
        blocks.engine.step()
    assert blocks.device.stats("save")["copies"] == 2 * 4
    fake.settle()
    for _ in range(100):
        blocks.engine.step()
    assert blocks.device.stats("save")["copies"] == 4 * 4
    while not blocks.engine.poll():
        fake.settle()
        blocks.engine.step()
    assert blocks.device.stats("save")["copies"] == len(SAVED) * SEGMENTS
    assert blocks.device.stats("save")["max_copies_per_slice"] == 4
    assert blocks.close()


@pytest.mark.parametrize("result", [TRANSIENT, STICKY])
@pytest.mark.parametrize("backend", ["memcpy", "kernel", "staged"])
def test_any_call_may_fail(backend, result):
    ended = {"done": 0, "failed": 0}
    nth = 0
    while True:
        nth += 1
        fake, blocks = machine(nth)
        before = blocks.read()
        fake.fail(nth, result)
        try:
            event = blocks.engine.record_event(0)
        except RuntimeError as error:
            assert "CUDA" in str(error) or "FAKE" in str(error)
            event = 0
        save = blocks.run("save", SAVED, policy(backend), event)
        if event:
            blocks.engine.release_event(event)
        for block, slot in SAVED:
            generation, key, _ = blocks.pool.slot_state(0, slot)
            assert generation % 2 == 0
            if key:  # published: it must be the block's bytes
                np.testing.assert_array_equal(blocks.slot(slot), blocks.block(before, block))
        assert (blocks.pool.slot_state(0, 0)[1] != b"") == (save.status == "done")
        jobs = [save]
        while jobs[-1].status == "done" and len(jobs) < 3:  # twice: how many calls one load makes depends on time
            jobs.append(blocks.run("load", LOADED, policy(backend)))
            if jobs[-1].status == "done":
                for block, slot in LOADED:
                    np.testing.assert_array_equal(blocks.block(blocks.read(), block), blocks.block(before, slot))
        for job in jobs:
            ended[job.status] += 1
            assert job.status == "done" or fake.last_failed != ""
        still, slots = blocks.read(), [blocks.slot(slot).copy() for _, slot in SAVED]
        fake.settle()  # what is late must touch nothing
        np.testing.assert_array_equal(blocks.read(), still)
        for (_, slot), bytes_then in zip(SAVED, slots, strict=True):
            np.testing.assert_array_equal(blocks.slot(slot), bytes_then)
        np.testing.assert_array_equal(
            still.reshape(blocks.shape)[:, : len(SAVED)], before.reshape(blocks.shape)[:, : len(SAVED)]
        )
        reached = fake.last_failed != ""
        if reached and result == TRANSIENT:  # and the device still works
            assert blocks.run("save", SAVED, policy(backend)).status == "done"
        assert blocks.device.healthy("load") == blocks.device.healthy("save") == (not reached or result == TRANSIENT)
        assert blocks.close() and fake.violations == []
        del blocks
        assert fake.live == 0
        if not reached:
            break
    assert nth > 20 and ended["done"] > 10 and ended["failed"] > 10, (nth, ended)
