# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM instances on CPU: what one computed, the other loads."""

from __future__ import annotations

import statistics
import time

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake.engine")

from tests.migration.instance import VllmInstance
from tests.migration.vllm_pair import PATHS, migrated, next_agent, prompt, results
from tests.serving.engine import BLOCK, Ask, Engine, references

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]


def test_what_one_instance_computed_is_a_hit_on_the_other(source: VllmInstance, target: Engine) -> None:
    tokens = prompt(1, 200)
    first = source.ask("run", tokens, 40)
    params = first["params"]["pega"]
    assert params["blocks"] == 239 // BLOCK and len(params["fingerprint"]) == 16
    # The running request moves: prompt and what was generated so far, and where it was.
    assert migrated(target, params["source"], tokens + first["tokens"]) == 239 // BLOCK * BLOCK
    assert results(target) == [("done", "")]


def test_by_mooncake_where_pools_are_not_read_directly(
    source: VllmInstance, target: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = target.connector._scheduler._migration._client
    spec = client._spec
    for same_host, path in ((False, "network"), (True, "same_host")):
        with monkeypatch.context() as patch:
            patch.setattr(client, "_spec", lambda on=same_host: msgspec.structs.replace(spec(), same_host=on))
            next_agent(target)
            tokens = prompt(60 + same_host, 200)
            address = source.ask("run", tokens, 2)["params"]["pega"]["source"]
            PATHS.clear()
            assert migrated(target, address, tokens) == 200 // BLOCK * BLOCK
        assert results(target) == [("done", "")] and {path} == PATHS


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
