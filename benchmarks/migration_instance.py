# SPDX-License-Identifier: Apache-2.0
"""One vLLM instance with PegaConnector, or with vLLM's MooncakeConnector, in a process of its own, stepped by its main
thread and told what to do line by line, for benchmarks/migration_goals.py and handover.py. Times are
time.monotonic(): one clock for all processes of a machine."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import queue
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.line_process import ROOT, LineProcess

BLOCK = {"tiny": 32}  # tokens; CPU attention wants 32


class Handle(LineProcess):
    """The other process, from outside."""

    def __init__(self, model: str, host_gib: float, gpu_blocks: int, connector: str = "pega",
                 migration: dict[str, Any] | None = None) -> None:  # fmt: skip
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        super().__init__(
            lambda answers: [
                sys.executable,
                __file__,
                answers,
                model,
                str(host_gib),
                str(gpu_blocks),
                connector,
                json.dumps(migration or {}),
            ],
            {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port())},
            stdout=sys.stderr,
        )
        self.agent = ""  # set by whoever waited for "ready"

    def answer(self) -> Any:
        try:
            return super().answer()
        except EOFError as error:
            raise SystemExit(str(error)) from None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Pega:
    """Another instance's blocks are looked for by their hashes."""

    def __init__(self, host_gib: float, migration: dict[str, Any]) -> None:
        self.config = {
            "kv_connector": "PegaConnector",
            "kv_connector_module_path": "vllm_pega_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "host_pool_gib": host_gib,
                "migration": {"listen": "127.0.0.1:0", "transport": "tcp", "timeout_s": 60, "model_id": "bench"}
                | migration,
            },
        }
        self.pulls: list[dict[str, Any]] = []

    def attach(self, scheduler_connector: Any) -> None:
        self._migration = scheduler_connector._scheduler._migration
        client_poll = self._migration._client.poll

        def poll() -> Any:
            events = client_poll()
            for e in events:
                if hasattr(e, "published"):
                    self.pulls.append({"bytes": e.nbytes, "reason": e.reason, "blocks": sum(e.published),
                                       "asked": len(e.published), "seconds": e.seconds, "gap_s": e.gap_s,
                                       "seen": time.monotonic()})  # fmt: skip
            return events

        self._migration._client.poll = poll

    def address(self) -> str:
        while not self._migration.port:
            self._migration.poll()
            if self._migration.failure:
                raise SystemExit(self._migration.failure)
            time.sleep(0.01)
        return f"127.0.0.1:{self._migration.port}"

    @property
    def asked(self) -> int:
        """Pulls so far."""
        return int(self._migration._next_pull)

    def give(self, _seed: int) -> dict[str, Any]:
        return {}

    def take(self, _seed: int, source: str) -> dict[str, Any]:
        return {"pega": {"source": source}}


class Mooncake:
    """vLLM's own: the source's GPU blocks are held for one request, which is named when its prompt is prefilled."""

    def __init__(self, _host_gib: float, _migration: dict[str, Any]) -> None:
        self.config = {
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        self.pulls: list[dict[str, Any]] = []
        self.asked = 0

    def attach(self, scheduler_connector: Any) -> None:
        self._engine_id = scheduler_connector.engine_id

    def address(self) -> str:
        return f"{self._engine_id}@http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}"

    def give(self, seed: int) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"t{seed}"}

    def take(self, seed: int, source: str) -> dict[str, Any]:
        engine_id, _, url = source.partition("@")
        return {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": f"t{seed}",
                "remote_engine_id": engine_id, "remote_bootstrap_addr": url}  # fmt: skip


class Served:
    def __init__(self, model: str, host_gib: float, gpu_blocks: int, connector: str, migration: dict[str, Any]) -> None:
        import torch
        from shapes import model_options
        from vllm import EngineArgs, LLMEngine

        options: dict[str, Any] = {"enforce_eager": True}
        if torch.cuda.is_available():
            sizes = [1, 2, 4, 8, 16, 24, 32]
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
            options = {"compilation_config": graphs, "gpu_memory_utilization": 0.3}
        self.block = BLOCK.get(model, 16)
        self.max_length = 4096 if model == "tiny" else 40960
        self.connector = {"pega": Pega, "mooncake": Mooncake}[connector](host_gib, migration)
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(**model_options(model), skip_tokenizer_init=True, max_model_len=self.max_length,
                       max_num_batched_tokens=8192, num_gpu_blocks_override=gpu_blocks, block_size=self.block,
                       enable_prefix_caching=True, async_scheduling=False, seed=0, max_num_seqs=64,
                       kv_transfer_config=self.connector.config, **options)
        )  # fmt: skip
        core: Any = self.engine.engine_core
        self.connector.attach(core.engine_core.scheduler.connector)
        self.names = itertools.count()
        self.cached_tokens: dict[str, int] = {}  # of a request's prompt, wherever they came from
        self.streams: dict[str, float] = {}  # name: when its last token came
        self.tokens: list[tuple[float, float]] = []  # when one came, and how long after the one before
        self.commands: queue.Queue[list[Any]] = queue.Queue()

    def add(self, seed: int, length: int, tokens: int, transfer: dict[str, Any] | None = None) -> str:
        from vllm import SamplingParams

        prompt = random.Random(seed).choices(range(10, 1000), k=length)
        name = f"r{next(self.names)}"
        extra = {"kv_transfer_params": transfer} if transfer else None
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def step(self) -> set[str]:
        """Those of this step that gave a token."""
        gave = set()
        for output in self.engine.step():
            if not (output.outputs and output.outputs[0].token_ids):
                continue
            now = time.monotonic()
            gave.add(output.request_id)
            self.cached_tokens[output.request_id] = output.num_cached_tokens
            if output.request_id in self.streams:
                if self.streams[output.request_id]:
                    self.tokens.append((now, now - self.streams[output.request_id]))
                self.streams[output.request_id] = now
        return gave

    # --- commands ---

    def ready(self) -> str:
        return self.connector.address()

    def background(self, count: int, seed: int, context: int) -> int:
        """That many decode streams, from a moment on at which each has given some tokens."""
        self.streams = {self.add(seed + n, context, self.max_length - context - 8): 0.0 for n in range(count)}
        for _ in range(8 if count else 0):
            while not self.step():
                pass
        while not all(self.streams.values()):
            self.step()
        return count

    def quiet(self) -> int:
        """Ends the streams."""
        self.engine.abort_request(list(self.streams))
        self.streams = {}
        while self.engine.has_unfinished_requests():
            self.step()
        return len(self.tokens)

    def run(self, seed: int, length: int, source: str | None, hold_gil_s: float) -> dict[str, Any]:
        """One prompt to its first token. hold_gil_s: the main thread holds the GIL so long once its pull is posted."""
        return self.one(seed, length, self.connector.take(seed, source) if source else None, hold_gil_s)

    def give(self, seed: int, length: int) -> dict[str, Any]:
        """The same for one that another instance will take."""
        return self.one(seed, length, self.connector.give(seed))

    def one(self, seed: int, length: int, transfer: dict[str, Any] | None, hold_gil_s: float = 0) -> dict[str, Any]:
        pulls, asked = len(self.connector.pulls), self.connector.asked
        start = time.monotonic()
        name = self.add(seed, length, 1, transfer)
        if hold_gil_s:
            while self.connector.asked == asked:
                self.step()
            hold(hold_gil_s)
        while name not in self.step():
            pass
        end = time.monotonic()
        return {"start": start, "end": end, "ttft_s": end - start, "pulls": self.connector.pulls[pulls:],
                "cached_tokens": self.cached_tokens[name]}  # fmt: skip

    def settle(self) -> float:
        """Lets saves end: a pause, then steps; twice, as their ends may free others."""
        for _ in range(2):
            end = time.monotonic() + 0.25
            name = self.add(random.randrange(1 << 40), 20, 6)
            while time.monotonic() < end or name:
                if name in self.step():
                    name = ""
                if not self.engine.has_unfinished_requests():
                    time.sleep(0.001)
                    name = ""
        return time.monotonic()

    def decoded(self) -> list[tuple[float, float]]:
        tokens, self.tokens = self.tokens, []
        return tokens

    def hold_gil(self, seconds: float) -> dict[str, float]:
        start = time.monotonic()
        hold(seconds)
        return {"start": start, "end": time.monotonic()}

    def serve(self, answers: Any) -> None:
        def read() -> None:
            for line in sys.stdin:
                self.commands.put(json.loads(line))
            os._exit(0)  # whatever the main thread does

        threading.Thread(target=read, daemon=True).start()
        while True:
            busy = self.engine.has_unfinished_requests()
            try:
                command, *args = self.commands.get(block=not busy)
            except queue.Empty:
                self.step()
                continue
            answers.write(json.dumps(getattr(self, command)(*args)) + "\n")
            answers.flush()


def hold(seconds: float) -> None:
    """Through the C API and without giving up the GIL: what a long forward pass does to the threads of its process."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def main(answers: str, model: str, host_gib: str, gpu_blocks: str, connector: str, migration: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    served = Served(model, float(host_gib), int(gpu_blocks), connector, json.loads(migration))
    with os.fdopen(int(answers), "w") as out:
        served.serve(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
