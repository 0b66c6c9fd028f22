# SPDX-License-Identifier: Apache-2.0
"""Every kind of injected fault, in real vLLM on CPU: right tokens, in time, nothing held; and afterwards hits again."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake.engine")

from tests.migration.vllm_pair import ready
from tests.serving.engine import BLOCK, Ask, prompt, references, same
from tests.serving.faulty import FaultyEngine

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

LENGTHS = (70, 200, 330)
PROMPT_BLOCKS = sum(n // BLOCK for n in LENGTHS)


def asks(seed: int) -> list[Ask]:
    return [Ask(prompt(100 * seed + n, n), 10) for n in LENGTHS]


@pytest.fixture(scope="module")
def engine() -> Iterator[FaultyEngine]:
    references([ask for seed in range(20) for ask in asks(seed)])
    migration = {"listen": "127.0.0.1:0", "transport": "tcp", "timeout_s": 8, "model_id": "tiny"}
    made = FaultyEngine(
        # Small chunks, so that a job has many.
        {
            "host_pool_gib": 0.02,
            "load_policy": {"backend": "memcpy", "chunk_bytes": 16384, "inflight_chunks": 2},
            "save_policy": {"backend": "memcpy", "chunk_bytes": 16384, "inflight_chunks": 2},
            "migration": migration,
        },
        "fail job direction=save nth=1",
        num_gpu_blocks_override=64,
        max_num_batched_tokens=256,
    )
    yield made
    made.close()


def drops(engine: FaultyEngine, reason: str) -> int:
    return engine.connector._scheduler.drops[reason]


def works(engine: FaultyEngine, seed: int) -> None:
    """Without faults everything is stored and hit."""
    engine.forget_all()
    same(engine.run(asks(seed)))
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(seed)))
    assert len(seen.jobs("load")) == len(LENGTHS) and not seen.jobs("load", well=False)
    assert seen.hit_tokens == PROMPT_BLOCKS * BLOCK


def test_the_variable_is_read_at_the_start(engine: FaultyEngine) -> None:
    """The first save of this engine fails, by what the environment said."""
    assert drops(engine, "save_failed") == 0
    with engine.reports() as seen:
        same(engine.run(asks(0)))
        engine.finish()
    assert [r.error for r in seen.reports if r.error] == ["failed: injected fault"]
    assert drops(engine, "save_failed") > 0 and seen.jobs("save")
    works(engine, 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("fail job direction=load", "failed: injected fault"),
        ("fail chunk direction=load nth=3", "failed: injected fault"),
        ("fail chunk direction=load", "failed: injected fault"),
        ("kill engine direction=load nth=3", "failed: the engine's thread ended: injected fault"),
        ("kill engine direction=load p=0.2 seed=1", "failed: the engine's thread ended: injected fault"),
    ],
)
def test_loads_that_fail_are_computed(engine: FaultyEngine, text: str, error: str) -> None:
    same(engine.run(asks(1)))
    engine.drop_gpu_cache()
    failures = engine.connector._scheduler.load_failures.total()
    with engine.armed(text), engine.reports() as seen:
        same(engine.run(asks(1)))
        engine.assert_idle()
    failed = seen.jobs("load", well=False)
    assert failed and {r.error for j in failed for r in seen.of(j)} == {error}
    assert engine.connector._scheduler.load_failures.total() == failures + len(failed)
    # What is in the pool is still good: the fault was on the way.
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(1)))
    assert len(seen.jobs("load")) == len(LENGTHS) and seen.hit_tokens == PROMPT_BLOCKS * BLOCK


@pytest.mark.parametrize(
    "text",
    [
        "fail job direction=save",
        "fail job direction=save p=0.5 seed=2",
        "fail chunk direction=save p=0.05 seed=3",
        "kill engine direction=save nth=2",
        "kill engine direction=save p=0.1 seed=4",
    ],
)
def test_saves_that_fail_are_not_published(engine: FaultyEngine, text: str) -> None:
    before = drops(engine, "save_failed")
    with engine.armed(text), engine.reports() as seen:
        same(engine.run(asks(2)))
        engine.assert_idle()
    failed = seen.jobs("save", well=False)
    stored = engine.counts()["ready"]
    assert failed and drops(engine, "save_failed") > before
    assert bool(stored) is bool(seen.jobs("save"))
    engine.drop_gpu_cache()
    with engine.reports() as seen:
        same(engine.run(asks(2)))
    assert not seen.jobs("load", well=False) and seen.hit_tokens <= stored * BLOCK
    works(engine, 2)


@pytest.mark.parametrize(("text", "least_s"), [("delay job ms=300", 0.3), ("delay chunk nth=2 ms=300", 0.3)])
def test_late_is_only_late(engine: FaultyEngine, text: str, least_s: float) -> None:
    same(engine.run(asks(3)))
    engine.drop_gpu_cache()
    with engine.armed(text), engine.reports() as seen:
        start = time.monotonic()
        same(engine.run(asks(3)))
        assert time.monotonic() - start >= least_s
    assert len(seen.jobs("load")) == len(LENGTHS) and not seen.jobs("load", well=False)
    assert seen.hit_tokens == PROMPT_BLOCKS * BLOCK


def test_a_load_whose_chunk_is_too_late_is_given_up(engine: FaultyEngine) -> None:
    same(engine.run(asks(4)))
    engine.drop_gpu_cache()
    worker = engine.worker_connector._worker
    config, worker._config = worker._config, worker._config.model_copy(update={"transfer_timeout_s": 0.2})
    try:
        with engine.armed("delay chunk direction=load nth=2 ms=600"), engine.reports() as seen:
            same(engine.run(asks(4)))
    finally:
        worker._config = config
    failed = seen.jobs("load", well=False)
    assert {r.error for j in failed for r in seen.of(j)} == {"timeout: not finished within its timeout"}
    works(engine, 4)


def test_a_job_reported_twice_counts_once(engine: FaultyEngine) -> None:
    before = drops(engine, "duplicate_report")
    with engine.armed("duplicate job"), engine.reports() as seen:
        same(engine.run(asks(5)))
        engine.drop_gpu_cache()
        same(engine.run(asks(5)))
        engine.finish()
    assert len(seen.reports) == 2 * len(seen.ended)
    assert drops(engine, "duplicate_report") - before == len(seen.ended)
    assert len(seen.jobs("load")) == len(LENGTHS) and seen.hit_tokens == PROMPT_BLOCKS * BLOCK


def test_a_pool_that_is_full(engine: FaultyEngine) -> None:
    before = drops(engine, "pool_full")
    with engine.armed("fill pool"):
        same(engine.run(asks(6)))
        engine.finish()
        assert engine.counts()["ready"] == 0 and drops(engine, "pool_full") - before >= PROMPT_BLOCKS
    engine.drop_gpu_cache()
    with engine.armed("fill pool p=0.5 seed=1"):
        same(engine.run(asks(6)))
        engine.finish()
        engine.drop_gpu_cache()
        same(engine.run(asks(6)))
    works(engine, 6)


def test_the_migration_agent_is_lost(engine: FaultyEngine) -> None:
    ready(engine)
    client = engine.connector._scheduler._migration._client
    pid, prompt = client.pid, asks(7)[1].prompt
    with engine.armed("kill agent nth=1"):
        start = time.monotonic()
        same(engine.run([Ask(prompt, 10, (("source", "127.0.0.1:9"),))]))
        assert time.monotonic() - start < 8
    ready(engine)
    assert client.pid != pid
    assert engine.counts()["pulls"] == 0
    works(engine, 7)


def test_everything_at_once(engine: FaultyEngine) -> None:
    text = (
        "fail job p=0.15 seed=1; delay job p=0.2 seed=2 ms=40; duplicate job p=0.2 seed=3; fail chunk p=0.01 seed=4;"
        "delay chunk p=0.02 seed=5 ms=20; kill engine p=0.005 seed=6; fill pool p=0.2 seed=7"
    )
    loads = failures = 0
    with engine.armed(text), engine.reports() as seen:
        for seed in range(8, 14):
            for _ in range(2):
                same(engine.run(asks(seed)))
                engine.drop_gpu_cache()
    for direction in ("load", "save"):
        loads += len(seen.jobs(direction))
        failures += len(seen.jobs(direction, well=False))
        assert seen.jobs(direction)
    assert loads > 10 and failures > 2
    works(engine, 8)
