# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: drafts that are rejected leave KV of tokens that never were; none of it may be stored."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, Ask, Engine, references

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    made = Engine(
        {"host_pool_gib": 0.05}, num_gpu_blocks_override=96, max_num_batched_tokens=256, speculative_config=drafts
    )
    yield made
    made.assert_idle()
    made.close()


def test_rejected_drafts_are_never_stored(engine: Engine) -> None:
    """Ends at every place around a block's end; then goes on from what was stored."""
    rng = random.Random(1)
    few = rng.choices(range(1, 1024), k=12)  # a prompt of few words: each is found again, and its successor is a guess
    asks = [Ask(tuple(rng.choices(few, k=50)), n) for n in range(BLOCK - 4, BLOCK + 4)]
    drafted = accepted = 0
    count = engine.scheduler.make_spec_decoding_stats

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal drafted, accepted
        drafted += kwargs["num_draft_tokens"]
        accepted += kwargs["num_accepted_tokens"]
        return count(*args, **kwargs)

    engine.scheduler.make_spec_decoding_stats = counted
    with engine.watch() as first:
        runs = engine.run(asks)
        engine.drop_gpu_cache()
    expected = references(asks)
    assert all(run.finished and run.tokens == expected[run.ask.key] for run in runs)
    assert drafted > accepted and first.saves > 0

    more = [Ask((*run.ask.prompt, *run.tokens, *rng.choices(few, k=9)), 20) for run in runs]
    with engine.watch() as second:
        runs = engine.run(more)
        engine.drop_gpu_cache()
    expected = references(more)
    assert all(run.finished and run.tokens == expected[run.ask.key] for run in runs)
    # Every block that was full of computed tokens is there, those that were decoded too.
    assert second.hit_tokens == sum((50 + ask.tokens - 1) // BLOCK * BLOCK for ask in asks)
