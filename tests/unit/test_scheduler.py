# SPDX-License-Identifier: Apache-2.0
"""The scheduler side, case by case, inside vLLM's real scheduler; test_scheduler_model.py mixes them all."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from tests.support.fake_engine import FakeEngine
from tests.support.fake_setup import Setup, make_kv_cache_config, make_vllm_config
from tests.support.fake_transfers import VOCAB, Faults
from vllm_pega_connector import PegaConnector, guard
from vllm_pega_connector.config import PegaConfig, PolicyConfig
from vllm_pega_connector.messages import PegaHandshake, PegaMetadata, PegaWorkerMetadata
from vllm_pega_connector.scheduler_saves import max_held_blocks

BLOCK = Setup.block_size


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(n)]


def make_engine(**setup: Any) -> FakeEngine:
    return FakeEngine(Setup(**setup))


def warm_engine(prompt: list[int], **setup: Any) -> FakeEngine:
    """An engine whose host pool, and not its GPU, holds the full blocks of `prompt`."""
    engine = make_engine(**setup)
    engine.add(prompt, 1)
    engine.run()
    assert engine.reset()
    assert engine.pega.counts()["ready"] == len(prompt) // BLOCK
    return engine


def ask(engine: FakeEngine, request: Request, computed: int = 0) -> tuple[int | None, bool]:
    return engine.connector.get_num_new_matched_tokens(request, computed)


def freeze(engine: FakeEngine, frozen: bool = True) -> None:
    for rank in engine.ranks:
        rank.transfers.frozen = frozen


def finish(engine: FakeEngine) -> None:
    freeze(engine, False)
    engine.run()
    engine.check_idle()


def sent(engine: FakeEngine) -> list[PegaMetadata]:
    """What the connector will send from now on, step by step."""
    sends: list[PegaMetadata] = []
    build = engine.connector.build_connector_meta

    def noted(output: SchedulerOutput) -> PegaMetadata:
        sends.append(build(output))
        return sends[-1]

    engine.connector.build_connector_meta = noted  # type: ignore[method-assign]
    return sends


# --- loading ---


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_only_what_the_pool_lacks_is_computed(length: int, asynchronous: bool) -> None:
    engine = warm_engine(tokens(length), asynchronous=asynchronous)
    again = engine.add(tokens(length), 1)
    engine.run()
    loaded = length // BLOCK * BLOCK
    assert engine.seen["load done"] == (loaded > 0)
    # Of a prompt that is all there the last token is computed nonetheless: its logits are what is asked for.
    assert engine.runner.computed[again.request_id] == max(1, length - loaded)
    engine.check_idle()


def test_local_hit_then_host_hit() -> None:
    """Blocks 0 and 1 are on the GPU, block 2 only in the pool: one is loaded."""
    engine = warm_engine(tokens(48))
    engine.add(tokens(32), 1)
    engine.run()
    sends = sent(engine)
    request = engine.add(tokens(50), 1)
    engine.run()
    (load,) = [job for metadata in sends for job in metadata.jobs if job.direction == "load"]
    assert len(load.moves) == 12  # one row of three uint32
    assert engine.runner.computed[request.request_id] == 2
    engine.check_idle()


def test_a_repeated_question_pins_once() -> None:
    engine = warm_engine(tokens(40))
    request = engine.add(tokens(40), 1)
    assert [ask(engine, request) for _ in range(3)] == [(32, True)] * 3
    assert engine.pega.counts()["pinned"] == 2
    assert ask(engine, request, computed=16) == (16, True)  # another local hit: another answer, the old pins go
    assert engine.pega.counts()["pinned"] == 1
    assert ask(engine, request, computed=32) == (0, False)
    assert engine.pega.counts()["pinned"] == 0
    finish(engine)


def test_a_question_without_news_does_not_look_up_again() -> None:
    engine = warm_engine(tokens(32))
    index, lookups = engine.pega._shared.index, 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            nonlocal lookups
            lookups += name == "match_and_pin"
            return getattr(index, name)

    engine.pega._shared.index = Counting()
    miss = engine.add(tokens(40, seed=1), 1)
    assert [ask(engine, miss) for _ in range(5)] == [(0, False)] * 5
    assert lookups == 1
    engine.add(tokens(32, seed=2), 1, name="other")
    engine.run()  # saves: what was a miss may be a hit now
    late = engine.add(tokens(32, seed=1), 1)
    assert ask(engine, late) == (32, True)
    finish(engine)


def test_an_answer_thrown_away_holds_nothing() -> None:
    engine = warm_engine(tokens(40))
    request = engine.add(tokens(40), 1)
    assert ask(engine, request) == (32, True)
    nothing = engine.scheduler.kv_cache_manager.empty_kv_cache_blocks
    engine.connector.update_state_after_alloc(request, nothing, 0)
    assert engine.pega.counts()["pinned"] == engine.pega.counts()["jobs"] == 0
    engine.run()
    assert engine.seen["load done"] == 1  # asked again, it is answered again
    engine.check_idle()


def test_of_an_answer_taken_in_part_the_rest_is_let_go() -> None:
    engine = warm_engine(tokens(40))
    request = engine.add(tokens(40), 1)
    assert ask(engine, request) == (32, True)

    class Blocks:
        @staticmethod
        def get_block_ids() -> tuple[list[int], ...]:
            return ([5, 6],)

    engine.connector.update_state_after_alloc(request, Blocks(), 16)
    assert engine.pega.counts()["pinned"] == engine.pega.counts()["jobs"] == 1
    (job,) = engine.connector.build_connector_meta(SchedulerOutput.make_empty()).jobs
    assert (job.direction, job.request_id, len(job.moves)) == ("load", request.request_id, 12)
    engine.pega.update(PegaWorkerMetadata([((0, 0), job.job_id, "")]))
    assert engine.pega.counts()["pinned"] == 0
    finish(engine)


def test_beside_a_connector_that_is_taken_instead_we_only_save() -> None:
    engine = make_engine(rival=1.0)
    for _ in range(2):
        engine.add(tokens(40), 4)
        engine.run()
        assert engine.reset()
    assert engine.seen["save done"] > 0 and engine.seen["answers thrown away"] > 0
    assert engine.seen["load done"] == 0
    engine.check_idle()


def test_a_failed_load_is_not_offered_again_to_that_request() -> None:
    engine = warm_engine(tokens(40))
    engine.ranks[0].transfers.fail_next = "failed"
    request = engine.add(tokens(40), 3)
    engine.run()
    assert (engine.seen["load failed"], engine.seen["load done"]) == (1, 0)
    assert engine.runner.computed[request.request_id] >= 40
    assert dict(engine.pega.load_failures) == {"failed": 1}
    assert engine.reset()
    engine.add(tokens(40), 3)  # the pool is not to blame: the next request is offered it
    engine.run()
    assert engine.seen["load done"] == 1
    engine.check_idle()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_load_that_fails_on_one_rank_is_computed_on_all(failing: int) -> None:
    engine = warm_engine(tokens(40), host_slots=(8, 8))
    engine.ranks[failing].transfers.fail_next = "timeout"
    engine.ranks[1 - failing].transfers.frozen = True
    request = engine.add(tokens(40), 3)
    for _ in range(5):
        engine.step()
    # One rank is done, the other may still write: the request waits, and its blocks are its own.
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    freeze(engine, False)
    engine.run()
    assert engine.runner.computed[request.request_id] >= 40
    assert dict(engine.pega.load_failures) == {"timeout": 1}
    engine.check_idle()


def test_a_failed_load_that_fails_its_request_counts() -> None:
    engine = warm_engine(tokens(40), recompute=False)
    engine.ranks[0].transfers.fail_next = "failed"
    request = engine.add(tokens(40), 3)
    engine.run()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert dict(engine.pega.load_failures) == {"failed": 1}
    engine.check_idle()


def test_abort_while_loading_keeps_the_blocks_until_the_load_has_drained() -> None:
    engine = warm_engine(tokens(40))
    freeze(engine)
    request = engine.add(tokens(40), 3)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    held = engine.setup.gpu_blocks - 1 - engine.pool.get_num_free_blocks()
    assert held == 2
    engine.abort(request.request_id)
    for _ in range(3):
        engine.step()
    (job,) = engine.ranks[0].transfers.jobs.values()
    assert job.cancelled
    assert engine.setup.gpu_blocks - 1 - engine.pool.get_num_free_blocks() == held
    assert engine.pega.counts()["pinned"] == 2
    finish(engine)
    assert engine.seen["load cancelled"] == 1
    assert not engine.pega.load_failures  # the client went: nothing failed


def test_requests_that_do_not_read_caches_are_not_offered_any() -> None:
    engine = warm_engine(tokens(40))
    request = engine.add(tokens(40), 1, skip_cache=True)
    assert ask(engine, request) == (0, False)
    engine.run()
    assert engine.runner.computed[request.request_id] == 40
    engine.check_idle()


def test_salts_do_not_mix() -> None:
    engine = make_engine()
    engine.add(tokens(40), 1, salt="a")
    engine.run()
    assert engine.reset()
    assert ask(engine, engine.add(tokens(40), 1)) == (0, False)
    assert ask(engine, engine.add(tokens(40), 1, salt="b")) == (0, False)
    assert ask(engine, engine.add(tokens(40), 1, salt="a")) == (32, True)
    finish(engine)


def test_eagle_drops_the_last_block_of_a_hit() -> None:
    engine = warm_engine(tokens(49), drafts=2, eagle=True)
    request = engine.add(tokens(49), 4)
    assert ask(engine, request) == (32, True)
    assert engine.pega.counts()["pinned"] == 2
    engine.run()
    assert engine.seen["load done"] == 1
    one = engine.add(tokens(17), 1)
    assert ask(engine, one) == (0, False)  # a hit of one block is none
    assert engine.pega.counts()["pinned"] == 0
    finish(engine)


# --- saving ---


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("save_decode", "blocks"), [(True, 3), (False, 1)])
def test_save_decode(asynchronous: bool, save_decode: bool, blocks: int) -> None:
    """17 + 40 tokens; the last one's KV is never computed, so 56 positions: 3 full blocks."""
    engine = make_engine(asynchronous=asynchronous, settings=(("save_decode", save_decode),))
    engine.add(tokens(17), 40)
    engine.run()
    assert engine.pega.counts()["ready"] == blocks
    engine.check_idle()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_starting_request_hits_is_not_saved_before_it_is_computed(asynchronous: bool) -> None:
    engine = make_engine(asynchronous=asynchronous, budget=128)
    engine.add(tokens(40), 2)
    engine.add(tokens(40), 2)  # hits, in the same step, the blocks that the first is only about to compute
    sends = sent(engine)
    engine.step()
    assert engine.seen["steps"] == 1 and not sends[0].jobs
    engine.run()
    assert engine.seen["save done"] > 0
    engine.check_idle()


def test_a_key_is_ready_when_every_rank_has_it() -> None:
    engine = make_engine(host_slots=(8, 5))
    assert engine.pega.counts()["total"] == 5
    engine.ranks[1].transfers.frozen = True
    engine.add(tokens(32), 1)
    for _ in range(5):
        engine.step()
    assert engine.seen["save done"] == 1
    assert (engine.pega.counts()["reserved"], engine.pega.counts()["ready"]) == (2, 0)
    freeze(engine, False)
    engine.run()
    assert engine.pega.counts()["ready"] == 2
    engine.check_idle()


def test_a_save_that_fails_on_one_rank_is_dropped_on_all() -> None:
    engine = make_engine(host_slots=(8, 8))
    engine.ranks[1].transfers.fail_next = "failed"
    engine.add(tokens(32), 1)
    engine.run()
    assert (engine.seen["save done"], engine.seen["save failed"]) == (1, 1)
    assert engine.pega.counts()["ready"] == 0
    assert engine.pega.drops["save_failed"] == 2
    engine.check_idle()


def test_a_report_that_comes_twice_counts_once() -> None:
    engine = FakeEngine(Setup(host_slots=(8, 8)), faults=Faults(stall=0.0, report_twice=1.0))
    engine.add(tokens(40), 4)
    engine.run()
    engine.pega.update(PegaWorkerMetadata([((0, 0), 999, "")]))  # and one of a job that never was
    assert engine.pega.drops["duplicate_report"] == engine.seen["reported twice"] + 1 > 1
    assert engine.pega.counts()["ready"] == 2
    engine.check_idle()


def test_a_fault_at_the_end_of_one_save_holds_no_blocks_and_loses_no_other_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(budget=64)
    freeze(engine)
    for seed, policy in enumerate(("memcpy", "staged")):  # a job each: different policies are never one
        engine.add(tokens(32, seed), 1, params={"pega": {"save_policy": policy}})
    for _ in range(8):
        engine.step()
    jobs = list(engine.pega._shared.jobs)
    assert len(jobs) == 2 and engine.pega.busy()
    publish = engine.pega._shared.index.publish

    class Faulty:
        """The index, whose first publish fails."""

        failed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(index, name)

        def publish(self, *args: Any) -> None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("injected")
            publish(*args)

    index = engine.pega._shared.index
    monkeypatch.setattr(engine.pega._shared, "index", Faulty())
    monkeypatch.setattr(guard, "faults", 0)
    engine.pega.update(PegaWorkerMetadata([((0, 0), job, "") for job in jobs]))
    assert guard.faults == 1
    assert not engine.pega.busy()
    assert engine.pega.counts()["ready"] == 2  # the other's


def test_a_full_pool_drops_what_has_no_room() -> None:
    engine = make_engine(host_slots=(2,), budget=64)
    freeze(engine)
    engine.add(tokens(64), 3)
    for _ in range(3):
        engine.step()
    assert engine.pega.drops["pool_full"] == 2
    finish(engine)


def test_over_the_bound_saves_wait_while_their_request_runs() -> None:
    engine = make_engine(settings=(("max_pending_save_blocks", 1),))
    sends = sent(engine)
    engine.add(tokens(64), 15)
    engine.run()
    assert [len(job.moves) for metadata in sends for job in metadata.jobs] == [12] * 4  # one block, one row each
    assert engine.pega.counts()["ready"] == 4
    assert not engine.pega.drops
    engine.check_idle()


def test_over_the_bound_saves_wait_when_their_request_is_over() -> None:
    engine = make_engine(settings=(("max_pending_save_blocks", 1),))
    sends = sent(engine)
    freeze(engine)
    request = engine.add(tokens(64), 1)
    while not request.is_finished():
        engine.step()
    engine.step()
    assert engine.pega.counts()["held_blocks"] == 4 and engine.pega.busy()
    freeze(engine, False)
    engine.run()
    assert [len(job.moves) for metadata in sends for job in metadata.jobs] == [12] * 4
    assert engine.pega.counts()["ready"] == 4
    assert not engine.pega.drops
    engine.check_idle()


def test_what_waits_gives_way_to_running_requests() -> None:
    """Its blocks are given back, ends of prefixes first, before a running request is short of any."""
    engine = make_engine(settings=(("max_pending_save_blocks", 1),), gpu_blocks=12, budget=128)
    freeze(engine)
    request = engine.add(tokens(96), 1)
    while not request.is_finished():
        engine.step()
    assert engine.pega.counts()["held_blocks"] == 6
    engine.add(tokens(32, seed=1), 100)  # up to nine blocks of eleven
    for _ in range(100):
        engine.step()
    dropped = engine.pega.drops["too_many_pending"]
    assert 4 <= dropped <= 5 and engine.seen["preemptions"] == 0
    freeze(engine, False)
    engine.run()
    assert engine.pega.counts()["ready"] >= 6 - dropped
    engine.check_idle()


def test_a_reset_of_the_connector_forgets_what_waits() -> None:
    engine = make_engine(settings=(("max_pending_save_blocks", 1),))
    freeze(engine)
    request = engine.add(tokens(64), 1)
    while not request.is_finished():
        engine.step()
    assert engine.connector.reset_cache()
    assert engine.pega.counts()["held_blocks"] == 1
    finish(engine)
    assert engine.seen["save done"] == 1


def test_bound_on_held_blocks() -> None:
    """5 % of the GPU's blocks; of a small cache at least 64, but never more than a quarter."""
    auto = PegaConfig()
    assert [max_held_blocks(auto, n) for n in (100_000, 10_000, 1_000, 100, 3)] == [5_000, 500, 64, 25, 1]
    assert max_held_blocks(PegaConfig(max_pending_save_blocks=7), 100_000) == 7


def test_the_engine_steps_on_until_saves_have_drained() -> None:
    engine = make_engine()
    freeze(engine)
    request = engine.add(tokens(32), 1)
    while not request.is_finished():
        engine.step()
    for _ in range(3):
        engine.step()
    assert engine.has_work() and engine.connector.has_pending_push_work()
    assert engine.pool.get_num_free_blocks() == engine.setup.gpu_blocks - 1 - 2
    finish(engine)
    assert not engine.connector.has_pending_push_work()


def test_reset_while_a_save_is_in_flight_does_not_publish_it() -> None:
    engine = make_engine()
    freeze(engine)
    engine.add(tokens(40), 1)
    for _ in range(3):
        engine.step()
    assert engine.pega.counts()["reserved"] == 2
    assert not engine.reset(connector=True)  # vLLM's own part: two blocks are still held
    freeze(engine, False)
    engine.run()
    assert engine.seen["save done"] == 1
    assert engine.pega.counts()["ready"] == 0
    assert engine.reset()
    again = engine.add(tokens(40), 1)
    engine.run()
    assert engine.runner.computed[again.request_id] == 40
    engine.check_idle()


class WatchedIndex:
    """The index, and how often it was asked for what is worth saving."""

    def __init__(self, index: Any) -> None:
        self._index, self.asked = index, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def contains(self, group: int, keys: bytes) -> bytes:
        self.asked += 1
        return bytes(self._index.contains(group, keys))


@pytest.mark.parametrize("forgotten", [None, "while it loads", "once it is loaded"])
def test_what_was_loaded_is_not_looked_up_to_be_saved_unless_all_was_forgotten(forgotten: str | None) -> None:
    engine = warm_engine(tokens(40))
    index = engine.pega._shared.index = WatchedIndex(engine.pega._shared.index)
    freeze(engine)
    request = engine.add(tokens(40), 1)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    if forgotten == "while it loads":
        engine.connector.reset_cache()
    freeze(engine, False)
    while not engine.scheduler.finished_recving_kv_req_ids:
        engine.step()
    if forgotten == "once it is loaded":
        engine.connector.reset_cache()
    engine.run()
    assert engine.seen["load done"] == 1
    assert bool(index.asked) == bool(forgotten)
    assert engine.pega.counts()["ready"] == 2
    engine.check_idle()


def test_what_is_collected_before_and_after_a_reset_goes_in_two_jobs() -> None:
    """Else one block could stand twice in a job, and the old half would be stored with the new."""
    engine = make_engine(gpu_blocks=16)
    freeze(engine)
    first = engine.add(tokens(32), 1)
    other = engine.add(tokens(33), 8)
    sends = sent(engine)
    while not first.is_finished():
        engine.step()  # its blocks are collected, and wait for the next step
    assert other.num_computed_tokens == 33
    assert not engine.reset(connector=True)
    engine.step()  # the other request holds the same blocks, whose keys are unknown again
    saves = [job for metadata in sends for job in metadata.jobs]
    assert [len(job.moves) // 12 for job in saves] == [2, 2]
    assert saves[0].keys == saves[1].keys
    finish(engine)


def test_reset_lets_go_of_an_answer_not_yet_taken() -> None:
    engine = warm_engine(tokens(40))
    request = engine.add(tokens(40), 1)
    assert ask(engine, request) == (32, True)
    assert engine.reset(connector=True)
    assert engine.pega.counts()["pinned"] == 0
    assert ask(engine, request) == (0, False)
    finish(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preemption_while_a_save_reads_the_blocks(asynchronous: bool) -> None:
    """The save keeps its blocks; nobody else gets them until it has read them."""
    engine = make_engine(asynchronous=asynchronous, gpu_blocks=8)
    freeze(engine)
    engine.add(tokens(32), 30)
    while not engine.ranks[0].transfers.jobs:
        engine.step()
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.reset(running=True)
    engine.add(tokens(64, seed=1), 8)  # wants the blocks
    for _ in range(6):
        engine.step()
    assert engine.pega.counts()["held_blocks"] > 0
    finish(engine)
    assert engine.seen["preemptions"] > 0 and engine.seen["save done"] > 0


@pytest.mark.parametrize("v2_runner", [False, True])
def test_after_a_preemption_saving_goes_on_from_the_new_blocks(v2_runner: bool) -> None:
    engine = make_engine(v2_runner=v2_runner)
    engine.add(tokens(32), 40)
    engine.add(tokens(20, seed=1), 1)  # so that the blocks of the second life are others
    while engine.pega.counts()["ready"] < 3 or engine.in_transfer():
        engine.step()
    assert engine.reset(running=True, connector=True)
    engine.run()
    assert engine.seen["preemptions"] == 1
    assert engine.pega.counts()["ready"] == (32 + 40 - 1) // BLOCK
    engine.check_idle()


# --- who asks for what ---


@pytest.mark.parametrize(("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, False)])
def test_roles(role: str, saves: bool, loads: bool) -> None:
    engine = make_engine(role=role)
    for _ in range(2):
        engine.add(tokens(40), 4)
        engine.run()
        assert engine.reset()
    assert (engine.seen["save done"] > 0, engine.seen["load done"] > 0) == (saves, loads)
    engine.check_idle()


def test_a_request_may_keep_its_kv_out_of_the_pool() -> None:
    engine = make_engine()
    engine.add(tokens(40), 4, params={"pega": {"save": False}})
    engine.run()
    assert engine.pega.counts()["ready"] == 0
    engine.check_idle()


def test_a_request_s_policies_go_with_its_jobs() -> None:
    engine = make_engine()
    sends = sent(engine)
    engine.add(tokens(40), 1)
    engine.add(tokens(40, seed=1), 1, params={"pega": {"save_policy": "memcpy"}})
    engine.run()
    saves = {job.policy for metadata in sends for job in metadata.jobs}
    assert saves == {None, PolicyConfig(backend="memcpy")}
    assert engine.reset()
    sends.clear()
    engine.add(tokens(40), 1, params={"pega": {"load_policy": {"backend": "chunked", "chunk_bytes": 4096}}})
    engine.run()
    loads = [job.policy for metadata in sends for job in metadata.jobs]
    assert loads == [PolicyConfig(backend="chunked", chunk_bytes=4096)]
    engine.check_idle()


def test_malformed_parameters_are_counted_and_ignored() -> None:
    engine = make_engine()
    engine.add(tokens(40), 1, params={"pega": {"save": "perhaps", "load_policy": 7}})
    engine.run()
    assert engine.pega.drops["bad_request_params"] == 2
    assert engine.pega.counts()["ready"] == 2  # as if it had said nothing
    engine.check_idle()


# --- start ---


def test_before_the_workers_are_known_nothing_is_offered_or_saved() -> None:
    setup = Setup()
    connector = PegaConnector(make_vllm_config(setup), KVConnectorRole.SCHEDULER, make_kv_cache_config(setup))
    request = FakeEngine(setup).add(tokens(40), 1)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.build_connector_meta(SchedulerOutput.make_empty()) == PegaMetadata()
    assert connector.request_finished_all_groups(request, ([3, 4],)) == (False, None)
    assert connector.reset_cache() and not connector.has_pending_push_work()


def test_without_prefix_caching_the_connector_is_off() -> None:
    setup = Setup()
    config = make_vllm_config(setup)
    config.cache_config.enable_prefix_caching = False
    connector = PegaConnector(config, KVConnectorRole.SCHEDULER, make_kv_cache_config(setup))
    request = FakeEngine(setup).add(tokens(40), 1)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.build_connector_meta(SchedulerOutput.make_empty()) == PegaMetadata()
    assert connector.request_finished_all_groups(request, ([3, 4],)) == (False, None)
    assert connector.reset_cache() and not connector.has_pending_push_work()


def test_told_of_the_workers_again_the_pool_is_still_known() -> None:
    engine = warm_engine(tokens(40))
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): PegaHandshake((64,), (4096,), (0,))})
    assert engine.pega.counts()["ready"] == 2
    engine.add(tokens(40), 1)
    engine.run()
    assert engine.seen["load done"] == 1
    engine.check_idle()


@pytest.mark.parametrize("given", [{(0, 0): object()}, {}])
def test_beside_other_connectors_the_workers_tell_of_their_pools(
    given: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MultiConnector hands us another's handshake, or none."""
    setup = Setup(host_slots=(64, 32))
    config = make_vllm_config(setup)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 2)
    connector = PegaConnector(config, KVConnectorRole.SCHEDULER, make_kv_cache_config(setup))
    connector.set_xfer_handshake_metadata_pp_aware(given)
    request = FakeEngine(setup).add(tokens(40), 1)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    assert connector.build_connector_meta(SchedulerOutput.make_empty()) == PegaMetadata()
    assert connector._scheduler is not None
    ranks = [PegaWorkerMetadata([], {(0, r): PegaHandshake((n,), (4096,), (0,))}) for r, n in enumerate((64, 32))]
    connector._scheduler.update(ranks[0])
    assert "total" not in connector._scheduler.counts()  # one rank's pool is not known yet
    connector._scheduler.update(ranks[0].aggregate(ranks[1]))
    assert connector._scheduler.counts()["total"] == 32


def test_statistics_are_told_once() -> None:
    engine = make_engine()
    engine.add(tokens(40), 1)
    engine.run()  # vLLM takes the statistics after each step
    engine.pega.drops["pool_full"] += 2
    engine.pega.load_failures["timeout"] += 1
    stats = engine.pega.take_stats()
    assert stats is not None
    assert (stats.data["drops"], stats.data["failures"], stats.data["pool"]) == ({"pool_full": 2}, {"timeout": 1}, {})
    assert engine.pega.take_stats() is None
    assert engine.connector.reset_cache()
    stats = engine.pega.take_stats()
    assert stats is not None and stats.data["pool"]["free"] == 64 and not stats.data["drops"]
    engine.check_idle()
