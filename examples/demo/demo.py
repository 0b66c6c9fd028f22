# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny model through vLLM on CPU with few KV blocks, so that prompts are evicted and come back, once without
and once with the connector; shows where each prompt's tokens came from and checks that the texts are the same.

Exit status: 0 if tokens came from the host pool and every text is the same, else 1.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from server import Answer, Server, ServerError, serve

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tests.support.tiny_model import random_prompt  # noqa: E402

# 20 million parameters: large enough for two cores to take about a second over a prompt, so that a hit shows.
MODEL_SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "kv-heads": 4}
BLOCK_TOKENS = 32  # CPU attention wants a multiple of 32
GPU_BLOCKS = 72  # 2,304 tokens: two of the prompts fit, and any three evict a fourth wholly
PROMPT_TOKENS = 900
ANSWER_TOKENS = 16
HOST_POOL_GIB = 0.25  # 512 blocks of 512 KiB

SERVE_ARGUMENTS = [
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8", "--enforce-eager"),
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(GPU_BLOCKS)),
    "--enable-prompt-tokens-details",
]
CONNECTOR = {
    "kv_connector": "PegaConnector",
    "kv_connector_module_path": "vllm_pega_connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_pool_gib": HOST_POOL_GIB},
}

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass
class Request:
    what: str
    prompt: str
    load_policy: str | None = None


@dataclass
class Served:
    answer: Answer
    from_host_pool: int  # tokens


def requests() -> list[Request]:
    """Four prompts that do not fit the GPU cache together, then again, each loaded by another backend; then one that
    is still in the GPU cache, and a conversation that goes on."""
    prompts = {name: random_prompt(PROMPT_TOKENS, seed) for seed, name in enumerate("ABCD")}
    first = [Request(name, prompt) for name, prompt in prompts.items()]
    policies = ["memcpy", "kernel", "chunked", "staged"]
    again = [
        Request(f"{name} again", prompt, policy)
        for (name, prompt), policy in zip(prompts.items(), policies, strict=True)
    ]
    follow_up = f"{prompts['A']} {random_prompt(100, seed=9)}"
    return [*first, *again, Request("D at once again", prompts["D"]), Request("A, 100 words more", follow_up)]


def run(title: str, model: Path, arguments: list[str], log: Path) -> tuple[list[Served], dict[str, Any]]:
    """Starts a server, sends every request in turn, stops it. Returns what was served and the last metrics."""
    start = time.monotonic()
    console.print(f"{title}: starting vllm serve (log: {log.relative_to(ROOT)})")
    with console.status("") as status:

        def tick(waited: float) -> None:
            status.update(f"{title}: starting, {waited:.0f} s; 20 to 60 s are usual")

        with serve(model, arguments, log, tick) as server:
            console.print(f"{title}: ready after {time.monotonic() - start:.0f} s")
            server.complete(random_prompt(BLOCK_TOKENS // 2, seed=10), 2)  # the first request pays for warming up
            served = []
            for number, request in enumerate(todo := requests(), start=1):
                status.update(f"{title}: request {number} of {len(todo)}, {request.what}")
                served.append(ask(server, request, with_connector="--kv-transfer-config" in arguments))
            metrics = settled_metrics(server)
            status.update(f"{title}: stopping")
    console.print(f"{title}: {len(served)} requests served, stopped after {time.monotonic() - start:.0f} s")
    return served, metrics


def ask(server: Server, request: Request, with_connector: bool) -> Served:
    """One request at a time: what vLLM's counter of external hits gains is this request's share."""
    hits = "vllm:external_prefix_cache_hits_total"
    params = {"pega": {"load_policy": request.load_policy}} if with_connector and request.load_policy else None
    before = server.total(hits)
    answer = server.complete(request.prompt, ANSWER_TOKENS, params)
    return Served(answer, int(server.total(hits) - before))


def settled_metrics(server: Server, timeout_s: float = 10) -> dict[str, Any]:
    """/metrics once the counts of transfers stand still: the last saves end after the last answer."""
    deadline, last = time.monotonic() + timeout_s, -1.0
    while (now := server.total("vllm:pega_transfers_total")) != last and time.monotonic() < deadline:
        last = now
        time.sleep(1)
    return server.metrics()


def show_requests(plain: list[Served], served: list[Served]) -> None:
    table = Table(title="Where each prompt's tokens came from", title_justify="left")
    table.add_column("request", no_wrap=True)
    table.add_column("load\npolicy")
    for name in ("prompt\ntokens", "from GPU\ncache", "from host\npool", "\ncomputed"):
        table.add_column(name, justify="right")
    table.add_column("first token,\nwithout", justify="right")
    table.add_column("with\nconnector", justify="right")
    table.add_column("same\ntext", justify="center")
    for request, without, with_ in zip(requests(), plain, served, strict=True):
        answer = with_.answer
        table.add_row(
            request.what,
            request.load_policy or "auto",
            str(answer.prompt_tokens),
            str(answer.cached_tokens - with_.from_host_pool),
            f"[bold green]{with_.from_host_pool}[/]" if with_.from_host_pool else "0",
            str(answer.prompt_tokens - answer.cached_tokens),
            f"{without.answer.seconds_to_first_token * 1e3:,.0f} ms",
            f"{answer.seconds_to_first_token * 1e3:,.0f} ms",
            "yes" if answer.text == without.answer.text else "[bold red]NO[/]",
        )
    console.print(table)


def show_transfers(metrics: dict[str, Any]) -> None:
    table = Table(title="Transfers", title_justify="left")
    for name in ("direction", "backend"):
        table.add_column(name)
    for name in ("transfers", "MiB"):
        table.add_column(name, justify="right")

    def by_backend(metric: str) -> dict[tuple[str, str], float]:
        return {(labels["direction"], labels["backend"]): value for labels, value in metrics.get(metric, [])}

    nbytes = by_backend("vllm:pega_transfer_bytes_total")
    for key, count in sorted(by_backend("vllm:pega_transfers_total").items()):
        if count:
            table.add_row(*key, f"{count:.0f}", f"{nbytes.get(key, 0) / 2**20:,.1f}")
    console.print(table)


def verdict(plain: list[Served], served: list[Served]) -> int:
    different = sum(a.answer.text != b.answer.text for a, b in zip(plain, served, strict=True))
    from_host = sum(s.from_host_pool for s in served)
    total = sum(s.answer.prompt_tokens for s in served)
    if different:
        console.print(
            f"[bold red]FAILED[/]: {different} of {len(served)} texts differ from those without the connector."
        )
        return 1
    if not from_host:
        console.print("[bold red]FAILED[/]: no token came from the host pool.")
        return 1
    console.print(
        f"[bold green]OK[/]: {from_host:,} of {total:,} prompt tokens came from the host pool, "
        f"and all {len(served)} texts are the same as without the connector."
    )
    return 0


def make_model() -> Path:
    """In a process of its own, which keeps torch and transformers out of this one."""
    path = ROOT / ".cache" / "demo" / "model"
    options = [str(part) for name, value in MODEL_SHAPE.items() for part in (f"--{name}", value)]
    with console.status("Making a tiny model with random weights"):
        maker = [sys.executable, str(ROOT / "tests/support/tiny_model.py"), str(path), *options]
        made = subprocess.run(maker, capture_output=True, text=True)
    if made.returncode:
        raise ServerError(f"the tiny model could not be made:\n{made.stderr}")
    console.print(f"Model: {path.relative_to(ROOT)} (random weights, 20 million parameters)")
    return path


def main() -> int:
    # A terminating demo unwinds like an interrupted one, so that the server is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console.print(
        f"A vLLM with {GPU_BLOCKS} KV blocks of {BLOCK_TOKENS} tokens serves four prompts of {PROMPT_TOKENS} tokens in "
        "turn: too many, so each is evicted before it comes back. First without the connector, then with it."
    )
    logs = ROOT / ".cache" / "demo"
    try:
        model = make_model()
        plain, _ = run("Without the connector", model, SERVE_ARGUMENTS, logs / "serve-without.log")
        arguments = [*SERVE_ARGUMENTS, "--kv-transfer-config", json.dumps(CONNECTOR)]
        served, metrics = run("With the connector", model, arguments, logs / "serve-with.log")
    except ServerError as error:
        console.print("[bold red]FAILED[/]")
        console.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted; the server is stopped.")
        return 130
    show_requests(plain, served)
    show_transfers(metrics)
    return verdict(plain, served)


if __name__ == "__main__":
    sys.exit(main())
