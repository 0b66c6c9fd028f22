# SPDX-License-Identifier: Apache-2.0
"""Requests that wait hold the GPU blocks that they load into: with few blocks none may wait for another for ever."""

from __future__ import annotations

from vllm.v1.request import RequestStatus

from tests.support.fake_engine import FakeEngine
from tests.unit.test_scheduler import finish, freeze, tokens, warm_engine

LOADING = RequestStatus.WAITING_FOR_REMOTE_KVS


def half_loaded() -> FakeEngine:
    """Of 15 blocks 8 are of "loading"; "urgent" needs 10, and goes first where there is room."""
    engine = warm_engine(tokens(129), gpu_blocks=16, priority=True)
    freeze(engine)
    loading = engine.add(tokens(129), 2, name="loading", priority=2)
    engine.step()
    engine.add(tokens(160, seed=1), 2, name="urgent", priority=0)
    engine.step()
    assert loading.status == LOADING
    return engine


def test_what_has_loaded_starts_although_a_more_urgent_request_finds_no_room() -> None:
    engine = half_loaded()
    freeze(engine, False)
    engine.run()
    assert engine.seen["load done"] == 1
    finish(engine)


def test_what_has_loaded_and_goes_away_keeps_nobody_waiting() -> None:
    engine = half_loaded()
    freeze(engine, False)
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.step()
    engine.abort("loading")
    finish(engine)


def test_loads_that_failed_keep_nobody_waiting() -> None:
    """Both ask again, and hold nothing: neither may give way to the other."""
    engine = warm_engine(tokens(64), gpu_blocks=16, max_seqs=2)
    freeze(engine)
    for i in range(2):
        engine.ranks[0].transfers.fail_next = "failed"
        engine.add(tokens(64), 2, name=f"r{i}")
        engine.step()
    freeze(engine, False)
    finish(engine)
    assert engine.seen["load failed"] == 2


def test_no_two_loads_leave_each_other_without_room_for_drafts() -> None:
    """Of 9 blocks each loads 4 and takes 2 more when it starts: one for the rest of its prompt, one for drafts."""
    first, second = tokens(80), tokens(80, seed=1)
    engine = warm_engine(first, gpu_blocks=10, drafts=3, eagle=True)
    engine.add(second, 1)
    engine.run()
    assert engine.reset()
    freeze(engine)
    requests = [engine.add(prompt, 2) for prompt in (first, second)]
    engine.step()
    assert [r.status == LOADING for r in requests] == [True, False]
    freeze(engine, False)
    engine.run()
    assert engine.seen["load done"] == 2
    finish(engine)
