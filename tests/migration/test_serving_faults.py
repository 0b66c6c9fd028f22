# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM instances on CPU: whatever goes wrong, tokens stay right, in time, and nothing leaks."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake.engine")

from tests.migration.instance import VllmInstance
from tests.migration.vllm_pair import migrated, next_agent, our_agent_frozen, prompt, ready, results
from tests.serving.engine import BLOCK, Ask, Engine, references

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]


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
