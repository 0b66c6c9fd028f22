# SPDX-License-Identifier: Apache-2.0
"""What happens to a running engine: resets, other weights, sleep, shutdown, a second one in the same process, and
engine cores started by spawn and by fork. vLLM on CPU goes through the motions of sleep but keeps all memory, so tests
overwrite it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, POISON, ROOT, Ask, Engine, model_path, prompt, references, same
from tests.serving.faulty import FaultyEngine
from tests.support.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

TOKENS = 190  # of a prompt; the block that the answer fills is stored when the request has ended
BLOCKS = TOKENS // BLOCK
SHUTDOWN_S = 10.0


def make_engine() -> FaultyEngine:
    pega = {"host_pool_gib": 0.05, "max_pending_save_blocks": 64}
    return FaultyEngine(pega, "delay job ms=0 nth=1", num_gpu_blocks_override=96, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def engine() -> Iterator[FaultyEngine]:
    made = make_engine()
    yield made
    made.close()


def asks(seed: int, count: int = 3) -> list[Ask]:
    return [Ask(prompt(1000 * seed + i, TOKENS), 8) for i in range(count)]


def ready(engine: Engine) -> int:
    return engine.counts()["ready"]


def run_until_saving(engine: Engine, wanted: list[Ask]) -> list[str]:
    """All tokens are there, and saves are on their way."""
    ids = [engine.add(a) for a in wanted]
    while engine.engine.has_unfinished_requests():
        engine.step()
    engine.step()
    assert engine.counts()["held_blocks"] > 0 and engine.counts()["jobs"] > 0
    return ids


def run_until_loading(engine: Engine, wanted: list[Ask]) -> list[str]:
    ids = [engine.add(a) for a in wanted]
    while engine.counts()["jobs"] < len(wanted):
        engine.step()
    assert engine.counts()["pinned"] > 0
    return ids


def store(engine: Engine, wanted: list[Ask]) -> None:
    same(engine.run(wanted))
    engine.drop_gpu_cache()
    assert ready(engine) >= BLOCKS * len(wanted)


def shut_down(engine: FaultyEngine) -> None:
    worker = engine.worker_connector._worker
    assert worker._engine.pending > 0
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < SHUTDOWN_S
    worker._engine.poll()
    assert worker._engine.pending == 0


def test_shutdown_while_something_moves_and_the_next_engine() -> None:
    """Before the engine that the others share is made: vLLM keeps one connector a process."""
    slow = "delay chunk direction={} ms=500"
    first = make_engine()
    first._arm(slow.format("save"))
    same([first.requests[i] for i in run_until_saving(first, asks(6))])
    shut_down(first)

    second = make_engine()
    with second.watch() as cold:
        same(second.run(asks(6)))
        second.drop_gpu_cache()
    assert cold.saves > 0 and cold.hit_tokens == 0  # the pool was the first one's
    second._arm(slow.format("load"))
    run_until_loading(second, asks(6))
    shut_down(second)


def test_an_aborted_load_is_waited_for(engine: FaultyEngine) -> None:
    """Its blocks are held until it has ended, which vLLM hears only while it steps."""
    store(engine, asks(1))
    with engine.armed("delay job direction=load ms=300"):
        for request in run_until_loading(engine, asks(1)):
            engine.abort(request)
        engine.assert_idle()
        engine.drop_gpu_cache()
    with engine.watch() as seen:
        same(engine.run(asks(1)))
    assert seen.loads == 3


@pytest.mark.parametrize("direction", ["load", "save"])
def test_paused_is_only_what_moves_nothing(engine: FaultyEngine, direction: str) -> None:
    """vLLM gives GPU memory away once a paused engine has no more work."""
    from vllm.v1.core.sched.interface import PauseState

    wanted = asks(2)
    if direction == "load":
        store(engine, wanted)
    with engine.armed(f"delay job direction={direction} ms=300"):
        ids = run_until_loading(engine, wanted) if direction == "load" else run_until_saving(engine, wanted)
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while engine.scheduler.has_requests():
                engine.step()
            assert engine.counts()["jobs"] == 0
            engine.assert_workers_idle()
        finally:
            engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.finish()
    same([engine.requests[i] for i in ids])


@pytest.mark.parametrize("with_connector", [True, False])
@pytest.mark.parametrize("direction", ["load", "save"])
def test_reset_while_something_moves(engine: FaultyEngine, direction: str, with_connector: bool) -> None:
    wanted = asks(3)
    if direction == "load":
        store(engine, wanted)
    with engine.armed(f"delay job direction={direction} ms=200"):
        ids = run_until_loading(engine, wanted) if direction == "load" else run_until_saving(engine, wanted)
        # Blocks are held, so vLLM's own cache stays, and it says so. Ours forgets at once if it is asked to.
        assert not engine.engine.reset_prefix_cache(reset_connector=with_connector)
        engine.finish()
    same([engine.requests[i] for i in ids])
    if direction == "save":  # what was on its way when all was forgotten is not published
        assert (ready(engine) == 0) == with_connector
    engine.drop_gpu_cache()
    with engine.watch() as warm:
        same(engine.run(wanted))
    # Of a load that was under way the blocks stay good; its request has stored them again by its end.
    gone = with_connector and direction == "save"
    assert warm.hit_tokens == (0 if gone else BLOCKS * BLOCK * len(wanted))


def test_other_weights(engine: FaultyEngine) -> None:
    """Old KV is served if nobody resets us, and is not if somebody does."""
    other = str(make_tiny_model(max_length=1024, seed=1))
    wanted = asks(4)
    expected = references(wanted, other)
    assert all(expected[a.key] != tokens for a, tokens in zip(wanted, references(wanted).values(), strict=True))
    store(engine, wanted)
    try:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
        with engine.watch() as stale:
            runs = engine.run(wanted)
        assert stale.hit_tokens > 0 and all(run.tokens != expected[run.ask.key] for run in runs)
        engine.forget_all()
        with engine.watch() as cold:
            same(engine.run(wanted), other)
            engine.drop_gpu_cache()
        assert cold.hit_tokens == 0 and cold.saves > 0
        with engine.watch() as warm:
            same(engine.run(wanted), other)
        assert warm.hit_tokens == BLOCKS * BLOCK * len(wanted)
    finally:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": model_path()})


def test_sleep_and_wake(engine: FaultyEngine) -> None:
    store(engine, asks(5))
    engine.llm.sleep(level=1)
    assert ready(engine) == 0  # vLLM resets all caches: it cannot know what happens to the weights
    tensors = engine.worker_connector._worker._kv_caches
    for tensor in tensors.values():
        tensor.fill_(POISON)
    engine.llm.wake_up()
    engine.worker_connector.register_kv_caches(dict(tensors))
    for expected_hits in (0, BLOCKS * BLOCK * 3):
        with engine.watch() as seen:
            same(engine.run(asks(5)))
        assert seen.hit_tokens == expected_hits
        engine.drop_gpu_cache()


START = """
import json, os, sys
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

if __name__ == "__main__":
    model, method, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    # On CPU vLLM always spawns; what it would do elsewhere is up to this variable, which it sets itself.
    usual = current_platform.check_and_update_config
    def check_and_update_config(config):
        usual(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method
    current_platform.check_and_update_config = check_and_update_config
    transfer = {"kv_connector": "PegaConnector", "kv_connector_module_path": "vllm_pega_connector",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"host_pool_gib": 0.02}}
    llm = LLM(model=model, block_size=32, max_model_len=1024, enforce_eager=True, dtype="float32",
              num_gpu_blocks_override=48, kv_transfer_config=transfer)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for _ in range(2):
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        answers.append([list(o.outputs[0].token_ids) for o in outputs])
        while not llm.reset_prefix_cache():
            pass
    hits = sum(o.num_cached_tokens for o in outputs)  # the second time, of an empty GPU cache
    llm.llm_engine.engine_core.shutdown()
    print("ANSWER", json.dumps({"answers": answers, "hits": hits}))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_engine_core_in_a_process_of_its_own(method: str) -> None:
    wanted = asks(7, 2)
    expected = references(wanted)
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", START, model_path(), method, json.dumps([a.prompt for a in wanted])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, cwd="/")
    (line,) = [x for x in ended.stdout.splitlines() if x.startswith("ANSWER ")] or [""]
    assert ended.returncode == 0 and line, ended.stderr[-3000:]
    said: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
    assert said["answers"] == 2 * [[expected[a.key] for a in wanted]]
    assert said["hits"] == BLOCKS * BLOCK * len(wanted)
