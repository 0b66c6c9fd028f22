# SPDX-License-Identifier: Apache-2.0
"""The transfer engine on a real GPU: blocks come back, limits hold, and compute events are waited for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.support.cuda_engine import Blocks
from vllm_pega_connector import _native

BACKENDS = ["memcpy", "kernel", "chunked", "staged"]
SEGMENTS, COUNT = 36, 128
SAVED = [(3 * i % 64, i) for i in range(64)]
LOADED = [(64 + (5 * i % 64), i) for i in range(64)]
SPIN = r"""
extern "C" __global__ void spin_then_set(unsigned long long ns, unsigned char* p, unsigned char value, int n) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
  for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = value;
}
"""


def open_blocks(cubin: bytes, size: int, seed: int) -> Blocks:
    import cupy

    memory = cupy.asarray(np.random.default_rng(seed).integers(0, 256, SEGMENTS * COUNT * size, np.uint8))
    blocks = Blocks(
        _native.CudaDevice(0, cubin),
        memory.data.ptr,
        memory.get,
        lambda data: memory.set(data),
        SEGMENTS,
        COUNT,
        size,
    )
    blocks.memory = memory  # type: ignore[attr-defined]
    return blocks


@pytest.mark.parametrize("size", [64, 512, 4096, 20_000, 65536])
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_come_back_within_the_limits(cubin, backend, size):
    blocks = open_blocks(cubin, size, size)
    before = blocks.read()
    policy = _native.Policy(backend, 5, 500, 1 << 20, 2)
    for direction, moves in (("save", SAVED), ("load", LOADED)):
        job = blocks.run(direction, moves, policy)
        assert (job.status, job.bytes, job.backend) == ("done", 64 * SEGMENTS * size, backend)
        seen = blocks.device.stats(direction)
        assert seen["chunks"][backend] == job.chunks and seen["max_grid"] <= 5
        assert 0 < seen["peak_outstanding_bytes"] <= 2 << 20 and seen["outstanding_bytes"] == 0
    after = blocks.read()
    for block, slot in SAVED:
        np.testing.assert_array_equal(blocks.slot(slot), blocks.block(before, block))
    source = {slot: block for block, slot in SAVED}
    for block, slot in LOADED:
        np.testing.assert_array_equal(blocks.block(after, block), blocks.block(before, source[slot]))
    assert blocks.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_save_waits_for_what_the_compute_stream_still_writes(cubin, backend):
    import cupy

    blocks = open_blocks(cubin, 4096, 1)
    stream = cupy.cuda.Stream(non_blocking=True)
    kernel = cupy.RawKernel(SPIN, "spin_then_set")
    blocks.run("save", [(9, 9)], _native.Policy(backend, 2, 500, 1 << 20, 2))  # everything is loaded by now
    begin = time.perf_counter()
    kernel((1,), (256,), (np.uint64(20_000_000), blocks.memory, np.uint8(77), blocks.memory.size), stream=stream)
    event = blocks.engine.record_event(stream.ptr)
    job = blocks.run("save", [(block, block) for block in range(8)], _native.Policy(backend, 2, 500, 1 << 20, 2), event)
    blocks.engine.release_event(event)
    assert job.status == "done" and job.queue_s > 0.01 and time.perf_counter() - begin > 0.02
    for block in range(8):
        assert (blocks.slot(block) == 77).all()
    assert blocks.close()


def test_two_engines_with_different_policies_keep_apart(cubin):
    one, other = open_blocks(cubin, 4096, 1), open_blocks(cubin, 4096, 2)
    kernel, staged = (
        _native.Policy("kernel", 3, 1 << 16, 256 << 20, 1),
        _native.Policy("staged", 6, 1 << 16, 1 << 20, 2),
    )
    for blocks, load, save in ((one, kernel, staged), (other, staged, kernel)):
        before = blocks.read()
        assert blocks.run("save", SAVED, save).status == blocks.run("load", SAVED, load).status == "done"
        np.testing.assert_array_equal(blocks.read(), before)
    assert [one.device.stats(d)["max_grid"] for d in ("load", "save")] == [3, 6]
    assert [other.device.stats(d)["max_grid"] for d in ("load", "save")] == [6, 3]
    assert one.device.stats("load")["chunks"]["staged"] == other.device.stats("save")["chunks"]["staged"] == 0
    assert one.close() and other.close()
