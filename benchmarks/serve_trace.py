# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` under a synthetic trace in Mooncake's format, without a connector, with ours and with vLLM's own.

    python benchmarks/serve_trace.py --profile conversation --requests 300 --json trace.json
    python benchmarks/serve_trace.py --tiny --connectors none pega                             # on CPU

The trace (benchmarks/mooncake_trace.py) is replayed at its own times by `vllm bench serve --dataset-name timed_trace`,
so the load does not wait for slow answers. Each connector gets a fresh server and the same trace, prompts and host
memory. Weights and tokenizer are dummies: nothing is downloaded.

Hit rates are shares of all prompt tokens: on the GPU, and brought by the connector; beside them what an unbounded
cache would have. A run whose connector brought nothing is VOID.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_trace import BLOCK, PROFILES, generate, hit_rate, scaled
from serving_traffic import SETUPS, Setup, kv_transfer
from shapes import SHAPES, model_options, write_tokenizer

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # vLLM's trace replayer makes prompts from Python's hash: the same ones for every server
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
START_TIMEOUT_S = 300


@dataclass(frozen=True)
class Scale:
    """What the trace and the server shrink to, together."""

    block_tokens: int  # of the trace's blocks
    time_factor: float
    longest: int
    host_bytes: int
    server: tuple[str, ...]


GRAPHS = '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}'
FULL = Scale(BLOCK, 1.0, 38_000, 40 * 10**9, (
    "--block-size", "16", "--num-gpu-blocks-override", "8192", "--gpu-memory-utilization", "0.5",
    "--compilation-config", GRAPHS,
))  # fmt: skip
TINY = Scale(32, 3.0, 1900, 256 * 10**6, (
    "--block-size", "32", "--num-gpu-blocks-override", "128", "--max-num-seqs", "8", "--enforce-eager",
))  # fmt: skip


def vllm(*arguments: str) -> list[str]:
    """vLLM's command line; its console script is not there where vLLM is only on PYTHONPATH."""
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        text: str = answer.read().decode()
        return text


@contextmanager
def server(model: str, setup: Setup, scale: Scale, log: Path) -> Iterator[str]:
    """A running server's address. Ends it, and its workers, in the end."""
    port = free_port()
    load_format = ("--load-format", "dummy") if not any(Path(model).glob("*.safetensors")) else ()
    command = vllm("serve", model, *load_format, "--port", str(port), "--served-model-name", "model",
                   "--max-model-len", str(scale.longest + 2048), *scale.server)  # fmt: skip
    if transfer := kv_transfer(setup, scale.host_bytes):
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, **ENVIRONMENT, **setup.environment},
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_ready(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}; {log} says why")
        try:
            get(f"http://127.0.0.1:{port}/health")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S} s; {log} says why")


def counters(address: str) -> dict[str, float]:
    """vLLM's metrics, summed over labels."""
    sums: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:[\w:]+)(?:\{.*\})? (\S+)$", get(address + "/metrics"), re.MULTILINE):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def replay(address: str, model: str, trace: Path, requests: int, block: int, result: Path) -> dict[str, Any]:
    command = vllm(
        "bench", "serve", "--base-url", address, "--backend", "vllm", "--endpoint", "/v1/completions",
        "--model", "model", "--tokenizer", model, "--dataset-name", "timed_trace", "--dataset-path", str(trace),
        "--timed-trace-chunk-hash-size", str(block), "--timed-trace-sec-multiplier", "0.001",
        "--num-prompts", str(requests), "--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,99,99.9", "--save-result", "--result-dir", str(result.parent),
        "--result-filename", result.name, "--disable-tqdm",
    )  # fmt: skip
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vllm bench serve ended with code {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(result.read_text())
    return {k: v for k, v in found.items() if isinstance(v, int | float)}


def measure(setup: Setup, model: str, scale: Scale, trace: Path, requests: int, stem: Path) -> dict[str, Any]:
    with server(model, setup, scale, stem.with_suffix(".log")) as address:
        before = counters(address)
        bench = replay(address, model, trace, requests, scale.block_tokens, stem.with_suffix(".bench.json"))
        grown = {k: v - before.get(k, 0.0) for k, v in counters(address).items()}
    prompt = grown["vllm:prompt_tokens_total"]
    external = grown.get("vllm:external_prefix_cache_hits_total", 0.0)
    return {
        "bench": bench,
        "gpu_hit_rate": grown["vllm:prefix_cache_hits_total"] / prompt,
        "external_hit_rate": external / prompt,
        "counters": {k: v for k, v in grown.items() if "cache" in k or "pega" in k or "offload" in k},
        "void": "no token came from the connector" if setup.connector and not external else "",
    }


def table(document: dict[str, Any]) -> str:
    trace = document["trace"]
    lines = [
        f"{trace['requests']} requests in {trace['seconds']:.0f} s, Mooncake-format, synthetic ({trace['profile']}, "
        f"seed {trace['seed']}); an unbounded cache would hit {trace['hit_rate']:.3f} of the blocks\n",
        "| connector | done / failed | seconds | TTFT ms mean / p50 / p99 | ITL ms p50 / p99 / p99.9 | e2e ms mean | "
        "GPU hits | connector's hits |",
        "|---" * 8 + "|",
    ]
    for name, found in document["connectors"].items():
        if "error" in found:
            lines.append(f"| {name} | {found['error']} |" + " |" * 6)
            continue
        b = found["bench"]
        cells = (
            name + (f" (VOID: {found['void']})" if found["void"] else ""),
            f"{b['completed']} / {b.get('failed', 0)}",
            f"{b['duration']:.1f}",
            " / ".join(f"{b[f'{key}_ttft_ms']:.1f}" for key in ("mean", "p50", "p99")),
            " / ".join(f"{b[f'{key}_itl_ms']:.2f}" for key in ("p50", "p99", "p99.9")),
            f"{b['mean_e2el_ms']:.1f}",
            f"{found['gpu_hit_rate']:.3f}",
            f"{found['external_hit_rate']:.3f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"one of {', '.join(SHAPES)}, or a path with weights and tokenizer")
    parser.add_argument("--tiny", action="store_true", help="a small model and a trace scaled to it, for CPU")
    parser.add_argument("--connectors", nargs="+", choices=SETUPS, default=["none", "pega", "offloading", "simple"])
    parser.add_argument("--profile", choices=PROFILES, default="conversation")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-factor", type=float, default=1.0, help="0.5 replays the trace twice as fast")
    parser.add_argument("--json", type=Path, default=Path("serve-trace.json"))
    args = parser.parse_args()

    scale = TINY if args.tiny else FULL
    model = args.model or ("tiny" if args.tiny else "qwen3-4b")
    if model in SHAPES:
        folder = Path(model_options(model)["model"])
        write_tokenizer(folder, SHAPES[model]["vocab_size"])
        model = str(folder)
    entries = generate(PROFILES[args.profile], args.requests, args.seed)
    entries = scaled(entries, scale.block_tokens, args.time_factor * scale.time_factor, scale.longest)
    trace = args.json.with_suffix(".trace.jsonl")
    trace.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    document: dict[str, Any] = {
        "options": {k: str(v) for k, v in vars(args).items()},
        "trace": {"requests": len(entries), "seconds": entries[-1]["timestamp"] / 1e3, "profile": args.profile,
                  "seed": args.seed, "hit_rate": hit_rate(entries)},
        "connectors": {},
    }  # fmt: skip
    for name in args.connectors:
        stem = args.json.with_name(f"{args.json.stem}-{name}.json")
        try:
            found = measure(SETUPS[name], model, scale, trace, len(entries), stem)
        except RuntimeError as error:
            found = {"error": str(error)}
        document["connectors"][name] = found
        args.json.write_text(json.dumps(document, indent=1))
        print(f"{name}: {found.get('error', 'done')}", flush=True)
    print(table(document))
    if any(found.get("void") or "error" in found for found in document["connectors"].values()):
        sys.exit("not everything was measured: see above")


if __name__ == "__main__":
    main()
