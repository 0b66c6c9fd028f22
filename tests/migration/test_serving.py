# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM instances on CPU: what one computed, the other loads; whatever goes wrong, tokens stay right."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake.engine")

from tests.migration.instance import VllmInstance
from tests.serving.engine import BLOCK, Ask, Engine, references

pytestmark = pytest.mark.vllm

BLOCK_BYTES = 3 * 2 * 32 * 2 * 4 * BLOCK  # layers x KV heads x head size x (K, V) x float32 x tokens
MIGRATION = {"listen": "127.0.0.1:0", "transport": "tcp", "timeout_s": 8, "model_id": "tiny"}
ENDED: list[tuple[str, str]] = []
OPTIONS = {"num_gpu_blocks_override": 96, "max_num_batched_tokens": 256}


def config(host_blocks: int = 300, **migration: Any) -> dict[str, Any]:
    return {"host_pool_gib": (host_blocks + 0.5) * BLOCK_BYTES / 2**30, "migration": {**MIGRATION, **migration}}


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 1024), k=tokens)


@pytest.fixture(scope="module")
def source() -> Iterator[VllmInstance]:
    made = VllmInstance(config(), **OPTIONS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def target(source: VllmInstance) -> Iterator[Engine]:
    made = Engine(config(), **OPTIONS)
    migration = made.connector._scheduler._migration
    take = migration.take_stats

    def keep() -> Any:  # vLLM takes the statistics in every step
        stats = take()
        ENDED.extend(stats.ended.elements())
        return stats

    migration.take_stats = keep
    source.ask("ready")
    yield made
    made.llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def quiet(target: Engine) -> Iterator[None]:
    yield
    migration = target.connector._scheduler._migration
    deadline = time.monotonic() + 60
    while migration.counts()["pulls"] or migration.counts()["quarantined"]:
        if migration.counts()["quarantined"] and not migration.counts()["pulls"]:
            migration._client.kill()  # as the connector itself does after a minute
        migration.poll()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    target.assert_idle()
    target.forget_all()
    results(target)


def results(target: Engine) -> list[tuple[str, str]]:
    """(result, reason) of the pulls that ended since the last call."""
    target.connector._scheduler._migration.take_stats()
    ended, ENDED[:] = ENDED[:], []
    return ended


def migrated(target: Engine, source: str, tokens: list[int], generate: int = 12) -> int:
    """Runs a prompt that names its source; the tokens are right, and so many of the prompt's were hits."""
    with target.watch() as seen:
        (run,) = target.run([Ask(tuple(tokens), generate, (("source", source),))])
    assert run.finished and run.tokens == references([run.ask])[run.ask.key]
    return seen.hit_tokens


def test_what_one_instance_computed_is_a_hit_on_the_other(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(1, 200)
    first = source.ask("run", tokens, 40)
    params = first["params"]["pega"]
    assert params["blocks"] == 239 // BLOCK and len(params["fingerprint"]) == 16
    # The running request moves: prompt and what was generated so far, and where it was.
    assert migrated(target, params["source"], tokens + first["tokens"]) == 239 // BLOCK * BLOCK
    assert results(target) == [("done", "")]


def test_the_same_request_twice_and_two_at_once(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(2, 300)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    ask = Ask(tuple(tokens), 6, (("source", address),))
    with target.watch() as seen:
        runs = target.run([ask, ask])
    assert all(r.tokens == references([ask])[ask.key] for r in runs)
    assert results(target) == [("done", "")]  # one pull for both
    assert seen.hit_tokens >= 300 // BLOCK * BLOCK
    assert migrated(target, address, tokens) == 0  # in the GPU's own cache
    target.drop_gpu_cache()
    assert migrated(target, address, tokens) == 300 // BLOCK * BLOCK  # in our own pool
    assert results(target) == []


def test_abort_during_the_pull(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(3, 400)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    migration = target.connector._scheduler._migration
    os.kill(migration._client.pid, signal.SIGSTOP)  # so that we are in time
    try:
        request = target.add(Ask(tuple(tokens), 6, (("source", address),)))
        target.step()
        assert target.counts()["pulls"] == 1
        target.abort(request)
        target.finish()
        assert target.counts()["pulls"] == 1
    finally:
        os.kill(migration._client.pid, signal.SIGCONT)
    while migration.counts()["pulls"]:
        migration.poll()
    # It went on without the request, and the next one finds its blocks.
    assert migrated(target, "127.0.0.1:9", tokens) == 400 // BLOCK * BLOCK


def test_a_source_that_is_not_there(target: Engine) -> None:
    start = time.monotonic()
    assert migrated(target, "127.0.0.1:9", prompt(4, 100)) == 0
    assert time.monotonic() - start < 6
    assert results(target)[0][1] in ("unreachable", "backoff")


def test_a_source_that_is_not_allowed(target: Engine) -> None:
    assert migrated(target, "192.0.2.1:9000", prompt(5, 100)) == 0
    assert results(target) == [("failed", "not_allowed")]


def test_a_frozen_source(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(6, 200)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    agent = source.ask("agent")
    os.kill(agent, signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert migrated(target, address, tokens) == 0
        assert time.monotonic() - start < 8
    finally:
        os.kill(agent, signal.SIGCONT)
    assert results(target)[0][0] == "failed"


def test_our_agent_is_killed(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(7, 500)
    migration = target.connector._scheduler._migration
    time.sleep(1.1)  # the frozen source is left alone for a second
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    os.kill(migration._client.pid, signal.SIGSTOP)
    request = target.add(Ask(tuple(tokens), 6, (("source", address),)))
    target.step()
    assert target.counts()["pulls"] == 1
    migration._client.kill()
    target.finish()
    run = target.requests[request]
    assert run.tokens == references([run.ask])[run.ask.key]
    target.forget_all()
    # Nobody waits for the next agent, which then takes over.
    while not migration._client.ready:
        migration.poll()
    assert migrated(target, address, prompt(7, 500)) == 500 // BLOCK * BLOCK


def test_a_full_pool_drops_the_pull(source: VllmInstance, target: Engine) -> None:
    index = target.connector._scheduler._shared.index
    taken = index.reserve(0, random.Random(0).randbytes(32 * 400))
    taken = b"".join(taken[i : i + 4] for i in range(0, len(taken), 4) if taken[i : i + 4] != b"\xff" * 4)
    try:
        tokens = prompt(8, 100)
        address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
        assert migrated(target, address, tokens) == 0
        assert results(target) == [("dropped", "pool_full")]
    finally:
        index.abandon(0, taken)


def test_after_a_reset_nothing_old_is_given_away(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(9, 150)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    source.ask("forget")
    assert migrated(target, address, tokens) == 0
    assert results(target) == [("failed", "not_found")]
    target.forget_all()
    source.ask("run", tokens, 2)
    assert migrated(target, address, tokens) == 150 // BLOCK * BLOCK


def test_a_stalled_source_engine_does_not_matter(source: VllmInstance, target: Engine) -> None:
    """The source's process holds its GIL for ten seconds; a pull from it takes as long as from an idle one."""
    address = ""
    for seed in (10, 11):
        address = source.ask("run", prompt(seed, 900), 2)["params"]["pega"]["source"]
    start = time.monotonic()
    assert migrated(target, address, prompt(10, 900), 1) == 900 // BLOCK * BLOCK
    idle = time.monotonic() - start
    source.ask("hold_gil", 10)
    time.sleep(0.3)
    source.tell("counts")  # cannot be answered before the GIL is free again
    start = time.monotonic()
    assert migrated(target, address, prompt(11, 900), 1) == 900 // BLOCK * BLOCK
    stalled = time.monotonic() - start
    waited = time.monotonic()
    source.answer()
    assert time.monotonic() - waited > 1, "the source was not stalled at all"
    assert stalled < max(2 * idle, 1.0), (idle, stalled)
