# SPDX-License-Identifier: Apache-2.0
"""A grid of load and save policies on the same traffic, in one table.

For every pair of policies: prompts that nobody has sent yet are computed and saved, the GPU's prefix cache is dropped,
and the same prompts come back and are loaded, while other streams decode. Measured: time to the first token of the
loaded prompts, the gaps between tokens of the streams, and from /metrics what was moved and how fast.

    python examples/policy_sweep.py                                   # a tiny model on CPU, started here
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --kv-transfer-config ...  # or a server of yours, which must be idle
    python examples/policy_sweep.py --url http://localhost:8000 --prompt-tokens 8192 --csv sweep.csv

Policies are chosen per request, so one server serves the whole grid; what an objective does is seen by setting it
(VLLM_PEGA_OBJECTIVE) and sweeping `auto`. A row is one run: repeat (--rounds) before you believe small differences.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]

POLICIES = ("auto", "memcpy", "kernel", "chunked", "staged")
LIMIT_S = 600


@dataclass
class Row:
    load_policy: str
    save_policy: str
    first_token_ms: float  # median over the loaded prompts
    hit_tokens: int
    decode_p50_ms: float
    decode_p99_ms: float
    load_gib_per_s: float
    save_gib_per_s: float
    load_backends: str
    save_backends: str


class Api:
    def __init__(self, url: str, model: str | None) -> None:
        self.url = url.rstrip("/")
        self.model = model or json.load(self._open("/v1/models"))["data"][0]["id"]

    def _open(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=LIMIT_S)
        except urllib.error.HTTPError as error:
            hint = "; start the server with VLLM_SERVER_DEV_MODE=1" if "reset" in path and error.code == 404 else ""
            raise SystemExit(f"{self.url}{path}: {error}: {error.read(500).decode(errors='replace')}{hint}") from None
        except urllib.error.URLError as error:
            raise SystemExit(f"{self.url}{path}: {error.reason}") from None

    def stream(self, prompt: list[int], tokens: int, pega: dict[str, Any]) -> Iterator[float]:
        """The moments at which chunks of tokens came."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "kv_transfer_params": {"pega": pega}}  # fmt: skip
        with self._open("/v1/completions", body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise RuntimeError(line.decode())
                    yield time.perf_counter()

    def drop_gpu_cache(self) -> None:
        self._open("/reset_prefix_cache", {}).close()

    def counters(self) -> dict[tuple[str, str, str], float]:
        """(metric, direction, backend) -> value, summed over engines."""
        found: dict[tuple[str, str, str], float] = {}
        for family in text_string_to_metric_families(self._open("/metrics").read().decode()):
            for s in family.samples:
                key = (s.name.removeprefix("vllm:"), s.labels.get("direction", ""), s.labels.get("backend", ""))
                if key[0].startswith(("pega_transfer", "external_prefix_cache_hits_total")):
                    found[key] = found.get(key, 0) + s.value
        return found

    def settled(self) -> dict[tuple[str, str, str], float]:
        last: dict[tuple[str, str, str], float] = {}
        while (now := self.counters()) != last:
            last = now
            time.sleep(0.5)
        return now


class Decoding:
    """Streams that decode all the while; the gaps between their chunks are what transfers may disturb."""

    def __init__(self, api: Api, streams: int, tokens: int, seed: int) -> None:
        self.gaps: list[float] = []
        self._stop = threading.Event()
        rng = random.Random(f"streams of {seed}")  # none of them the beginning of a prompt
        prompts = [[rng.randrange(1, 1000) for _ in range(32)] for _ in range(streams)]
        self._threads = [threading.Thread(target=self._run, args=(api, p, tokens), daemon=True) for p in prompts]

    def _run(self, api: Api, prompt: list[int], tokens: int) -> None:
        while not self._stop.is_set():
            last = None
            for at in api.stream(prompt, tokens, {"save": False}):
                if last is not None:
                    self.gaps.append((at - last) * 1e3)
                last = at
                if self._stop.is_set():
                    return

    def __enter__(self) -> Decoding:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LIMIT_S)


def sweep_one(api: Api, args: argparse.Namespace, load: str, save: str, seed: int) -> Row:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1, 1000) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    pega = {"load_policy": load, "save_policy": save}
    before = api.settled()
    with Decoding(api, args.streams, args.stream_tokens, seed) as decoding:
        for prompt in prompts:
            list(api.stream(prompt, 1, pega))
    api.settled()
    api.drop_gpu_cache()
    first = []
    with Decoding(api, args.streams, args.stream_tokens, seed) as again:
        for prompt in prompts:
            start = time.perf_counter()
            first.append((next(api.stream(prompt, 1, pega)) - start) * 1e3)
    after = api.settled()
    gained = {key: value - before.get(key, 0) for key, value in after.items()}
    gaps = sorted(decoding.gaps + again.gaps) or [0.0]
    return Row(
        load, save, round(statistics.median(first), 2),
        int(gained.get(("external_prefix_cache_hits_total", "", ""), 0)),
        round(gaps[len(gaps) // 2], 2), round(gaps[int(len(gaps) * 0.99)], 2),
        _rate(gained, "load"), _rate(gained, "save"), _backends(gained, "load"), _backends(gained, "save"),
    )  # fmt: skip


def _rate(gained: dict[tuple[str, str, str], float], direction: str) -> float:
    def total(name: str) -> float:
        return sum(value for (n, d, _), value in gained.items() if (n, d) == (name, direction))

    seconds = total("pega_transfer_seconds_sum")
    return round(total("pega_transfer_bytes_total") / 2**30 / seconds, 2) if seconds else 0.0


def _backends(gained: dict[tuple[str, str, str], float], direction: str) -> str:
    used = [b for (n, d, b), v in gained.items() if (n, d) == ("pega_transfers_total", direction) and v]
    return "+".join(sorted(used))


@contextmanager
def server(args: argparse.Namespace) -> Iterator[Api]:
    """The server at --url, or one of our own over a tiny model on CPU."""
    if args.url:
        yield Api(args.url, args.model)
        return
    import os

    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    from server import serve  # the demo's

    from tests.support.tiny_model import make_tiny_model

    transfer = {"kv_connector": "PegaConnector", "kv_connector_module_path": "vllm_pega_connector",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"host_pool_gib": 0.25, "max_pending_save_blocks": 200}}  # fmt: skip
    arguments = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "4096",
                 "--num-gpu-blocks-override", "400", "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = Path(make_tiny_model())
        with serve(model, arguments, Path(folder) / "serve.log", lambda waited: None) as own:
            yield Api(own.url, None)


def show(rows: list[Row]) -> None:
    table = Table(title="The same traffic under each pair of policies", title_justify="left")
    for column in asdict(rows[0]):
        table.add_column(
            column.replace("gib_per_s", "GiB/s").replace("_", " "),
            justify="left" if "polic" in column or "backends" in column else "right",
        )
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server; else a tiny one is started")
    parser.add_argument("--model", help="its name; default: the first that it serves")
    parser.add_argument(
        "--load",
        nargs="+",
        choices=POLICIES,
        default=list(POLICIES),
        metavar="POLICY",
        help=f"load policies, of {', '.join(POLICIES)}",
    )
    parser.add_argument("--save", nargs="+", choices=POLICIES, default=["auto"], metavar="POLICY", help="save policies")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=2, help="that decode beside")
    parser.add_argument("--stream-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    with server(args) as api:
        list(api.stream([1] * 8, 4, {"save": False}))  # the first request pays for warming up
        for number, (_, load, save) in enumerate(itertools.product(range(args.rounds), args.load, args.save)):
            rows.append(sweep_one(api, args, load, save, seed=number))
            print(f"load {load}, save {save}: first token {rows[-1].first_token_ms} ms", file=sys.stderr)
    show(rows)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    return 0 if all(row.hit_tokens for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
