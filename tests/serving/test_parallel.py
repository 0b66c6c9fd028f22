# SPDX-License-Identifier: Apache-2.0
"""Two tensor-parallel ranks of real vLLM on CPU, each in a process of its own: what one of them does alone."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, Ask, prompt, references, same
from tests.serving.faulty import ParallelEngine, rank_state

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

RANKS = {(0, 0), (0, 1)}
LENGTHS = (33, 100, 300)
PROMPT_BLOCKS = sum(n // BLOCK for n in LENGTHS)


def asks(seed: int) -> list[Ask]:
    return [Ask(prompt(100 * seed + n, n), 10) for n in LENGTHS]


@pytest.fixture(scope="module")
def engine() -> Iterator[ParallelEngine]:
    references([ask for seed in range(8) for ask in asks(seed)])
    made = ParallelEngine(
        {"host_pool_gib": 0.02},
        "delay job direction=load rank=1 ms=400 nth=1",
        tensor_parallel_size=2,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=256,
        disable_log_stats=False,
    )
    yield made
    made.close()


def metric(engine: ParallelEngine, name: str, **labels: str) -> float:
    found = [m for m in engine.llm.get_metrics() if m.name == f"vllm:pega_{name}"]
    return sum(m.value for m in found if labels.items() <= m.labels.items())


def test_a_slow_rank(engine: ParallelEngine) -> None:
    """The first load, by what the environment told rank 1: nothing is done before both have done it."""
    states = engine.each_rank(rank_state)
    assert [s["rules"] for s in states] == [[], ["delay"]] and {s["rank"] for s in states} == RANKS
    assert len({os.getpid(), *(s["pid"] for s in states)}) == 3
    ask = asks(0)[2]
    same(engine.run([ask]))
    engine.drop_gpu_cache()
    waited = 0
    with engine.reports() as seen:
        request = engine.add(ask)
        while not engine.requests[request].finished:
            engine.step()
            if len(seen.reports) == 1:  # one rank has done it
                waited += 1
                assert not engine.requests[request].tokens and not seen.ended
                assert engine.counts()["pinned"] == len(ask.prompt) // BLOCK
    same([engine.requests[request]])
    assert waited > 10 and seen.hit_tokens == len(ask.prompt) // BLOCK * BLOCK
    (job,) = seen.jobs("load")
    first, second = seen.of(job)
    assert (first.rank, second.rank) == ((0, 0), (0, 1)) and second.at - first.at > 0.3
    assert seen.ended[job] >= second.at


def test_cold_then_warm(engine: ParallelEngine) -> None:
    blocks = {d: metric(engine, "transfer_blocks", direction=d) for d in ("load", "save")}
    transfers = metric(engine, "transfers", direction="load")
    with engine.reports() as cold:
        same(engine.run(asks(1)))
        engine.finish()
    assert cold.jobs("save") and not cold.jobs("load")
    stored = engine.counts()["ready"]
    assert stored >= PROMPT_BLOCKS
    engine.drop_gpu_cache()
    with engine.reports() as warm:
        same(engine.run(asks(1)))
    assert len(warm.jobs("load")) == len(LENGTHS) and warm.hit_tokens == PROMPT_BLOCKS * BLOCK
    for job in warm.ended:
        assert {r.rank for r in warm.of(job)} == RANKS and len(warm.of(job)) == 2
    engine.finish()
    # Blocks are counted once, transfers on every rank.
    assert metric(engine, "transfer_blocks", direction="save") - blocks["save"] == stored
    assert metric(engine, "transfer_blocks", direction="load") - blocks["load"] == PROMPT_BLOCKS
    assert metric(engine, "transfers", direction="load") - transfers == 2 * len(LENGTHS)


@pytest.mark.parametrize(
    "text",
    [
        "fail job direction=load rank=1",
        "fail chunk direction=load rank=0",
        "kill engine direction=load rank=1 nth=1",
    ],
)
def test_loads_that_fail_on_one_rank_are_computed(engine: ParallelEngine, text: str) -> None:
    same(engine.run(asks(2)))
    engine.drop_gpu_cache()
    bad = (0, int(text.split("rank=")[1][0]))
    with engine.armed(text), engine.reports() as seen:
        same(engine.run(asks(2)))
        engine.assert_idle()
    failed = seen.jobs("load", well=False)
    assert failed and all(r.rank == bad for r in seen.reports if r.error)
    assert all({r.rank for r in seen.of(job)} == RANKS for job in failed)
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(2)))
    assert len(seen.jobs("load")) == len(LENGTHS) and seen.hit_tokens == PROMPT_BLOCKS * BLOCK


@pytest.mark.parametrize("text", ["fail job direction=save rank=1", "fail chunk direction=save rank=0"])
def test_saves_that_fail_on_one_rank_are_not_published(engine: ParallelEngine, text: str) -> None:
    before = engine.connector._scheduler.drops["save_failed"]
    with engine.armed(text), engine.reports() as seen:
        same(engine.run(asks(3)))
        engine.assert_idle()
    assert seen.jobs("save", well=False) and not seen.jobs("save")
    assert any(not r.error for r in seen.reports)  # the other rank has stored them
    assert engine.counts()["ready"] == 0
    assert engine.connector._scheduler.drops["save_failed"] - before >= PROMPT_BLOCKS
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(3)))
        engine.finish()
    assert seen.hit_tokens == 0 and seen.jobs("save")
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(3)))
    assert seen.hit_tokens == PROMPT_BLOCKS * BLOCK


def test_a_rank_that_reports_twice(engine: ParallelEngine) -> None:
    """Rank 0's second report must not stand for rank 1's, which comes later."""
    faults = metric(engine, "faults")
    blocks = metric(engine, "transfer_blocks", direction="load")
    with engine.armed("duplicate job rank=0; delay job rank=1 ms=100"), engine.reports() as seen:
        same(engine.run(asks(4)))
        engine.drop_gpu_cache()
        same(engine.run(asks(4)))
        engine.finish()
    assert len(seen.jobs("load")) == len(LENGTHS) and seen.hit_tokens == PROMPT_BLOCKS * BLOCK
    for job, ended in seen.ended.items():
        assert [r.rank for r in seen.of(job)].count((0, 0)) == 2
        (slow,) = [r for r in seen.of(job) if r.rank == (0, 1)]
        assert ended >= slow.at
    assert metric(engine, "faults") - faults == len(seen.ended)
    assert metric(engine, "transfer_blocks", direction="load") - blocks == PROMPT_BLOCKS
