# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM instances on CPU: what one computed, the other loads; whatever goes wrong, tokens stay right."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_pega_connector.migration.client.LAST_RESTART_S", 0.5)  # these tests end many agents
        yield from started_target(source)


def started_target(source: VllmInstance) -> Iterator[Engine]:
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


def ready(target: Engine) -> None:
    migration = target.connector._scheduler._migration
    deadline = time.monotonic() + 60
    while not migration._client.ready:
        migration.poll()
        assert time.monotonic() < deadline, migration.failure
        time.sleep(0.01)


def next_agent(target: Engine) -> None:
    """Ends the target's agent and waits for the one that follows."""
    client = target.connector._scheduler._migration._client
    ready(target)
    starts = client.starts
    client.kill()
    while client.starts == starts or not client.ready:
        target.connector._scheduler._migration.poll()
        time.sleep(0.01)


@contextmanager
def our_agent_frozen(target: Engine) -> Iterator[None]:
    """So that something can happen while a pull is under way."""
    ready(target)
    pid = target.connector._scheduler._migration._client.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


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
    with our_agent_frozen(target):
        request = target.add(Ask(tuple(tokens), 6, (("source", address),)))
        target.step()
        assert target.counts()["pulls"] == 1
        target.abort(request)
        target.finish()
        assert target.counts()["pulls"] == 1
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
    index = target.connector._scheduler._index
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


def test_two_instances_pull_from_each_other_at_once(source: VllmInstance, target: Engine) -> None:
    theirs, ours = prompt(20, 500), prompt(21, 500)
    expected = references([Ask(tuple(theirs), 6), Ask(tuple(ours), 6)])
    address = source.ask("run", theirs, 2)["params"]["pega"]["source"]
    (run,) = target.run([Ask(tuple(ours), 2)])
    assert run.params is not None
    source.tell("run", ours, 6, run.params["pega"]["source"])
    assert migrated(target, address, theirs, 6) == 500 // BLOCK * BLOCK
    got = source.answer()
    assert got["hits"] == 500 // BLOCK * BLOCK
    assert got["tokens"] == expected[Ask(tuple(ours), 6).key]


def test_blocks_that_go_away_during_the_pull(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(22, 300)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    with our_agent_frozen(target):
        request = target.add(Ask(tuple(tokens), 6, (("source", address),)))
        target.step()
        assert target.counts()["pulls"] == 1
        source.ask("forget")
    target.finish()
    run = target.requests[request]
    assert run.tokens == references([run.ask])[run.ask.key]
    assert results(target) == [("failed", "not_found")]
    target.forget_all()
    source.ask("run", tokens, 2)
    assert migrated(target, address, tokens) == 300 // BLOCK * BLOCK


@pytest.mark.parametrize("field", ["model", "block_size"])
def test_another_kind_of_peer_is_refused_by_name(
    source: VllmInstance, target: Engine, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(23, 200)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    client = target.connector._scheduler._migration._client
    spec = client._spec

    def other() -> Any:
        made = spec()
        assert field in made.fingerprint
        return msgspec.structs.replace(made, fingerprint={**made.fingerprint, field: "other"})

    with monkeypatch.context() as patch:
        patch.setattr(client, "_spec", other)
        next_agent(target)
        assert migrated(target, address, tokens) == 0
        assert results(target) == [("failed", f"refused_{field}")]
    next_agent(target)
    target.forget_all()
    assert migrated(target, address, tokens) == 200 // BLOCK * BLOCK


def test_without_libibverbs_all_is_computed(
    source: VllmInstance, target: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tokens = prompt(24, 200)
    address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    migration = target.connector._scheduler._migration
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        migration._client.kill()
        deadline = time.monotonic() + 60
        while not migration.failure:
            migration.poll()
            assert time.monotonic() < deadline
        assert "libibverbs.so.1" in migration.failure and "pega doctor" in migration.failure
        start = time.monotonic()
        assert migrated(target, address, tokens) == 0
        assert time.monotonic() - start < 30
    ready(target)
    target.forget_all()
    assert migrated(target, address, tokens) == 200 // BLOCK * BLOCK


def test_a_stalled_source_engine_does_not_matter(source: VllmInstance, target: Engine) -> None:
    """While the source's process holds its GIL for ten seconds, pulls from it take less than twice as long as from an
    idle one: medians of five."""
    asks = [Ask(tuple(prompt(30 + n, 600)), 1) for n in range(11)]
    expected = references(asks)
    for ask in asks:
        address = source.ask("run", list(ask.prompt), 2)["params"]["pega"]["source"]

    def pull(ask: Ask) -> float:
        start = time.monotonic()
        with target.watch() as seen:
            (run,) = target.run([Ask(ask.prompt, 1, (("source", address),))])
        seconds = time.monotonic() - start
        assert seen.hit_tokens == (600 - 1) // BLOCK * BLOCK and run.tokens == expected[ask.key]
        return seconds

    pull(asks[10])  # connections
    idle = [pull(ask) for ask in asks[:5]]
    source.ask("hold_gil", 10)
    time.sleep(0.3)
    source.tell("counts")  # cannot be answered before the GIL is free again
    stalled = [pull(ask) for ask in asks[5:10]]
    waited = time.monotonic()
    source.answer()
    assert time.monotonic() - waited > 1, "the source was not stalled at all"
    assert statistics.median(stalled) < 2 * statistics.median(idle), (idle, stalled)


def test_a_source_killed_before_during_and_after_a_pull(source: VllmInstance, target: Engine) -> None:
    """The last test: it takes the source away."""
    before, during, after = (prompt(n, 300) for n in (50, 51, 52))
    for tokens in (before, during, after):
        address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
    assert migrated(target, address, after) == 300 // BLOCK * BLOCK
    with our_agent_frozen(target):
        request = target.add(Ask(tuple(during), 6, (("source", address),)))
        target.step()
        assert target.counts()["pulls"] == 1
        source.process.kill()
        source.process.wait()
        time.sleep(1.0)  # its agent ends with it
        start = time.monotonic()
    target.finish()
    assert time.monotonic() - start < 10
    run = target.requests[request]
    assert run.tokens == references([run.ask])[run.ask.key]
    assert results(target)[-1][0] == "failed"
    assert migrated(target, address, before) == 0
    assert results(target)[0][0] == "failed"
    target.drop_gpu_cache()
    assert migrated(target, address, after) == 300 // BLOCK * BLOCK  # what has come is kept
