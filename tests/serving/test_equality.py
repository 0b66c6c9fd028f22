# SPDX-License-Identifier: Apache-2.0
"""Greedy output with the connector equals output without it, on real vLLM, under everything that moves blocks.

Every test also asserts that what it is about has happened: hits, saves, preemptions, aborts.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, Ask, Engine, prompt, references, same

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

GPU_BLOCKS = 64  # 2,048 tokens: a handful of prompts, so that requests get preempted
HOST_BLOCKS = 400
SMALL_HOST_BLOCKS = 24
BLOCK_BYTES = 3 * 2 * 32 * 2 * 4 * BLOCK  # layers x KV heads x head size x (K, V) x float32 x tokens
POLICIES = ("auto", "memcpy", "kernel", "chunked", "staged")


def gib(blocks: int) -> float:
    return (blocks + 0.5) * BLOCK_BYTES / 2**30


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine(
        {"host_pool_gib": gib(HOST_BLOCKS), "max_pending_save_blocks": 32},
        num_gpu_blocks_override=GPU_BLOCKS,
        max_num_batched_tokens=256,
    )
    yield made
    made.close()


def test_cold_then_warm_after_the_gpu_cache_was_reset(engine: Engine) -> None:
    asks = [Ask(prompt(s, n), 40) for s, n in enumerate((33, 100, 200, 500))]
    with engine.watch() as cold:
        same(engine.run(asks))
    assert cold.saves > 0 and cold.loads == 0
    engine.drop_gpu_cache()
    with engine.watch() as warm:
        same(engine.run(asks))
    assert warm.loads == len(asks)
    assert warm.hit_tokens == sum(n // BLOCK * BLOCK for n in (33, 100, 200, 500))


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_prompts_of_whole_blocks_and_one_more_or_less(engine: Engine, blocks: int) -> None:
    asks = [Ask(prompt(10 + blocks, blocks * BLOCK + d), 5) for d in (-1, 0, 1)]
    for ask in asks:
        same(engine.run([ask]))
        engine.drop_gpu_cache()
    with engine.watch() as warm:
        for ask in asks:
            same(engine.run([ask]))
            engine.drop_gpu_cache()
    # A prompt of whole blocks loads them all; only its last token is computed again.
    assert warm.hit_tokens == (blocks - 1 + blocks + blocks) * BLOCK


def test_growing_conversation(engine: Engine) -> None:
    history = prompt(20, 70)
    with engine.watch() as seen:
        for turn in range(5):
            (run,) = engine.run([Ask(history, 45)])
            same([run])
            history = (*history, *run.tokens, *prompt(21 + turn, 30))
            engine.drop_gpu_cache()
    # From the second turn on everything is loaded but the tokens since the last full block: what was decoded, too.
    assert seen.loads == 4
    assert seen.hit_tokens >= sum((70 + 75 * t) // BLOCK * BLOCK for t in range(4))


def test_local_hit_plus_host_hit(engine: Engine) -> None:
    base = prompt(30, 160)
    long = Ask((*base, *prompt(31, 200)), 8)
    same(engine.run([long]))
    engine.drop_gpu_cache()
    same(engine.run([Ask(base, 1)]))  # brings the first five blocks back to the GPU
    with engine.watch() as seen:
        same(engine.run([long]))
    assert seen.hit_tokens == (360 // BLOCK - 160 // BLOCK) * BLOCK


def test_a_prompt_longer_than_the_bound_that_ends_with_its_prefill(engine: Engine) -> None:
    """Its last chunk is more than saves may move at once; all of it is saved nonetheless."""
    ask = Ask(prompt(45, 900), 1)
    saves = engine.connector._scheduler._saves
    bound, saves._max_moving = saves._max_moving, 3
    try:
        with engine.watch() as cold:
            same(engine.run([ask]))
            engine.assert_idle()
    finally:
        saves._max_moving = bound
    assert cold.saves >= 900 // BLOCK // 3
    assert engine.counts()["ready"] == 900 // BLOCK
    engine.drop_gpu_cache()
    with engine.watch() as warm:
        same(engine.run([ask]))
    assert warm.hit_tokens == 900 // BLOCK * BLOCK


def test_shared_prefixes_at_once(engine: Engine) -> None:
    base = prompt(40, 150)
    asks = [Ask((*base, *prompt(41 + i, 20 + 13 * i)), 20) for i in range(8)]
    same(engine.run(asks))
    engine.drop_gpu_cache()
    with engine.watch() as warm:
        same(engine.run(asks))
    assert warm.loads >= 1


def test_more_work_than_blocks(engine: Engine) -> None:
    asks = [Ask(prompt(60 + i, 300), 120) for i in range(8)]  # 8 x 420 tokens want 112 of 63 blocks
    preempted = _count_preemptions(engine)
    with engine.watch() as seen:
        same(engine.run(asks))
        engine.drop_gpu_cache()
        same(engine.run(asks))
    assert preempted() > 0
    assert seen.loads >= len(asks) and seen.saves > 0


def _count_preemptions(engine: Engine):  # type: ignore[no-untyped-def]
    count = 0
    original = engine.scheduler._preempt_request

    def preempt(*args, **kwargs):  # type: ignore[no-untyped-def]
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    engine.scheduler._preempt_request = preempt

    def total() -> int:
        engine.scheduler._preempt_request = original
        return count

    return total


@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 5, 8])
def test_aborts_while_queued_loading_and_decoding(engine: Engine, after_steps: int) -> None:
    asks = [Ask(prompt(80 + i, 200 + 32 * i), 30) for i in range(6)]
    same(engine.run(asks))
    engine.drop_gpu_cache()
    with engine.watch() as seen:
        ids = [engine.add(a) for a in asks]
        for _ in range(after_steps):
            engine.step()
        for victim in ids[::2]:
            engine.abort(victim)
        engine.finish()
    same([engine.requests[i] for i in ids])
    assert seen.loads > 0
    engine.assert_idle()
    with engine.watch() as again:
        engine.drop_gpu_cache()
        same(engine.run(asks))
    assert again.loads == len(asks)


@pytest.mark.parametrize("load", POLICIES)
@pytest.mark.parametrize("save", POLICIES)
def test_every_pair_of_policies(engine: Engine, load: str, save: str) -> None:
    asks = [
        Ask(prompt(100 + i, n), 12, pega=(("load_policy", load), ("save_policy", save)))
        for i, n in enumerate((97, 256))
    ]
    with engine.watch() as seen:
        same(engine.run(asks))
        engine.drop_gpu_cache()
        same(engine.run(asks))
    assert seen.loads == len(asks)
    used = {(t[0], t[1]) for t in seen.transfers}
    if load != "auto":
        assert {b for d, b in used if d == "load"} == {load}
    if save != "auto":
        assert {b for d, b in used if d == "save"} == {save}


def test_a_request_that_must_not_be_saved(engine: Engine) -> None:
    ask = Ask(prompt(130, 200), 10, pega=(("save", False),))
    with engine.watch() as seen:
        same(engine.run([ask]))
        engine.drop_gpu_cache()
        same(engine.run([ask]))
    assert seen.saves == 0 and seen.loads == 0


def test_malformed_parameters_fail_nothing(engine: Engine) -> None:
    ask = Ask(prompt(131, 100), 6, pega=(("load_policy", 17), ("nonsense", "x"), ("save_policy", {"backend": "gpu"})))
    with engine.watch() as seen:
        same(engine.run([ask]))
        engine.drop_gpu_cache()
        same(engine.run([ask]))
    assert seen.loads == 1


def test_reset_of_the_connector_forgets(engine: Engine) -> None:
    ask = Ask(prompt(132, 200), 10)
    same(engine.run([ask]))
    engine.forget_all()
    with engine.watch() as seen:
        same(engine.run([ask]))
    assert seen.loads == 0 and seen.saves > 0


def traffic(seed: int) -> list[Ask]:
    """Prompts that share prefixes, grow, repeat, and run over any pair of policies."""
    rng = random.Random(seed)
    stems = [prompt(1000 * seed + i, rng.choice((31, 32, 64, 96, 200))) for i in range(5)]
    asks = []
    for i in range(40):
        tail = prompt(1000 * seed + 100 + i % 13, rng.choice((1, 31, 32, 33, 100, 180)))
        pega = (("load_policy", rng.choice(POLICIES)), ("save_policy", rng.choice(POLICIES)))
        asks.append(Ask((*rng.choice(stems), *tail), rng.choice((1, 7, 40, 64)), pega=pega))
    return asks


def drive(engine: Engine, seed: int) -> tuple[int, int]:
    """Random arrivals, aborts and resets; every token checked. Returns (transfers that loaded, aborts)."""
    rng = random.Random(seed)
    asks = traffic(seed)
    references(asks)
    aborts = 0
    with engine.watch() as seen:
        live: list[str] = []
        ids: list[str] = []
        while asks or live:
            if asks and rng.random() < 0.5:
                ids.append(engine.add(asks.pop()))
                live.append(ids[-1])
            if live and rng.random() < 0.03:
                engine.abort(live.pop(rng.randrange(len(live))))
                aborts += 1
            if rng.random() < 0.05:
                engine.llm.reset_prefix_cache()  # refused while anything runs: as vLLM does
            engine.step()
            live = [i for i in live if not engine.requests[i].finished]
            if not live and rng.random() < 0.3:
                engine.drop_gpu_cache()
        engine.finish()
    same([engine.requests[i] for i in ids])
    return seen.loads, aborts


@pytest.mark.parametrize("seed", range(int(os.environ.get("PEGA_TRAFFIC_SEEDS", "3"))))
def test_random_traffic(engine: Engine, seed: int) -> None:
    loads, _ = drive(engine, seed)
    assert loads > 0


def test_a_pool_smaller_than_the_working_set(engine: Engine) -> None:
    """Rebinds the index to a fraction of its slots, so that one engine serves both sizes."""
    shared = engine.connector._scheduler._shared
    index = shared.index
    from vllm_pega_connector._native import SlotIndex

    engine.finish()
    shared.index = SlotIndex([SMALL_HOST_BLOCKS], [0], shared.key_bytes)
    try:
        asks = [Ask(prompt(150 + i, 160 + 32 * i), 10) for i in range(6)]
        with engine.watch() as seen:
            for _ in range(3):
                for ask in asks:
                    same(engine.run([ask]))
                engine.drop_gpu_cache()
            same(engine.run([asks[-1]]))
            engine.drop_gpu_cache()
            same(engine.run([asks[-1]]))
        assert seen.loads > 0 and seen.saves > 0
        assert shared.index.evictions > 0
        engine.assert_idle()
    finally:
        shared.index = index
