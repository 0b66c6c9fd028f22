# SPDX-License-Identifier: Apache-2.0
"""CudaDevice on a fake driver: bytes, bounds, and every driver call failing once or for good."""

from __future__ import annotations

import mmap
import threading
import time

import numpy as np
import pytest

from tests.support import chunk_cases
from vllm_pega_connector import _native

BACKENDS = ["memcpy", "kernel", "chunked", "staged"]
DIRECTIONS = ["load", "save"]
TRANSIENT, STICKY = 2, 700  # out of memory: the call failed; illegal address: the context has ended
# The fake's time passes in its calls, so the driver is asked at once when no word has come.
SMALL = {"stage_bytes": 1 << 20, "inflight_chunks": 2, "copies_per_slice": 2, "slice_pause_us": 0, "ask_driver_us": 0}


class Machine:
    """A fake driver, a CudaDevice on it, and both sides' memory filled with noise."""

    def __init__(self, seed: int, device_bytes: int, host_bytes: int, fake=None, **options):
        self.rng = np.random.default_rng(seed)
        self.fake = fake or _native.FakeDriver(seed)
        self.device_base = self.fake.allocate(device_bytes)
        self.device_view = self.fake.view(self.device_base, device_bytes)
        self._map = mmap.mmap(-1, host_bytes)
        self.host_view = np.frombuffer(self._map, np.uint8)
        self.host_base = self.host_view.ctypes.data
        self.host_view[:] = self.rng.integers(0, 256, host_bytes, np.uint8)
        self.device_view[:] = self.rng.integers(0, 256, device_bytes, np.uint8)
        self.device = _native.CudaDevice(0, b"cubin", driver=self.fake, **{**SMALL, **options})
        self.device.register_host(self.host_base, host_bytes)


def check_copy(machine: Machine, case: chunk_cases.Case, direction: str, backend: str, grid: int = 2) -> None:
    device, host = case.expected(direction, machine.device_view, machine.host_view)
    machine.device.copy(direction, backend, case.rows(machine.device_base, machine.host_base), grid)
    np.testing.assert_array_equal(machine.device_view, device)
    np.testing.assert_array_equal(machine.host_view, host)
    assert machine.fake.violations == []


@pytest.mark.parametrize("writes_words", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_bytes(direction, backend, seed, writes_words):
    case = chunk_cases.mixed_sizes(np.random.default_rng(seed), 50, 200_000)
    fake = _native.FakeDriver(seed, writes_words=writes_words)
    machine = Machine(seed, case.device_bytes, case.host_bytes, fake)
    for _ in range(2):  # words go on counting
        check_copy(machine, case, direction, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_for_a_chunk_costs_no_driver_call(backend):
    """The GPU says by a word of memory that it is done; the driver's lock is left to those who launch the model."""
    case = chunk_cases.adjacent_on_host(np.random.default_rng(1), np.full(2, 8192), runs=1, align=0)
    fake = _native.FakeDriver(1, eagerness=0)  # nothing happens until settle()
    machine = Machine(1, case.device_bytes, case.host_bytes, fake, ask_driver_us=60_000_000)
    expected, _ = case.expected("load", machine.device_view, machine.host_view)
    copying = threading.Thread(
        target=machine.device.copy, args=("load", backend, case.rows(machine.device_base, machine.host_base))
    )
    before = fake.calls
    copying.start()
    while machine.device.stats("load")["chunks"][backend] == 0 or fake.calls == before:
        time.sleep(0.001)
    time.sleep(0.05)
    calls = fake.calls
    time.sleep(0.05)
    assert fake.calls == calls and copying.is_alive()
    fake.settle()
    copying.join(10)
    assert not copying.is_alive() and fake.calls == calls
    np.testing.assert_array_equal(machine.device_view, expected)


@pytest.mark.parametrize("align", [0, 4, 7])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_staged_moves_one_copy_per_run(direction, align):
    sizes = np.full(64, 8192 - (align > 0))
    case = chunk_cases.adjacent_on_host(np.random.default_rng(1), sizes, runs=4, align=align)
    machine = Machine(1, case.device_bytes, case.host_bytes)
    check_copy(machine, case, direction, "staged", grid=3)
    seen = machine.device.stats(direction)
    assert (seen["copies"], seen["launches"], seen["max_grid"], seen["unstaged_chunks"]) == (4, 1, 3, 0)
    assert seen["max_copies_per_slice"] == SMALL["copies_per_slice"]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_staged_falls_back_where_host_memory_is_scattered_or_the_stage_too_small(direction):
    rng = np.random.default_rng(2)
    scattered = chunk_cases.mixed_sizes(rng, 50, 5000)
    large = chunk_cases.adjacent_on_host(rng, np.full(40, 40_000), runs=1, align=0)
    for case in (scattered, large):
        machine = Machine(2, case.device_bytes, case.host_bytes)
        check_copy(machine, case, direction, "staged", grid=1)
        seen = machine.device.stats(direction)
        assert (seen["unstaged_chunks"], seen["copies"], seen["max_grid"]) == (1, 0, 1)


def test_a_grid_is_never_exceeded_and_never_larger_than_useful():
    case = chunk_cases.mixed_sizes(np.random.default_rng(3), 100, 1000)
    machine = Machine(3, case.device_bytes, case.host_bytes)
    for grid, seen in ((1, 1), (5, 5), (1000, 13)):  # 100 pieces, eight warps a block
        check_copy(machine, case, "load", "kernel", grid)
        assert machine.device.stats("load")["max_grid"] == seen


def test_large_ranges_are_split_over_warps():
    case = chunk_cases.adjacent_on_host(np.random.default_rng(4), np.array([1 << 20]), runs=1, align=0)
    machine = Machine(4, case.device_bytes, case.host_bytes)
    check_copy(machine, case, "save", "kernel", grid=4)
    assert machine.device.stats("save")["max_grid"] == 4  # not one: 32 warps share the one range


@pytest.mark.parametrize(
    ("rows", "backend", "message"),
    [
        (np.zeros((0, 3), np.uint64), "kernel", "0 ranges"),
        (np.array([[1, 4096, 16]], np.uint64), "memcpy", "not registered"),
        (np.array([[1, 4096, 1 << 40]], np.uint64), "memcpy", "allowed are"),
    ],
)
def test_impossible_chunks_fail_with_a_reason_and_touch_nothing(rows, backend, message):
    machine = Machine(5, 4096, 4096)
    device, host = machine.device_view.copy(), machine.host_view.copy()
    with pytest.raises(RuntimeError, match=message):
        machine.device.copy("load", backend, rows)
    machine.fake.settle()
    np.testing.assert_array_equal(machine.device_view, device)
    np.testing.assert_array_equal(machine.host_view, host)
    assert machine.device.healthy("load") and machine.device.stats("load")["outstanding_bytes"] == 0


def test_registration_errors_explain_and_leave_nothing():
    machine = Machine(6, 4096, 1 << 16)
    live = machine.fake.live
    with pytest.raises(ValueError, match="overlaps"):
        machine.device.register_host(machine.host_base + 4096, 4096)
    with pytest.raises(ValueError, match="page-aligned"):
        machine.device.register_host(12345, 4096)
    with pytest.raises(ValueError, match="nothing is registered"):
        machine.device.unregister_host(4096)
    machine.device.unregister_host(machine.host_base)
    assert machine.fake.live == live - 1
    for nth in (2, 3):  # the registration, and the address of it that the GPU sees
        machine.fake.fail(nth, TRANSIENT)
        with pytest.raises(RuntimeError, match="cuMemHost"):
            machine.device.register_host(machine.host_base, 1 << 16)
        assert machine.fake.live == live - 1
    machine.device.register_host(machine.host_base, 1 << 16)
    assert machine.fake.live == live


@pytest.mark.parametrize("result", [TRANSIENT, STICKY])
def test_construction_that_fails_at_any_call_leaves_nothing(result):
    fake = _native.FakeDriver(7)
    _native.CudaDevice(0, b"cubin", driver=fake, **SMALL)
    calls = fake.calls
    assert calls > 256 and fake.live == 0
    for nth in [*range(1, 60), *range(60, calls, 41)]:  # most of them create equal events
        fake = _native.FakeDriver(7)
        fake.fail(nth, result)
        try:
            device = _native.CudaDevice(0, b"cubin", driver=fake, **SMALL)
            del device  # the failed call was one that cleans up
        except RuntimeError as error:
            assert fake.last_failed in str(error)
        assert fake.last_failed and fake.live == 0, (nth, fake.last_failed)


@pytest.mark.parametrize("result", [TRANSIENT, STICKY])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_copy_that_fails_at_any_call_ends_once_and_late_work_touches_nothing(direction, backend, result):
    rng = np.random.default_rng(8)
    if backend == "staged":
        case = chunk_cases.adjacent_on_host(rng, np.full(40, 20_000), runs=7, align=0)
    else:
        case = chunk_cases.mixed_sizes(rng, 12, 100_000)
    outcomes = {"done": 0, "failed": 0}
    for nth in range(1, 1000):
        machine = Machine(8 + nth, case.device_bytes, case.host_bytes)
        expected = case.expected(direction, machine.device_view, machine.host_view)
        rows = case.rows(machine.device_base, machine.host_base)
        machine.fake.fail(nth, result)
        try:
            machine.device.copy(direction, backend, rows, 2)
            outcomes["done"] += 1
            np.testing.assert_array_equal(machine.device_view, expected[0])
            np.testing.assert_array_equal(machine.host_view, expected[1])
        except RuntimeError as error:
            outcomes["failed"] += 1
            assert machine.fake.last_failed in str(error)
        reached = machine.fake.last_failed != ""
        device, host = machine.device_view.copy(), machine.host_view.copy()
        machine.fake.settle()
        np.testing.assert_array_equal(machine.device_view, device)
        np.testing.assert_array_equal(machine.host_view, host)
        assert machine.fake.violations == []
        assert machine.device.healthy(direction) == (not reached or result == TRANSIENT)
        if reached and result == TRANSIENT:  # the next copy works
            check_copy(machine, case, direction, backend)
        fake = machine.fake
        del machine
        assert fake.live == 0
        if not reached:
            break
    else:
        pytest.fail("a copy never ran without failure")
    assert outcomes["done"] > 0 and outcomes["failed"] > 3, outcomes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_driver_that_never_works_again_is_given_up(backend):
    """Every call fails, with an error that a context survives: no hang, and a device that was in use is lost."""
    case = chunk_cases.mixed_sizes(np.random.default_rng(9), 12, 100_000)
    lost = 0
    for nth in range(1, 20):
        machine = Machine(9, case.device_bytes, case.host_bytes, fake=_native.FakeDriver(9, eagerness=0))
        machine.fake.fail_from(nth, TRANSIENT)
        with pytest.raises(RuntimeError):
            machine.device.copy("load", backend, case.rows(machine.device_base, machine.host_base))
        assert machine.device.healthy("load") == machine.device.healthy("save")
        lost += not machine.device.healthy("load")
        device, host = machine.device_view.copy(), machine.host_view.copy()
        machine.fake.settle()
        np.testing.assert_array_equal(machine.device_view, device)
        np.testing.assert_array_equal(machine.host_view, host)
        assert machine.device.stats("load")["outstanding_bytes"] == 0 and machine.fake.violations == []
        if lost == 4:
            return
    pytest.fail("the device was never given up")
