# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in this process under benchmarks/serving_traffic.py: what is asked of it, and what is measured."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import numpy as np
from shapes import model_options

RESET_TIMEOUT_S = 20


@dataclass(frozen=True)
class Sizes:
    """How much of everything. Tokens, unless the name says otherwise."""

    block: int = 16
    gpu_blocks: int = 4096
    max_length: int = 40960
    batched: int = 8192
    host_bytes: int = 40 * 10**9
    context: int = 2048  # of a decode stream at its start
    load_prompt: int = 8192
    load_prompts: int = 12  # together more than the GPU's cache, so that each has left it when it comes again
    store_prompt: int = 4096
    ttft_prompts: tuple[int, ...] = (8192, 32768)
    throughput_requests: int = 64
    alone_steps: int = 120
    period_s: float = 0.3
    excess_above_ms: float = 10.0
    # Prompts that are to be found again generate this many tokens: a connector that saves a prompt in portions, or
    # only once its request decodes, gets the time to.
    fill_tokens: int = 32


TINY = Sizes(block=32, gpu_blocks=128, max_length=2048, batched=512, host_bytes=64 * 10**6, context=64, load_prompt=512,
             store_prompt=256, ttft_prompts=(512, 1024), throughput_requests=8, alone_steps=40, period_s=0.15,
             excess_above_ms=30.0)  # fmt: skip


# Fields of the connectors' metadata that say that transfers are handed over, and how many steps later they are:
# OffloadingConnector submits a store at the start of the next step.
HANDED_OVER = {"jobs": 0, "load_jobs": 0, "store_jobs": 1, "load_gpu_blocks": 0, "store_gpu_blocks": 0}


@dataclass
class Watch:
    """Wraps every public method of the connector's two sides; notes their time on this thread, step by step."""

    steps: list[dict[str, float]] = field(default_factory=lambda: [defaultdict(float)])
    active: set[int] = field(default_factory=set)
    external_tokens: int = 0
    transfers: list[tuple[str, float, float]] = field(default_factory=list)  # direction, bytes, seconds
    drops: Counter[str] = field(default_factory=Counter)
    _thread: int = field(default_factory=threading.get_ident)
    _depth: int = 0

    def wrap(self, connector: Any) -> None:
        kind = type(connector)
        for name in dir(kind):
            if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(kind, name)):
                setattr(connector, name, self._timed(name, getattr(connector, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth or threading.get_ident() != self._thread:
                return method(*args, **kwargs)  # called by another of its methods, or beside the engine's thread
            self._depth = 1
            start = time.perf_counter()
            try:
                result = method(*args, **kwargs)
            finally:
                self._depth = 0
                self.steps[-1][name] += time.perf_counter() - start
            self._look(name, args, kwargs, result)
            return result

        return timed

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "update_state_after_alloc":
            self.external_tokens += kwargs["num_external_tokens"] if "num_external_tokens" in kwargs else args[2]
        elif name == "build_connector_meta":
            self.active |= {len(self.steps) - 1 + later for f, later in HANDED_OVER.items() if getattr(result, f, None)}
        elif name == "get_kv_connector_stats" and result is not None:
            self.transfers += transfers(result.data)
            self.drops.update(result.data.get("drops", {}))

    def end_step(self) -> None:
        self.steps.append(defaultdict(float))

    def clear(self) -> None:
        self.steps, self.active, self.external_tokens = [defaultdict(float)], set(), 0
        self.transfers, self.drops = [], Counter()


def transfers(stats: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(direction, bytes, seconds) from our statistics, or from OffloadingConnector's (vLLM 0.26 and newer)."""
    found = [(t[0], t[3], t[-1]) for t in stats.get("transfers", ()) if t[2] == "done"]
    for direction, theirs in (("load", "load"), ("save", "store")):
        nbytes, seconds = (
            sum(stats.get("data", {}).get(f"vllm:kv_offload_{theirs}_{what}", {}).values())
            for what in ("bytes", "time")
        )
        if nbytes:
            found.append((direction, nbytes, seconds))
    return found


@dataclass
class Window:
    """What decode streams met while something, or nothing, happened beside them."""

    gaps: list[list[float]]  # milliseconds between tokens, by stream
    side_ms: list[float]
    step_ms: list[float]


class Engine:
    def __init__(self, model: str, sizes: Sizes, kv_transfer: dict[str, Any] | None) -> None:
        import torch
        import vllm
        from vllm import EngineArgs, LLMEngine

        began = time.perf_counter()
        self.sizes = sizes
        cuda = torch.cuda.is_available()
        options: dict[str, Any] = {"enforce_eager": True}
        if cuda:
            # Nothing is compiled, prefill runs eagerly, decode in graphs.
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
            options = {"compilation_config": graphs, "gpu_memory_utilization": 0.5}
        if kv_transfer is not None:
            options["kv_transfer_config"] = kv_transfer
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(**model_options(model), skip_tokenizer_init=True, max_model_len=sizes.max_length,
                       max_num_batched_tokens=sizes.batched, num_gpu_blocks_override=sizes.gpu_blocks,
                       block_size=sizes.block, enable_prefix_caching=True, async_scheduling=False, seed=0, **options)
        )  # fmt: skip
        self.watch = Watch()
        self.connected = kv_transfer is not None
        core: Any = self.engine.engine_core
        core = core.engine_core
        if self.connected:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.watch.wrap(core.scheduler.connector)
            self.watch.wrap(get_kv_transfer_group())
        self._vocabulary = self.engine.vllm_config.model_config.get_vocab_size()
        self._names, self._seeds = itertools.count(), itertools.count(10**6)
        kv = core.model_executor.driver_worker.worker.model_runner.kv_caches
        tensors = list(kv.values()) if isinstance(kv, dict) else [t for t in kv if t is not None]
        self.facts = {
            "engine_start_s": time.perf_counter() - began,
            "vllm": vllm.__version__,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "v2_model_runner": bool(getattr(self.engine.vllm_config, "use_v2_model_runner", False)),
            "kv_tensors": len(tensors),
            "kv_shape": list(tensors[0].shape),
            "kv_strides": list(tensors[0].stride()),
        }

    def close(self) -> None:
        """Gives back what outlives the process: OffloadingConnector's tier is a file."""
        self.engine.engine_core.shutdown()

    # --- requests ---

    def prompt(self, tokens: int, seed: int | None = None) -> list[int]:
        """Random tokens; without a seed, ones that no other prompt begins with."""
        rng = np.random.default_rng(next(self._seeds) if seed is None else seed)
        return rng.integers(3, self._vocabulary - 8, tokens).tolist()

    def add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        name = f"r{next(self._names)}"
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> Any:
        outputs = self.engine.step()
        self.watch.end_step()
        return outputs

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def settle(self) -> None:
        """Lets pending saves end and be noticed: a pause, then steps; twice, as their ends may free others."""
        for _ in range(2):
            time.sleep(0.15)
            self.add(self.prompt(20), 6)
            self.drain()

    def reset(self) -> None:
        """Empties the GPU's prefix cache, not the connector's. Blocks that saves hold delay it."""
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while not self.engine.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the prefix cache could not be reset for {RESET_TIMEOUT_S} s: blocks are held")
            self.settle()

    def time_to_first_token(self, prompt: list[int], tokens: int) -> float:
        """Milliseconds; runs the request to its end."""
        start = time.perf_counter()
        self.add(prompt, tokens)
        first = None
        while self.engine.has_unfinished_requests():
            if any(o.outputs and o.outputs[0].token_ids for o in self.step()) and first is None:
                first = (time.perf_counter() - start) * 1e3
        assert first is not None
        return first

    def fill(self, prompts: Sequence[list[int]]) -> None:
        for prompt in prompts:
            self.add(prompt, self.sizes.fill_tokens)
            self.drain()
        self.settle()

    def share_found(self, prompts: Sequence[list[int]]) -> float:
        """Of these prompts' tokens, the share that the connector gives back once the GPU has forgotten them."""
        self.reset()
        before = self.watch.external_tokens
        for prompt in prompts:
            self.add(prompt, 1)
            self.drain()
        return (self.watch.external_tokens - before) / sum(map(len, prompts))

    # --- decode streams ---

    def streams(self, count: int) -> list[str]:
        """Starts pure decode; returns once each stream has 16 tokens."""
        names = [self.add(self.prompt(self.sizes.context), self.sizes.max_length - self.sizes.context - 8)
                 for _ in range(count)]  # fmt: skip
        seen: Counter[str] = Counter()
        while min(seen[n] for n in names) < 16:
            seen.update(o.request_id for o in self.step())
        return names

    def stop(self, streams: list[str]) -> None:
        self.engine.abort_request(streams)
        self.drain()

    def window(self, streams: list[str], prompts: Sequence[list[int]] = (), tokens: int = 1) -> Window:
        """Steps while one of `prompts` arrives every period; without any, for a fixed number of steps.

        The time that adding a request takes here is left out of the gaps: a server does it on another thread.
        """
        gaps: dict[str, list[float]] = {name: [] for name in streams}
        last: dict[str, float] = {}
        started: dict[str, float] = {}
        result = Window(list(gaps.values()), [], [])
        coming = list(prompts)
        began = time.perf_counter()
        end = began + len(coming) * self.sizes.period_s
        adding = 0.0
        while (
            coming or started or time.perf_counter() < end if prompts else len(result.step_ms) < self.sizes.alone_steps
        ):
            now = time.perf_counter()
            if coming and now >= began + (len(prompts) - len(coming)) * self.sizes.period_s:
                started[self.add(coming.pop(0), tokens)] = now
                adding += time.perf_counter() - now
            before = time.perf_counter()
            outputs = self.step()
            now = time.perf_counter()
            result.step_ms.append((now - before) * 1e3)
            for output in outputs:
                name = output.request_id
                if name in gaps:
                    if name in last:
                        gaps[name].append((now - last[name] - adding) * 1e3)
                    last[name] = now
                elif name in started and output.outputs and output.outputs[0].token_ids:
                    result.side_ms.append((now - started.pop(name)) * 1e3)
            adding = 0.0
        return result
