# SPDX-License-Identifier: Apache-2.0
"""Two real vLLM instances on CPU, the source in a process of its own, and what their tests do with them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.migration.instance import VllmInstance
from tests.serving.engine import BLOCK, Ask, Engine, references

BLOCK_BYTES = 3 * 2 * 32 * 2 * 4 * BLOCK  # layers x KV heads x head size x (K, V) x float32 x tokens
MIGRATION = {"listen": "127.0.0.1:0", "transport": "tcp", "timeout_s": 8, "model_id": "tiny"}
ENDED: list[tuple[str, str]] = []
PATHS: set[str] = set()  # by which blocks came
OPTIONS = {"num_gpu_blocks_override": 96, "max_num_batched_tokens": 256}


def config(host_blocks: int = 300, **migration: Any) -> dict[str, Any]:
    return {"host_pool_gib": (host_blocks + 0.5) * BLOCK_BYTES / 2**30, "migration": {**MIGRATION, **migration}}


def prompt(seed: int, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 1024), k=tokens)


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


def started_target(source: VllmInstance) -> Iterator[Engine]:
    made = Engine(config(), **OPTIONS)
    migration = made.connector._scheduler._migration
    take = migration.take_stats

    def keep() -> Any:  # vLLM takes the statistics in every step
        stats = take()
        ENDED.extend(stats.ended.elements())
        PATHS.update(stats.nbytes)
        return stats

    migration.take_stats = keep
    source.ask("ready")
    yield made
    made.close()
