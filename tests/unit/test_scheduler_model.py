# SPDX-License-Identifier: Apache-2.0
"""Model-based test: random traffic through vLLM's real schedulers and our connector, over KV that is known.

Each seed is one engine: its shape, its clients and its faults. A wrong slot read, a leak or a swallowed exception ends
the run with the seed in its name.

  PEGA_MODEL_SEEDS=20000 pytest tests/unit/test_scheduler_model.py     many
  PEGA_MODEL_SEED=1234 pytest tests/unit/test_scheduler_model.py -s    one again
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.fake_engine import FakeEngine
from tests.support.fake_setup import Setup, make_vllm_config
from tests.support.fake_transfers import VOCAB, Faults, Violation
from vllm_pega_connector import compat

SEEDS = int(os.environ.get("PEGA_MODEL_SEEDS", "1200"))
ONLY = os.environ.get("PEGA_MODEL_SEED")
SHARDS = 8  # so that progress shows, and a failure names its part

# What clients send, right and wrong; the wrong must not matter.
PARAMS: list[Any] = [
    {"pega": {"load_policy": "memcpy", "save_policy": "staged"}},
    {"pega": {"save_policy": {"backend": "kernel", "max_grid_blocks": 4}}},
    {"pega": {"save": False}},
    {"pega": {"save": "perhaps", "load_policy": 7}},
    {"pega": [1, 2]},
    {"pega": {"source": "nowhere", "unknown": None}},
    {"other": {"do_remote_prefill": False}},
]


def random_setup(rng: random.Random) -> Setup:
    block_size = rng.choice((4, 4, 16))
    ranks = rng.choice((1, 1, 2))
    max_seqs = rng.randint(1, 6)
    drafts = rng.choice((0, 0, 2, 3))
    slots = rng.choice(((2, 12), (20, 60), (60, 200)))
    settings: list[tuple[str, Any]] = []
    if rng.random() < 0.5:
        settings.append(("max_pending_save_blocks", rng.choice((1, 2, 5, 1000))))
    if rng.random() < 0.2:
        settings.append(("save_decode", False))
    setup = Setup(
        asynchronous=rng.random() < 0.6,
        drafts=drafts,
        eagle=drafts > 0 and rng.random() < 0.4,
        v2_runner=rng.random() < 0.5,
        priority=rng.random() < 0.2,
        block_size=block_size,
        gpu_blocks=rng.randint(10, 36) if block_size == 4 else rng.randint(7, 16),
        max_seqs=max_seqs,
        budget=max(max_seqs * (1 + drafts), rng.choice((5, 9, 17, 33, 64, 128))),
        host_slots=tuple(rng.randint(*slots) for _ in range(ranks)),
        role=rng.choice(("kv_both",) * 8 + ("kv_producer", "kv_consumer")),
        recompute=rng.random() < 0.9,
        rival=rng.choice((0.0, 0.0, 0.0, 0.3)),
        settings=tuple(settings),
    )
    # Such a vLLM lets in two loads that leave each other no room for drafts, and both wait for ever: whatever connector
    # they are of. Ours asks for no second one then; of those of another it does not know.
    if setup.rival and compat.unreserved_tokens(make_vllm_config(setup)):
        setup = dataclasses.replace(setup, rival=0.0)
    return setup


def random_faults(rng: random.Random) -> Faults:
    if rng.random() < 0.3:
        return Faults(stall=rng.choice((0.0, 0.5, 0.9)))
    return Faults(
        refuse=rng.choice((0.0, 0.05)),
        no_event=rng.choice((0.0, 0.03)),
        fail=rng.choice((0.0, 0.1, 0.4)),
        timeout=rng.choice((0.0, 0.1)),
        report_twice=rng.choice((0.0, 0.1)),
        stall=rng.choice((0.0, 0.5, 0.9)),
    )


class Clients:
    """Prompts that share prefixes and end at, before or after a block boundary; conversations; changes of mind."""

    def __init__(self, engine: FakeEngine, rng: random.Random) -> None:
        self._engine, self._rng = engine, rng
        self._room = engine.setup.room()
        self._documents = [self._tokens(self._room) for _ in range(rng.randint(1, 2))]
        self._salts = rng.choice(((None,), (None, None, "a", "b")))
        self._left = rng.randint(4, 12)
        self._hasty = rng.choice((0.0, 0.03, 0.15))
        self._resets = rng.choice((0.0, 0.05, 0.15))

    def _tokens(self, n: int) -> list[int]:
        return [self._rng.randrange(1, VOCAB) for _ in range(n)]

    @property
    def done(self) -> bool:
        return self._left == 0

    def act(self) -> None:
        """What clients do between two steps."""
        rng = self._rng
        if self._left and (rng.random() < 0.3 or not self._engine.has_work()):
            for _ in range(min(self._left, rng.randint(1, 4))):
                self._left -= 1
                self._arrive()
        if rng.random() < self._hasty:
            self._abort()
        if rng.random() < self._resets:
            self._reset()

    def _arrive(self) -> None:
        rng, engine = self._rng, self._engine
        max_tokens = rng.randint(1, min(24, self._room // 2))
        room = self._room - max_tokens
        earlier = [r for r in engine.requests.values() if r.num_tokens < room]
        salt = rng.choice(self._salts)
        if earlier and rng.random() < 0.4:  # a conversation goes on, or a prompt comes again
            request = rng.choice(earlier)
            salt = request.cache_salt
            prompt = list(request.all_token_ids)[
                : request.num_tokens if rng.random() < 0.7 else request.num_prompt_tokens
            ]
        else:
            size = engine.setup.block_size
            length = rng.randint(0, max(1, room // size)) * size + rng.choice((-1, 0, 0, 1))
            prompt = rng.choice(self._documents)[: max(1, length)]
        prompt = (prompt + self._tokens(rng.choice((0, 0, 1, 5, 20))))[:room]
        engine.add(
            prompt,
            max_tokens,
            salt=salt,
            stop=rng.random() < 0.3,
            params=rng.choice(PARAMS) if rng.random() < 0.3 else None,
            skip_cache=rng.random() < 0.05,
            priority=rng.randint(0, 2),
        )

    def _abort(self) -> None:
        alive = [r for r in self._engine.requests.values() if not r.is_finished()]
        loading = [r for r in alive if r.status == RequestStatus.WAITING_FOR_REMOTE_KVS]
        if alive:
            victim = self._rng.choice(loading if loading and self._rng.random() < 0.5 else alive)
            self._engine.abort(victim.request_id, during_step=self._rng.random() < 0.5)

    def _reset(self) -> None:
        engine, rng = self._engine, self._rng
        running = rng.random() < 0.5
        in_transfer = engine.in_transfer()
        try:
            engine.reset(running, connector=rng.random() < 0.3)
        except RuntimeError as error:  # vLLM's own, where blocks are in use by what cannot be preempted
            assert "Failed to reset KV cache" in str(error) and in_transfer, error


def run_seed(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    setup = random_setup(rng)
    engine = FakeEngine(setup, rng, random_faults(rng))
    try:
        clients = Clients(engine, rng)
        while engine.has_work() or not clients.done:
            clients.act()
            engine.step()
            assert engine.steps < 4000, f"stuck: {engine.describe()}"
        engine.seen["evictions"] += engine.pega._shared.index.evictions
        engine.seen.update({f"drop {k}": n for k, n in engine.pega.drops.items()})
        engine.check_idle()
    except (Exception, Violation) as error:
        raise AssertionError(f"PEGA_MODEL_SEED={seed}, step {engine.steps}, {setup}: {error}") from error
    return engine.seen


@pytest.fixture(scope="module")
def seen() -> Counter[str]:
    return Counter()


@pytest.mark.skipif(ONLY is None, reason="PEGA_MODEL_SEED names no seed to replay")
def test_one_seed() -> None:
    print(dict(run_seed(int(ONLY or 0))))


@pytest.mark.skipif(ONLY is not None, reason="PEGA_MODEL_SEED replays one seed")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_traffic(shard: int, seen: Counter[str]) -> None:
    for seed in range(shard, SEEDS, SHARDS):
        seen.update(run_seed(seed))


@pytest.mark.skipif(ONLY is not None or SEEDS < 200, reason="needs many seeds")
def test_everything_happened(seen: Counter[str]) -> None:
    """The seeds above went where things go wrong: a test of failure that never failed would prove nothing."""
    print(dict(seen))
    for what in (
        "load done", "save done", "load failed", "load timeout", "load cancelled", "save failed", "refused",
        "reported twice", "preemptions", "aborts", "aborts while loading", "answers thrown away",
        "loads of another connector", "evictions", "new weights", "drafts accepted", "drafts rejected",
        "cached starts", "drop too_many_pending", "drop pool_full", "drop duplicate_report", "drop bad_request_params",
    ):  # fmt: skip
        assert seen[what] > 0, f"{what} never happened"
