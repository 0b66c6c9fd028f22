# SPDX-License-Identifier: Apache-2.0
"""The device that fails on purpose, and what the engine makes of it: every job ends once, and the next ones succeed."""

import os
import threading
import time

import numpy as np
import pytest

from vllm_pega_connector import _native as native

from .rig import Rig, keys_for, layers, rows

CHUNK = 4096
JOBS = 6


def fault(action: str, direction: str = "", nth: int = 0, p: float = 1.0, seed: int = 0, ms: float = 0.0):
    return (action, direction, nth, p, seed, ms)


@pytest.fixture
def rig() -> Rig:
    return Rig([layers(64, [CHUNK] * 2)], slots=64)


def started(rig: Rig, *faults, inflight: int = 2):
    device = native.FaultDevice(native.HostDevice(2), faults)
    p = native.Policy("memcpy", chunk_bytes=CHUNK, chunk_descriptors=1, inflight_chunks=inflight)
    return device, rig.engine(device, load_policy=p, save_policy=p)


def moves(job: int) -> list[tuple[int, int, int]]:
    return [(0, b, b) for b in range(4 * job, 4 * job + 4)]


def results(engine, count: int, timeout_s: float = 20.0) -> dict[int, native.JobResult]:
    """Polls as a worker does, once a step; nobody waits inside the engine."""
    ended: dict[int, native.JobResult] = {}
    deadline = time.monotonic() + timeout_s
    while len(ended) < count:
        assert time.monotonic() < deadline, f"{sorted(ended)} of {count}"
        for result in engine.poll():
            assert result.job_id not in ended
            ended[result.job_id] = result
        time.sleep(0.0005)
    return ended


def threads() -> set[str]:
    return {t for t in os.listdir("/proc/self/task") if name_of(t) == "pega-transfer"}


def name_of(thread: str) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm") as file:
            return file.read().strip()
    except OSError:  # it has just ended
        return ""


def new_threads(others: set[str], count: int) -> set[str]:
    """A thread names itself after it has started, and is listed until after it was joined."""
    deadline = time.monotonic() + 5
    while len(found := threads() - others) != count:
        assert time.monotonic() < deadline, found
    return found


@pytest.mark.parametrize("direction", ["load", "save"])
def test_a_chunk_that_fails_fails_its_job_alone(rig, direction):
    device, engine = started(rig, fault("fail", direction, nth=9))  # eight chunks a job: the second job's first
    for job in range(JOBS):
        device_before, host_before = rig.device.copy(), rig.host.copy()
        rig.copy(direction, moves(job), device_before, host_before)
        assert engine.submit(job, direction, rows(moves(job)), keys_for(moves(job)) if direction == "save" else b"")
        result = results(engine, 1)[job]
        if job == 1:
            assert (result.status, result.error) == ("failed", "injected fault")
            assert not (np.array_equal(rig.device, device_before) and np.array_equal(rig.host, host_before))
            assert all(rig.slot_state(0, slot)[1] == b"" for _, _, slot in moves(job))
        else:
            assert result.status == "done"
            assert np.array_equal(rig.device, device_before) and np.array_equal(rig.host, host_before)
    assert device.fired == 1 and engine.close()


def test_chunks_fail_by_chance_and_each_run_alike():
    ended = []
    for _ in range(2):
        rig = Rig([layers(64, [CHUNK] * 2)], slots=64)
        # One chunk at a time: with more, those already submitted when one fails would depend on the clock.
        device, engine = started(rig, fault("fail", "save", p=0.04, seed=3), inflight=1)
        for job in range(16):
            assert engine.submit(job, "save", rows(moves(job)), keys_for(moves(job)))
            assert engine.drain(20)
        ended.append([r.status for r in engine.poll()])
        assert device.fired >= ended[-1].count("failed") > 0 and ended[-1].count("done") > 0
        assert engine.close()
    assert ended[0] == ended[1]


def test_a_late_chunk_makes_its_job_late_and_no_other_direction(rig):
    _, engine = started(rig, fault("delay", "load", nth=2, ms=300))
    start = time.monotonic()
    assert engine.submit(1, "load", rows(moves(0)))
    assert engine.submit(2, "save", rows(moves(1)), keys_for(moves(1)))
    assert results(engine, 1)[2].status == "done"
    assert engine.pending == 1
    assert results(engine, 1)[1].status == "done"
    assert time.monotonic() - start >= 0.3
    assert engine.close()


def test_a_job_whose_chunk_is_too_late_times_out_when_the_chunk_has_landed(rig):
    _, engine = started(rig, fault("delay", "load", nth=1, ms=400))
    start = time.monotonic()
    assert engine.submit(1, "load", rows(moves(0)), timeout_s=0.1)
    assert engine.submit(2, "load", rows(moves(1)))
    ended = results(engine, 2)
    assert (ended[1].status, ended[2].status) == ("timeout", "done")
    assert time.monotonic() - start >= 0.4
    assert engine.close()


@pytest.mark.parametrize("direction", ["load", "save"])
def test_when_the_thread_dies_its_jobs_fail_and_the_next_thread_goes_on(rig, direction):
    others = threads()
    device, engine = started(rig, fault("kill", direction, nth=11))  # the first job's eight chunks, and three more

    def submit(jobs) -> None:
        for job in jobs:
            keys = keys_for(moves(job)) if direction == "save" else b""
            assert engine.submit(job, direction, rows(moves(job)), keys)

    submit([0])
    assert results(engine, 1)[0].status == "done"
    (first,) = new_threads(others, 1)
    submit(range(1, JOBS))
    ended = results(engine, JOBS - 1)
    failed = [job for job, r in ended.items() if r.status == "failed"]
    assert failed and {ended[job].error for job in failed} == {"the engine's thread ended: injected fault"}
    assert {r.status for r in ended.values()} <= {"failed", "done"}
    assert device.fired == 1 and engine.pending == 0
    (second,) = new_threads(others, 1)
    assert second != first
    submit(failed)  # again, and well
    assert {r.status for r in results(engine, len(failed)).values()} == {"done"}
    for job in range(JOBS):
        for i, (_, _, slot) in enumerate(moves(job)):
            generation, key, _ = rig.slot_state(0, slot)
            assert generation % 2 == 0
            assert key == (keys_for(moves(job))[32 * i : 32 * i + 32] if direction == "save" else b"")
    assert engine.close() and not new_threads(others, 0)


def test_the_thread_dies_at_every_chunk(rig):
    """As bad as it gets: no job succeeds, each ends; and then all do."""
    device, engine = started(rig, fault("kill"))
    for job in range(JOBS):
        assert engine.submit(job, "save", rows(moves(job)), keys_for(moves(job)))
    assert {r.status for r in results(engine, JOBS).values()} == {"failed"}
    device.arm([])
    for job in range(JOBS):
        assert engine.submit(job, "save", rows(moves(job)), keys_for(moves(job)))
    assert {r.status for r in results(engine, JOBS).values()} == {"done"}
    assert engine.close()


def test_who_waits_or_closes_while_the_thread_is_dead_does_not_wait_for_ever(rig):
    others = threads()
    device, engine = started(rig, fault("kill", nth=1), fault("kill", nth=20))
    assert engine.submit(1, "load", rows(moves(0)))
    assert engine.drain(10)
    assert [r.status for r in engine.poll()] == ["failed"]
    for job in range(JOBS):
        assert engine.submit(job, "load", rows(moves(job)))
    deadline = time.monotonic() + 20
    while device.fired < 2:
        assert time.monotonic() < deadline
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(10)
    assert not closing.is_alive() and not new_threads(others, 0)
    assert len(engine.poll()) == JOBS


def test_a_wrong_fault_is_refused():
    with pytest.raises(ValueError, match="'explode'; allowed: fail, delay, kill"):
        native.FaultDevice(native.HostDevice(1), [fault("explode")])
