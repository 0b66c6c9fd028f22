# SPDX-License-Identifier: Apache-2.0
"""Two pipeline-parallel ranks of real vLLM on CPU, each in a process of its own, with layers and a pool of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, Ask, prompt, references, same
from tests.serving.faulty import ParallelEngine, rank_state

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

RANKS = {(0, 0), (1, 0)}
LENGTHS = (33, 100, 300)
PROMPT_BLOCKS = sum(n // BLOCK for n in LENGTHS)


def asks(seed: int) -> list[Ask]:
    return [Ask(prompt(100 * seed + n, n), 10) for n in LENGTHS]


@pytest.fixture(scope="module")
def engine() -> Iterator[ParallelEngine]:
    references([ask for seed in range(2) for ask in asks(seed)])
    made = ParallelEngine(
        {"host_pool_gib": 0.02},
        "delay job ms=0 nth=1",
        pipeline_parallel_size=2,
        num_gpu_blocks_override=64,
        max_num_batched_tokens=256,
        # With enforce_eager vLLM on CPU warms nothing up, and then the second rank has no place for what comes from
        # the first.
        enforce_eager=False,
        compilation_config={"mode": 2, "backend": "eager"},
    )
    yield made
    made.close()


def test_cold_then_warm(engine: ParallelEngine) -> None:
    states = engine.each_rank(rank_state)
    assert {s["rank"] for s in states} == RANKS and len({s["pid"] for s in states}) == 2
    with engine.reports() as cold:
        same(engine.run(asks(0)))
        engine.finish()
    assert cold.jobs("save") and not cold.jobs("load")
    assert engine.counts()["ready"] >= PROMPT_BLOCKS
    engine.drop_gpu_cache()
    with engine.reports() as warm:
        same(engine.run(asks(0)))
        engine.finish()
    assert len(warm.jobs("load")) == len(LENGTHS) and warm.hit_tokens == PROMPT_BLOCKS * BLOCK
    for job in warm.ended:
        assert {r.rank for r in warm.of(job)} == RANKS and len(warm.of(job)) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_loads_that_fail_on_one_rank_are_computed(engine: ParallelEngine, rank: int) -> None:
    same(engine.run(asks(1)))
    engine.drop_gpu_cache()
    with engine.armed(f"fail job direction=load rank={rank}.0"), engine.reports() as seen:
        same(engine.run(asks(1)))
        engine.assert_idle()
    failed = seen.jobs("load", well=False)
    assert len(failed) == len(LENGTHS) and all(r.rank == (rank, 0) for r in seen.reports if r.error)
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(1)))
    assert len(seen.jobs("load")) == len(LENGTHS) and seen.hit_tokens == PROMPT_BLOCKS * BLOCK
