# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines on CPU, in this process, stepped by the test.

In-process engines show their scheduler and workers, so that a test can poison blocks that are handed out again,
abort at any step, and look at what is held when all is quiet. Reference tokens come from an engine without the
connector in a process of its own and are kept as JSON.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# On a GPU, Triton's attention would round float32 to TF32, and a near tie may then fall either way.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "reference"
BLOCK = 32  # tokens; CPU attention wants a multiple of 32
POISON = 3.75  # finite: a NaN would spread to rows that do not attend to it
COMMON = {
    "block_size": BLOCK,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "dtype": "float32",
    "seed": 0,
}


def model_path() -> str:
    from tests.support.tiny_model import make_tiny_model

    return str(make_tiny_model(max_length=1024))


def windowed_model_path(window: int, layers: str) -> str:
    """The tiny model, attention of some layers through a sliding window: "s" sliding, "f" full, one letter a layer."""
    plain = Path(model_path())
    target = plain.with_name(f"{plain.name}-{window}{layers}")
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copytree(plain, scratch)
    config = json.loads((scratch / "config.json").read_text())
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    config |= {"sliding_window": window, "layer_types": [kinds[x] for x in layers]}
    (scratch / "config.json").write_text(json.dumps(config))
    shutil.rmtree(target, ignore_errors=True)
    scratch.rename(target)
    return str(target)


@dataclass(frozen=True)
class Ask:
    """One request: prompt token ids and how many tokens to generate, greedily."""

    prompt: tuple[int, ...]
    tokens: int
    pega: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([self.prompt, self.tokens]).encode()).hexdigest()[:24]


class Reference:
    """vLLM without the connector and without any prefix cache, in a process of its own; answers are kept as JSON.

    The process starts with the first prompt that is not known yet, and ends with its standard input.
    """

    def __init__(self, model: str, keep: bool = True) -> None:
        import vllm

        self._model = model
        self._keep = keep
        self._file = CACHE / f"{Path(self._model).name}-{vllm.__version__}.json"
        self._known: dict[str, list[int]] = {}
        if keep and self._file.exists():
            self._known = json.loads(self._file.read_text())
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, asks: Sequence[Ask]) -> dict[str, list[int]]:
        missing = {a.key: (a.prompt, a.tokens, None) for a in asks if a.key not in self._known}
        if not self._keep:
            return self._compute(missing)
        if missing:
            self._known |= self._compute(missing)
            CACHE.mkdir(parents=True, exist_ok=True)
            scratch = self._file.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(self._known))
            scratch.rename(self._file)
        return {a.key: self._known[a.key] for a in asks}

    def likely(self, prompt: tuple[int, ...]) -> dict[int, float]:
        """Log-probabilities of the five likeliest next tokens."""
        return {int(token): value for token, value in self._compute({"likely": (prompt, 1, 5)})["likely"].items()}

    def _compute(self, missing: dict[str, tuple[tuple[int, ...], int, int | None]]) -> dict[str, Any]:
        if self._process is None:
            read, write = os.pipe()
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**os.environ, "PYTHONPATH": path}
            command = [sys.executable, "-m", "tests.serving.engine", self._model, str(write)]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, pass_fds=[write], text=True
            )
            os.close(write)
            self._answers = os.fdopen(read)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(missing) + "\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        assert line, "the reference engine ended; its output says why"
        return json.loads(line)


@functools.cache
def reference(model: str) -> Reference:
    return Reference(model)


def one_seed() -> dict[str, str]:
    """What must be in the environment where vLLM would draw the seed of its block hashes at random: then there is no
    migration."""
    from vllm.v1.core import kv_cache_utils

    return {} if hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED") else {"PYTHONHASHSEED": "0"}


def prompt(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 1024), k=tokens))


def references(asks: Sequence[Ask], model: str = "") -> dict[str, list[int]]:
    """Tokens of every ask from vLLM alone."""
    return reference(model or model_path())(asks)


@dataclass
class Running:
    ask: Ask
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    aborted: bool = False
    external_tokens: int = 0
    params: dict[str, Any] | None = None  # what the connector gave out when it finished


def same(runs: Sequence[Running], model: str = "") -> None:
    """Every request has the tokens that vLLM alone gives: all of them, or those until it was aborted."""
    expected = references([r.ask for r in runs], model)
    for run in runs:
        if run.aborted:
            assert run.tokens == expected[run.ask.key][: len(run.tokens)]
        else:
            assert run.finished
            assert run.tokens == expected[run.ask.key]


def ours(connector: Any) -> Any:
    """PegaConnector, also among the children of a MultiConnector."""
    children = getattr(connector, "_connectors", [connector])
    return next(c for c in children if type(c).__name__ == "PegaConnector")


class Engine:
    """A real LLM with the connector. `poison` fills every block that the pool hands out with finite garbage.

    `before` and `after`: connectors beside ours, under a MultiConnector that asks them in this order.
    """

    def __init__(
        self,
        extra_config: dict[str, Any],
        poison: bool = True,
        model: str = "",
        before: Sequence[dict[str, Any]] = (),
        after: Sequence[dict[str, Any]] = (),
        **options: Any,
    ) -> None:
        from vllm import LLM

        transfer = {
            "kv_connector": "PegaConnector",
            "kv_connector_module_path": "vllm_pega_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra_config,
        }
        if before or after:
            children = {"connectors": [*before, transfer, *after]}
            transfer = {**transfer, "kv_connector": "MultiConnector", "kv_connector_extra_config": children}
            del transfer["kv_connector_module_path"]
        self.llm = LLM(model=model or model_path(), kv_transfer_config=transfer, **{**COMMON, **options})
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.core = core
        self.scheduler = core.scheduler
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.connector = ours(self.scheduler.connector)
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        # With several ranks the workers are in processes of their own.
        self.worker_connector = ours(get_kv_transfer_group()) if has_kv_transfer_group() else None
        self.requests: dict[str, Running] = {}
        self._count = 0
        self.hit_tokens = 0  # that vLLM took from the host pool
        self._count_hits()
        self._record_every_step()
        if poison:
            self._poison_new_blocks()

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _count_hits(self) -> None:
        after_alloc = self.connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            self.hit_tokens += tokens
            after_alloc(request, blocks, tokens)

        self.connector.update_state_after_alloc = update_state_after_alloc

    def _record_every_step(self) -> None:
        """Older vLLM, in an `LLM` and not in a server, throws away the statistics of a step that has no output."""
        core, manager = self.engine.engine_core, self.engine.logger_manager
        if manager is None:
            return
        get_output, record, step = core.get_output, manager.record, self.engine.step
        lost: list[Any] = []

        def noted() -> Any:
            outputs = get_output()
            lost[:] = [outputs.scheduler_stats] if outputs.scheduler_stats is not None else []
            return outputs

        def recorded(*args: Any, **kwargs: Any) -> None:
            lost.clear()
            record(*args, **kwargs)

        def stepped() -> Any:
            outputs = step()
            if lost:
                record(scheduler_stats=lost.pop(), iteration_stats=None)
            return outputs

        core.get_output, manager.record, self.engine.step = noted, recorded, stepped

    def _poison_new_blocks(self) -> None:
        tensors = list(self.worker_connector._worker._kv_caches.values())
        blocks = self.scheduler.kv_cache_config.num_blocks
        views = [t if t.shape[0] % blocks == 0 else t.transpose(0, 1) for t in tensors]
        assert all(v.shape[0] == blocks for v in views)
        hand_out = self.block_pool.get_new_blocks

        def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
            new = hand_out(*args, **kwargs)
            for block in new:
                for view in views:
                    view[block.block_id].fill_(POISON)
            return new

        self.block_pool.get_new_blocks = get_new_blocks

    # --- driving ---

    def add(self, ask: Ask) -> str:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": {"pega": dict(ask.pega)}} if ask.pega else None
        return self.track(ask, SamplingParams(temperature=0, max_tokens=ask.tokens, ignore_eos=True, extra_args=extra))

    def track(self, ask: Ask, params: Any, **request: Any) -> str:
        """Adds a request with sampling parameters and whatever else of its own."""
        self._count += 1
        request_id = f"r{self._count}"
        self.engine.add_request(request_id, {"prompt_token_ids": list(ask.prompt)}, params, **request)
        self.requests[request_id] = Running(ask)
        return request_id

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])
        self.requests[request_id].aborted = True

    def step(self) -> None:
        for output in self.engine.step():
            run = self.requests.get(output.request_id)
            if run is not None and output.outputs:
                run.tokens = list(output.outputs[0].token_ids)
                run.finished = output.finished
                run.params = output.kv_transfer_params or run.params

    def run(self, asks: Sequence[Ask], each_step: Callable[[int], None] = lambda step: None) -> list[Running]:
        """Adds all at once and steps until all have ended."""
        ids = [self.add(a) for a in asks]
        self.finish(each_step)
        return [self.requests[i] for i in ids]

    def finish(self, each_step: Callable[[int], None] = lambda step: None, limit_s: float = 120) -> None:
        deadline, step = time.monotonic() + limit_s, 0
        while self.engine.has_unfinished_requests() or self.scheduler.has_requests():
            assert time.monotonic() < deadline, f"not quiet after {limit_s} s: {self.counts()}"
            each_step(step)
            self.step()
            step += 1

    def drop_gpu_cache(self) -> None:
        """Forgets what the GPU cache holds, so that the next hit can only come from the host pool."""
        self.finish()
        assert self.llm.reset_prefix_cache(), "blocks are still held"

    def forget_all(self) -> None:
        self.finish()
        assert self.engine.reset_prefix_cache(reset_connector=True)

    # --- looking ---

    def counts(self) -> dict[str, int]:
        return dict(self.connector._scheduler.counts())

    def watch(self) -> Watch:
        return Watch(self)

    def assert_idle(self) -> None:
        """Nothing is pinned, held or in flight, and every block but the null block is free."""
        self.finish()
        counts = self.counts()
        assert {k: counts[k] for k in ("pinned", "reserved", "held_blocks", "jobs", "requests")} == {
            "pinned": 0, "reserved": 0, "held_blocks": 0, "jobs": 0, "requests": 0,
        }  # fmt: skip
        assert counts["free"] + counts["ready"] == counts["total"]
        assert self.block_pool.get_num_free_blocks() == self.scheduler.kv_cache_config.num_blocks - 1
        self.assert_workers_idle()
        from vllm_pega_connector import guard

        assert guard.faults == 0, "an exception was swallowed; see the log"

    def assert_workers_idle(self) -> None:
        worker = self.worker_connector._worker
        assert worker._engine.pending == 0 and not worker._loads


class Watch:
    """What the connector did between two moments, seen from its own statistics and vLLM's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.loads = self.saves = self.hit_tokens = 0
        self.failures = 0
        self.transfers: list[list[Any]] = []

    def __enter__(self) -> Watch:
        worker = self._engine.worker_connector._worker
        self._add = add = worker._stats.__class__.add_transfer

        def add_transfer(stats: Any, result: Any) -> None:
            self.transfers.append([result.direction, result.backend, result.status, result.bytes])
            add(stats, result)

        worker._stats.__class__.add_transfer = add_transfer
        self._hits_before = self._engine.hit_tokens
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.worker_connector._worker._stats.__class__.add_transfer = self._add
        self.hit_tokens = self._engine.hit_tokens - self._hits_before
        done = [t for t in self.transfers if t[2] == "done"]
        self.loads = sum(t[0] == "load" for t in done)
        self.saves = sum(t[0] == "save" for t in done)
        self.failures = len(self.transfers) - len(done)


def _reference_main(model: str, answers: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, enable_prefix_caching=False, num_gpu_blocks_override=300, **COMMON)
    with os.fdopen(int(answers), "w") as out:
        for line in sys.stdin:
            asks = json.loads(line)
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt, _, _ in asks.values()],
                [
                    SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=likely)
                    for _, tokens, likely in asks.values()
                ],
                use_tqdm=False,
            )
            answers_now: dict[str, Any] = {}
            for key, output in zip(asks, outputs, strict=True):
                found = output.outputs[0]
                first = found.logprobs and {token: value.logprob for token, value in found.logprobs[0].items()}
                answers_now[key] = first or list(found.token_ids)
            out.write(json.dumps(answers_now) + "\n")
            out.flush()


if __name__ == "__main__":
    _reference_main(*sys.argv[1:])
