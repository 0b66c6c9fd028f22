# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` process on CPU: started, asked over HTTP, and stopped whatever happens."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_NAME = "tiny"
# vLLM for CPU. OMP: two threads that the system may place; binding to cores fails in many containers.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the number of blocks is what limits the cache here
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerError(RuntimeError):
    """The server did not start, died, or gave an answer that makes no sense; says where its log lies."""


@dataclass
class Answer:
    """One completion. `cached_tokens`: prompt tokens that were not computed, from whichever cache."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    seconds_to_first_token: float


class Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path):
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.log = log

    def complete(self, prompt: str, max_tokens: int, kv_transfer_params: dict[str, Any] | None = None) -> Answer:
        """Greedy completion, streamed so that the time to the first token can be seen."""
        body: dict[str, Any] = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = kv_transfer_params
        text, first, usage = "", None, None
        start = time.perf_counter()
        with self._open("/v1/completions", body) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ServerError(f"the server answered with an error: {event['error']}")
                if event["choices"] and first is None:
                    first = time.perf_counter() - start
                text += "".join(choice["text"] for choice in event["choices"])
                usage = event.get("usage") or usage
        if first is None or usage is None:
            raise ServerError(f"the server's stream ended early; its log: {self.log}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(text, usage["prompt_tokens"], cached, first)

    def metrics(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """/metrics as {name: [(labels, value), ...]}."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        with self._open("/metrics") as response:
            for line in response.read().decode().splitlines():
                sample = re.fullmatch(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)", line)
                if sample:
                    labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', sample[2] or ""))
                    found.setdefault(sample[1], []).append((labels, float(sample[3])))
        return found

    def total(self, metric: str) -> float:
        """Sum of a counter over all its labels; 0 if the server does not have it."""
        return sum(value for _, value in self.metrics().get(metric, []))

    def wait_until_ready(self, timeout_s: float, tick: Callable[[float], None]) -> None:
        start = time.monotonic()
        while (waited := time.monotonic() - start) < timeout_s:
            if self.process.poll() is not None:
                raise ServerError(f"vllm serve ended with status {self.process.returncode}.\n{self.log_end()}")
            try:
                self._open("/health").close()
                return
            except (urllib.error.URLError, OSError):
                tick(waited)
                time.sleep(0.5)
        raise ServerError(f"vllm serve was not ready after {timeout_s:.0f} s.\n{self.log_end()}")

    def log_end(self, lines: int = 20) -> str:
        with self.log.open(errors="replace") as file:
            end = "".join(deque(file, lines))
        return f"The end of {self.log}:\n{end}"

    def stop(self) -> None:
        """Asks politely, then ends the whole process group: engine and worker processes too."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=30)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            # No proxy: the server is on this machine.
            return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=300)
        except urllib.error.HTTPError as error:
            raise ServerError(f"{path} answered {error.code}: {error.read().decode(errors='replace')}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(
    model: Path, arguments: list[str], log: Path, tick: Callable[[float], None], port: int = 0
) -> Iterator[Server]:
    """`vllm serve MODEL ARGUMENTS`, ready to be asked; `tick(seconds waited)` is called while it starts."""
    port = port or free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,  # a process group of its own, to be ended as a whole
        )
    server = Server(process, port, log)
    try:
        server.wait_until_ready(300, tick)
        yield server
    finally:
        server.stop()
