# SPDX-License-Identifier: Apache-2.0
"""Greedy equality for models with sliding windows: all layers, and mixed with full attention (several cache groups)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, Ask, Engine, prompt, same, windowed_model_path
from vllm_pega_connector.compat import can_fail_whole

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]
LOADS = can_fail_whole()
loading = pytest.mark.skipif(not LOADS, reason="this vLLM cannot survive a failed load with windows, so none is loaded")

WINDOW = 70  # no whole number of blocks


@pytest.fixture(scope="module", params=["sss", "sfs"])
def model(request: pytest.FixtureRequest) -> str:
    return windowed_model_path(WINDOW, request.param)


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[Engine]:
    made = Engine(
        {"host_pool_gib": 0.05, "max_pending_save_blocks": 32},
        model=model,
        num_gpu_blocks_override=96,
        max_num_batched_tokens=256,
    )
    yield made
    made.close()


def test_the_model_has_the_groups_that_this_is_about(engine: Engine, model: str) -> None:
    groups = [g.window for g in engine.connector._scheduler._shared.groups]
    assert set(groups) == ({WINDOW} if model.endswith("sss") else {0, WINDOW})


def test_cold_then_warm(engine: Engine, model: str) -> None:
    asks = [Ask(prompt(s, n), 40) for s, n in enumerate((33, 64, 100, 230, 500))]
    with engine.watch() as cold:
        same(engine.run(asks), model)
    assert cold.saves > 0 and cold.loads == 0
    engine.drop_gpu_cache()
    with engine.watch() as warm:
        same(engine.run(asks), model)
    if not LOADS:  # all is computed again
        assert warm.loads == warm.hit_tokens == 0
        return
    assert warm.loads == len(asks)
    # The whole prompt but its last token, in whole blocks.
    assert warm.hit_tokens == sum((len(a.prompt) - 1) // BLOCK * BLOCK for a in asks)
    loaded = sum(t[3] for t in warm.transfers if t[0] == "load")
    every_block = warm.hit_tokens // BLOCK * sum(layout_bytes(engine))
    assert 0 < loaded < every_block  # of the windows' layers only the last blocks


def layout_bytes(engine: Engine) -> list[int]:
    handshake = engine.worker_connector._worker.handshake
    return [handshake.slot_bytes[c] for c in handshake.group_classes]


@loading
def test_growing_conversation(engine: Engine, model: str) -> None:
    history = prompt(20, 70)
    with engine.watch() as seen:
        for turn in range(4):
            (run,) = engine.run([Ask(history, 45)])
            same([run], model)
            history = (*history, *run.tokens, *prompt(21 + turn, 30))
            engine.drop_gpu_cache()
    assert seen.loads == 3


@loading
def test_local_hit_then_host_hit(engine: Engine, model: str) -> None:
    long = Ask(prompt(30, 400), 12)
    same(engine.run([long]), model)
    engine.drop_gpu_cache()
    same(engine.run([Ask(long.prompt[:200], 1)]), model)
    with engine.watch() as seen:
        same(engine.run([long]), model)
    assert seen.loads == 1


@loading
def test_more_work_than_blocks_and_aborts(engine: Engine, model: str) -> None:
    asks = [Ask((*prompt(60, 96), *prompt(61 + i, 250)), 60) for i in range(8)]
    with engine.watch() as seen:
        for _ in range(2):
            same(engine.run(asks), model)
            engine.drop_gpu_cache()
        ids = [engine.add(a) for a in asks]
        for _ in range(4):
            engine.step()
        for victim in ids[::2]:
            engine.abort(victim)
        engine.finish()
    same([engine.requests[i] for i in ids], model)
    assert seen.loads > 0 and seen.saves > 0


@loading
def test_a_load_that_fails_is_computed_instead(engine: Engine, model: str) -> None:
    asks = [Ask(prompt(90 + i, 200), 20) for i in range(3)]
    same(engine.run(asks), model)
    engine.drop_gpu_cache()
    loads = engine.connector._scheduler._loads
    worker = engine.worker_connector._worker
    submit, failures = worker._submit, []

    def refuse(job, event):  # type: ignore[no-untyped-def]
        if job.request_id:
            failures.append(job.request_id)
            worker._refuse(job, "failed: on purpose")
        else:
            submit(job, event)

    worker._submit = refuse
    try:
        same(engine.run(asks), model)
    finally:
        del worker._submit
    assert len(failures) == len(asks) and loads._shared.load_failures["failed"] >= len(asks)
    engine.drop_gpu_cache()
    with engine.watch() as seen:
        same(engine.run(asks), model)
    assert seen.loads == len(asks)
