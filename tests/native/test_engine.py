# SPDX-License-Identifier: Apache-2.0
"""The engine on a host device: every backend, both directions, its refusals and its ends."""

import gc
import mmap
import random
import threading
import time

import numpy as np
import pytest

from vllm_pega_connector import _native as native

from .rig import BACKENDS, PROFILE, Rig, block_outermost, keys_for, layers, random_groups, random_moves, rows


def policy(backend: str, **fields) -> native.Policy:
    return native.Policy(backend, **fields)


def result_of(engine: native.TransferEngine, timeout_s: float = 20.0) -> native.JobResult:
    assert engine.drain(timeout_s)
    (result,) = engine.poll()
    return result


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direction", ["load", "save"])
def test_only_the_bytes_of_the_job_move(direction, backend, threaded):
    rng = random.Random(f"{direction} {backend} {threaded}")
    for round_ in range(8):
        rig = Rig(random_groups(rng), slots=20, seed=round_)
        limits = {"chunk_bytes": rng.choice((100, 1500, 1 << 20)), "chunk_descriptors": rng.choice((1, 7, 1000))}
        p = policy(backend, max_grid_blocks=rng.choice((1, 2, 8)), inflight_chunks=rng.randint(1, 4), **limits)
        engine = rig.engine(native.HostDevice(3), load_policy=p, save_policy=p, threaded=threaded)
        for job in range(4):
            moves = random_moves(rng, rig, rng.randint(1, 20))
            device, host = rig.device.copy(), rig.host.copy()
            rig.copy(direction, moves, device, host)
            assert engine.submit(job, direction, rows(moves), keys_for(moves) if direction == "save" else b"")
            result = result_of(engine)
            assert (result.status, result.error) == ("done", "")
            assert (result.job_id, result.direction, result.backend) == (job, direction, backend)
            assert result.bytes == sum(f[2] for f in rig.fragments(moves))
            assert 0 < result.peak_outstanding_bytes <= limits["chunk_bytes"] * 4
            assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)
            for i, (g, _, slot) in enumerate(moves):
                generation, key, length = rig.slot_state(g, slot)
                assert generation % 2 == 0
                if direction == "save":
                    assert key == keys_for(moves)[32 * i : 32 * i + 32]
                    assert length == rig.groups[g].slot_bytes
                    assert generation > 0
                else:
                    assert (generation, key) == (0, b"")
        assert engine.close()


def test_many_jobs_both_ways_at_once():
    rig = Rig([layers(64, [4096] * 8)], slots=64)
    p = policy("chunked", chunk_bytes=16384, max_grid_blocks=2, inflight_chunks=2)
    engine = rig.engine(native.HostDevice(2), load_policy=p, save_policy=p)
    saves = [[(0, b, b) for b in range(i, i + 4)] for i in range(0, 32, 4)]
    loads = [[(0, b, b) for b in range(i, i + 4)] for i in range(32, 64, 4)]
    device, host = rig.device.copy(), rig.host.copy()
    for i, (save, load) in enumerate(zip(saves, loads, strict=True)):
        rig.copy("save", save, device, host)
        rig.copy("load", load, device, host)
        assert engine.submit(2 * i, "save", rows(save), keys_for(save))
        assert engine.submit(2 * i + 1, "load", rows(load))
    assert engine.drain(20)
    results = engine.poll()
    assert sorted(r.job_id for r in results) == list(range(16))
    assert {r.status for r in results} == {"done"}
    assert max(r.peak_outstanding_bytes for r in results) <= 2 * 16384
    assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)
    assert engine.pending == 0 and engine.poll() == []
    assert engine.close()


def test_a_small_job_does_not_wait_behind_a_large_one():
    rig = Rig([layers(256, [65536])], slots=256)
    p = policy("memcpy", chunk_bytes=65536, inflight_chunks=1)
    engine = rig.engine(native.HostDevice(1), load_policy=p, threaded=False)
    engine.submit(1, "load", rows([(0, b, b) for b in range(255)]))
    engine.submit(2, "load", rows([(0, 255, 255)]))
    ended = []
    while len(ended) < 2:
        engine.step()
        ended += [r.job_id for r in engine.poll()]
    assert ended == [2, 1]
    assert engine.close()


@pytest.mark.parametrize("late", [0.0, 0.004])
def test_a_spread_transfer_submits_its_chunks_evenly_and_catches_up(late):
    rig = Rig([layers(64, [1024])], slots=64)
    sim = native.SimDevice(1, max_delay_steps=0)
    engine = rig.engine(sim, threaded=False, manual_clock=True)
    spread = policy("kernel", chunk_bytes=2048, inflight_chunks=4, spread_us=10_000)
    event = engine.record_event()
    engine.submit(1, "load", rows([(0, b, b) for b in range(20)]), event=event, policy=spread)
    while event in sim.unready_events:
        engine.step(1.0)  # the spread begins when the transfer could
    engine.step(late)
    for chunks in range(1 + round(late * 1000), 10):  # one a millisecond, the first at once
        for _ in range(8):
            engine.step(0.0)
        assert sim.chunks == chunks
        engine.step(0.001)
    for _ in range(8):
        engine.step()
    (result,) = engine.poll()
    assert (result.status, result.chunks) == ("done", 10)
    assert 0.009 - late - 1e-9 <= result.transfer_s <= 0.010
    assert engine.close()


def test_what_waited_in_the_queue_counts_as_spread():
    """Else jobs that come faster than their spread would pile up for ever."""
    rig = Rig([layers(64, [1024])], slots=64)
    sim = native.SimDevice(1, max_delay_steps=0)
    engine = rig.engine(sim, threaded=False, manual_clock=True)
    spread = policy("kernel", chunk_bytes=1024, inflight_chunks=4, spread_us=20_000)
    ended = []
    for job in range(40):  # one a millisecond: five times as many as are active at once in 20 ms
        first = job * 10 % 60
        engine.submit(job, "save", rows([(0, b, b) for b in range(first, first + 1)]), keys_for([(0, first, first)]),
                      policy=spread)  # fmt: skip
        for _ in range(4):
            engine.step(0.00025)
        ended += engine.poll()
    for _ in range(100):
        engine.step(0.001)
        ended += engine.poll()
    assert len(ended) == 40 and max(r.queue_s + r.transfer_s for r in ended) < 0.03
    assert engine.close()


@pytest.mark.parametrize("direction", ["load", "save"])
def test_small_first_and_last_chunks_only_where_nothing_else_fills_the_pipeline(direction):
    rig = Rig([layers(256, [65536])], slots=256)
    staged = policy("staged", chunk_bytes=1 << 20, inflight_chunks=4)

    def chunks(jobs: int) -> list[int]:
        engine = rig.engine(native.HostDevice(1), threaded=False)
        for job in range(jobs):
            moves = [(0, b, b) for b in range(32 * job, 32 * job + 32)]
            keys = keys_for(moves) if direction == "save" else b""
            assert engine.submit(job, direction, rows(moves), keys, policy=staged)
        results = []
        while len(results) < jobs:
            engine.step()
            results += engine.poll()
        assert {(r.status, r.bytes) for r in results} == {("done", 2 << 20)} and engine.close()
        return [r.chunks for r in sorted(results, key=lambda r: r.job_id)]

    # 256, 256, 512 and 1024 KiB; a load ends with 512, 256 and 256.
    assert chunks(1) == [4 if direction == "save" else 6]
    beside = chunks(8)
    assert beside[3:5] == [2, 2] and sum(beside) <= 8 * 2 + 6, beside


def test_jobs_of_different_size_share_a_lane_within_the_tightest_bound():
    rig = Rig([layers(64, [1024])], slots=64)
    sim = native.SimDevice(1, max_delay_steps=6)
    engine = rig.engine(sim, threaded=False)
    engine.submit(1, "load", rows([(0, b, b) for b in range(40)]), policy=policy("kernel", chunk_bytes=16384))
    small = policy("staged", chunk_bytes=1024, inflight_chunks=2)
    engine.submit(2, "load", rows([(0, b, b) for b in range(40, 60)]), policy=small)
    results = []
    of_the_small_job = rig.base + 64 + 40 * 1024
    while len(results) < 2:
        engine.step()
        if any(device >= of_the_small_job for device, _, _ in sim.touching()):
            assert sim.outstanding_bytes[0] <= 2048, "the large job's chunks count against the small one's bound"
        results += engine.poll()
    by_id = {r.job_id: r for r in results}
    assert by_id[1].status == by_id[2].status == "done"
    assert by_id[2].peak_outstanding_bytes <= 2048
    assert by_id[1].chunks >= 3 and by_id[2].chunks == 20
    assert sim.violations == []


def test_two_instances_keep_their_policies_apart():
    policies = (
        {"load": policy("kernel", max_grid_blocks=4, chunk_bytes=1 << 20, inflight_chunks=1),
         "save": policy("memcpy", chunk_bytes=1024, inflight_chunks=1)},
        {"load": policy("staged", chunk_bytes=2048, inflight_chunks=2),
         "save": policy("chunked", max_grid_blocks=3, chunk_bytes=4096, inflight_chunks=1)},
    )  # fmt: skip
    rigs = [Rig([layers(64, [1024])], slots=64, seed=seed) for seed in (1, 2)]
    sims = [native.SimDevice(seed, max_delay_steps=4) for seed in (1, 2)]
    engines = [
        rig.engine(sim, load_policy=p["load"], save_policy=p["save"], threaded=False)
        for rig, sim, p in zip(rigs, sims, policies, strict=True)
    ]
    expected = [(rig.device.copy(), rig.host.copy()) for rig in rigs]
    loads, saves = [(0, b, 63 - b) for b in range(0, 64, 2)], [(0, b, 63 - b) for b in range(1, 64, 2)]
    for rig, engine, memory in zip(rigs, engines, expected, strict=True):
        for job, (direction, moves) in enumerate((("load", loads), ("save", saves))):
            rig.copy(direction, moves, *memory)
            assert engine.submit(job, direction, rows(moves), keys_for(moves) if direction == "save" else b"")
    found: list[dict] = [{}, {}]
    while any(len(results) < 2 for results in found):
        for engine, results in zip(engines, found, strict=True):
            engine.step()
            results |= {r.direction: r for r in engine.poll()}
    for results, p, rig, (device, host), sim in zip(found, policies, rigs, expected, sims, strict=True):
        assert {d: (r.status, r.backend) for d, r in results.items()} == {d: ("done", p[d].backend) for d in p}
        assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)
        for most, d in zip(sim.max_outstanding_bytes, ("load", "save"), strict=True):
            assert most <= p[d].chunk_bytes * p[d].inflight_chunks
        assert sim.violations == []
    chunks = [{d: r.chunks for d, r in results.items()} for results in found]
    assert chunks == [{"load": 1, "save": 32}, {"load": 16, "save": 8}]


def test_an_empty_job_ends_too():
    rig = Rig([layers(4, [64])], slots=4)
    engine = rig.engine(native.HostDevice())
    engine.submit(5, "save", b"")
    result = result_of(engine)
    assert (result.job_id, result.status, result.bytes, result.chunks) == (5, "done", 0, 0)
    assert engine.close()


def test_a_load_that_names_its_keys_reads_nothing_else():
    rig = Rig([layers(8, [64])], slots=8)
    engine = rig.engine(native.HostDevice())
    save = [(0, b, b) for b in range(4)]
    engine.submit(1, "save", rows(save), keys_for(save))
    assert result_of(engine).status == "done"
    load = [(0, b + 4, b) for b in range(4)]
    engine.submit(2, "load", rows(load), keys_for(save))
    assert result_of(engine).status == "done"
    before = rig.device.copy()
    engine.submit(3, "load", rows(load), keys_for(save, tag=1))
    result = result_of(engine)
    assert result.status == "failed" and "does not hold the key" in result.error
    assert np.array_equal(rig.device, before)
    assert engine.close()


def test_a_slot_written_under_a_load_fails_it():
    rig = Rig([layers(8, [64])], slots=8)
    sim = native.SimDevice(3, max_delay_steps=5)
    engine = rig.engine(sim, threaded=False)
    save = [(0, 1, 1)]
    engine.submit(1, "save", rows(save), keys_for(save))
    while not (ended := engine.poll()):
        engine.step()
    assert ended[0].status == "done"
    engine.submit(2, "load", rows([(0, 2, 1)]), keys_for(save))
    while sim.chunks < 2:
        engine.step()
    with mmap.mmap(rig.pool.table_fd, 8 * 64) as table:  # another process, the agent, takes the slot over
        generation = int.from_bytes(table[64 + 32 : 64 + 40], "little")
        table[64 + 32 : 64 + 40] = (generation + 1).to_bytes(8, "little")
    while not (ended := engine.poll()):
        engine.step()
    assert ended[0].status == "failed" and "while it was being loaded" in ended[0].error


@pytest.mark.parametrize(
    ("direction", "moves", "complaint"),
    [
        ("load", [(2, 0, 0)], "group 2 is out of range"),
        ("load", [(0, 8, 0)], "block 8 is out of range; there are 8"),
        ("save", [(0, 0, 9)], "slot 9 is out of range; there are 9"),
        ("save", [(0, 0, 1), (0, 1, 1)], "move 1 .* names a slot that an earlier"),
        ("load", [(0, 0, 1), (0, 1, 1)], "names a slot that"),
        ("load", [(0, 1, 1), (0, 1, 2)], "names a device block that"),
        ("load", [(0, 1, 1), (1, 1, 1)], "names a slot that"),  # two groups, one class
        ("both", [(0, 1, 1)], "direction 'both' is unknown; allowed: load, save"),
    ],
)
def test_bad_moves_are_refused_at_once(direction, moves, complaint):
    rig = Rig([layers(8, [64]), layers(8, [64], base=4096)], slots=9)
    engine = rig.engine(native.HostDevice())
    with pytest.raises(ValueError, match=complaint):
        engine.submit(1, direction, rows(moves))
    assert engine.pending == 0
    good = [(0, 1, 1), (0, 1, 2)] if direction == "save" else [(0, 1, 1), (1, 1, 2)]
    assert engine.submit(1, "save" if direction == "save" else "load", rows(good)), "the refusal left traces"
    assert result_of(engine).status == "done"
    assert engine.close()


def test_bad_arguments_are_refused_at_once():
    rig = Rig([layers(8, [64])], slots=8)
    engine = rig.engine(native.SimDevice(1), threaded=False)
    ok = rows([(0, 1, 1), (0, 2, 2)])
    for keys in (b"abc", b"k" * 66):
        with pytest.raises(ValueError, match="keys have"):
            engine.submit(1, "save", ok, keys)
    for timeout in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            engine.submit(1, "save", ok, timeout_s=timeout)
    with pytest.raises(ValueError, match="objective 'fast'"):
        engine.submit(1, "save", ok, objective="fast")
    with pytest.raises(ValueError, match="event 77"):
        engine.submit(1, "save", ok, event=77)
    with pytest.raises(ValueError, match="event 77"):
        engine.release_event(77)
    event = engine.record_event()
    engine.release_event(event)
    with pytest.raises(ValueError, match="released already"):
        engine.release_event(event)
    assert engine.submit(1, "save", ok)
    with pytest.raises(ValueError, match="job id 1"):
        engine.submit(1, "load", rows([(0, 3, 3)]))
    assert engine.cancel(99) is False
    assert engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(2, "save", ok)
    with pytest.raises(ValueError, match="backend 'dma'"):
        native.Policy("dma")
    with pytest.raises(ValueError, match="queue_limit"):
        rig.engine(native.HostDevice(), queue_limit=0)
    with pytest.raises(ValueError, match="manual_clock"):
        rig.engine(native.HostDevice(), manual_clock=True)
    with pytest.raises(RuntimeError, match="threaded=False"):
        rig.engine(native.HostDevice()).step()


def test_jobs_that_disagree_about_a_slot_cannot_both_be_taken():
    rig = Rig([layers(8, [64])], slots=8)
    engine = rig.engine(native.SimDevice(1), threaded=False)
    assert engine.submit(1, "save", rows([(0, 0, 0)]))
    assert engine.submit(2, "load", rows([(0, 1, 1)]))
    assert engine.submit(3, "load", rows([(0, 2, 1)])), "readers may share"
    for direction, slot, complaint in (("load", 0, "written by a save"), ("save", 1, "read by a load")):
        with pytest.raises(ValueError, match=complaint):
            engine.submit(4, direction, rows([(0, 5, 3), (0, 4, slot)]))
    assert engine.drain(5)
    with pytest.raises(ValueError, match="poll"):
        engine.submit(4, "load", rows([(0, 4, 0)]))
    assert len(engine.poll()) == 3
    assert engine.submit(4, "load", rows([(0, 4, 0)]))
    assert engine.submit(5, "save", rows([(0, 4, 1)]))
    assert engine.close()


def test_a_full_queue_takes_nothing():
    rig = Rig([layers(8, [64])], slots=8)
    engine = rig.engine(native.SimDevice(1), threaded=False, queue_limit=2)
    assert [engine.submit(i, "load", rows([(0, i, i)])) for i in range(3)] == [True, True, False]
    assert engine.pending == 2
    assert engine.drain(5)
    assert engine.submit(3, "load", rows([(0, 3, 3)])), "ended jobs leave room, polled or not"
    assert engine.close()


def test_jobs_wait_for_their_event_and_share_it():
    rig = Rig([layers(8, [64])], slots=8)
    for seed in range(20):
        sim = native.SimDevice(seed, max_delay_steps=9)
        engine = rig.engine(sim, threaded=False)
        event = engine.record_event()
        engine.submit(1, "save", rows([(0, 1, 1)]), event=event)
        engine.submit(2, "load", rows([(0, 2, 2)]), event=event)
        engine.release_event(event)
        while sim.unready_events:
            assert sim.chunks == 0
            engine.step()
        assert engine.drain(5)
        assert {r.status for r in engine.poll()} == {"done"}
        assert sim.live_events == 0 and sim.violations == []


def test_events_end_with_the_engine():
    rig = Rig([layers(8, [64])], slots=8)
    sim = native.SimDevice(1)
    engine = rig.engine(sim, threaded=False)
    event = engine.record_event()
    assert sim.live_events == 1
    assert engine.close()
    assert sim.live_events == 0
    engine.release_event(event)  # too late, harmless


def test_time_runs_from_submission():
    rig = Rig([layers(8, [64])], slots=8)
    sim = native.SimDevice(4, max_delay_steps=1000)
    engine = rig.engine(sim, threaded=False, manual_clock=True)
    engine.submit(1, "save", rows([(0, 1, 1)]), keys_for([(0, 1, 1)]), timeout_s=1.0)
    engine.submit(2, "save", rows([(0, 2, 2)]), keys_for([(0, 2, 2)]), timeout_s=1e9)
    engine.step(0.8)  # plans
    engine.step(0.1)
    assert sim.chunks == 2 and engine.poll() == []
    engine.step(0.2)
    assert engine.poll() == [], "ended while a copy could still write"
    ended = []
    while len(ended) < 2:
        engine.step()
        ended += engine.poll()
    assert {(r.job_id, r.status) for r in ended} == {(1, "timeout"), (2, "done")}
    generation, key, _ = rig.slot_state(0, 1)
    assert generation % 2 == 0 and generation > 0 and key == b""
    assert rig.slot_state(0, 2)[1] == keys_for([(0, 2, 2)])
    assert engine.close()


def test_a_broken_direction_fails_alone():
    rig = Rig([layers(8, [64])], slots=8)
    sim = native.SimDevice(1, break_rate=1.0)
    engine = rig.engine(sim, threaded=False)
    engine.submit(1, "save", rows([(0, 1, 1)]))
    assert result_of(engine).error == "simulated: this direction broke"
    engine.submit(2, "save", rows([(0, 1, 1)]))
    engine.submit(3, "load", rows([(0, 2, 2)]))
    assert engine.drain(5)
    by_id = {r.job_id: r for r in engine.poll()}
    assert by_id[2].chunks == 0 and "takes no more saves" in by_id[2].error
    assert by_id[3].chunks == 1, "the other lane was still tried"
    assert sim.violations == []


def test_a_device_serves_one_engine_at_a_time():
    rig = Rig([layers(8, [64])], slots=8)
    device = native.HostDevice()
    engine = rig.engine(device)
    with pytest.raises(ValueError, match="already serves an engine"):
        rig.engine(device)
    assert engine.close()
    del engine
    gc.collect()
    assert rig.engine(device).close()


def test_close_cancels_and_reports_what_is_still_in_flight():
    rig = Rig([layers(8, [64])], slots=8)
    sim = native.SimDevice(4, max_delay_steps=10**6)
    engine = rig.engine(sim, threaded=False)
    engine.submit(1, "save", rows([(0, 1, 1)]))
    engine.step()  # plans
    engine.step()
    assert engine.close(timeout_s=0.0) is False
    assert engine.poll() == []
    assert len(sim.touching()) == 1
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit(2, "save", rows([(0, 2, 2)]))
    assert engine.close(timeout_s=30)
    assert [r.status for r in engine.poll()] == ["cancelled"]


def test_dropping_everything_mid_flight_is_safe():
    for _ in range(10):
        rig = Rig([layers(64, [1 << 16])], slots=64)
        p = policy("kernel", chunk_bytes=1 << 16, inflight_chunks=4)
        engine = rig.engine(native.HostDevice(2), save_policy=p)
        assert engine.submit(1, "save", rows([(0, b, b) for b in range(64)]))
        rig.pool.close()
        del engine  # cancels and drains: the pool lives until then
        gc.collect()
        assert rig.device.size > 0


def test_threads_may_share_an_engine():
    rig = Rig([block_outermost(64, [512] * 4)], slots=64)
    engine = rig.engine(native.HostDevice(2))
    ended: list[native.JobResult] = []
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for i in range(50):
                block = first + i % 8
                while True:  # the slot is busy until somebody polled its last job
                    try:
                        engine.submit(first * 1000 + i, "save", rows([(0, block, block)]), b"k" * 32)
                        break
                    except ValueError:
                        ended.extend(engine.poll())
                if i % 3 == 0:
                    engine.cancel(first * 1000 + i)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(8 * t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert engine.drain(20)
    ended += engine.poll()
    assert errors == []
    assert len({r.job_id for r in ended}) == len(ended) == 200
    assert {r.status for r in ended} <= {"done", "cancelled"}
    assert sum(r.status == "done" for r in ended) > 100
    assert engine.close()


def test_drain_gives_the_gil_away():
    rig = Rig([layers(8, [64])], slots=8)
    sim = native.SimDevice(11, max_delay_steps=20_000_000)  # drawn: most of that, a second or two
    engine = rig.engine(sim, threaded=False)
    engine.submit(1, "load", rows([(0, 1, 1)]))
    ticks: list[None] = []
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [ticks.append(time.sleep(0.001)) for _ in iter(stop.is_set, True)])
    thread.start()
    drained = engine.drain(0.1)
    stop.set()
    thread.join()
    assert drained is False
    assert len(ticks) > 10
    assert engine.pending == 1
    assert engine.close(timeout_s=60)


def test_profiles_ignore_what_they_do_not_know():
    profile = native.DeviceProfile(
        {
            "name": "some",
            "provenance": {"gpu": "?"},
            "directions": {"load": {"contiguous_gib_per_s": 10, "curve": [{"backend": "kernel", "range_bytes": 4096}]}},
            "defaults": {"kernel": {"max_grid_blocks": 3, "color": "red"}},
        }
    )
    assert profile.name == "some"
    decision = native.decide(native.TransferShape("load", 10, 40960), profile, "tail", native.Policy("kernel"))
    assert (decision.backend, decision.max_grid_blocks) == ("kernel", 3)
    for bad in ({"directions": {"up": {}}}, {"defaults": {"dma": {}}}, {"name": 3}):
        with pytest.raises(ValueError, match=r"up|dma|name"):
            native.DeviceProfile(bad)
    assert PROFILE.name == "test"
