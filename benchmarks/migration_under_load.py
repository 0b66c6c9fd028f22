# SPDX-License-Identifier: Apache-2.0
"""Migration between two running vLLM instances while both decode: bandwidth, phases, time to first token, and what the
background streams notice.

Start two instances with PegaConnector, `migration` and a fixed agent port each (examples/migrating_proxy.md shows
how), then

    python benchmarks/migration_under_load.py --model NAME --instance URL=AGENT --instance URL=AGENT \\
        --tokens 8192 32768 65536 --background 0 8 24 --json result.json --plot result.png

For every size and load: a prompt is computed on the first instance; the second gets it with the first as its source
(migrated), and another prompt of the same size without (recomputed), in turns. `--stall SECONDS` also measures pulls
while the source's engine holds its GIL; for that start the instances with
`"kv_connector": "StallConnector", "kv_connector_module_path": "benchmarks.stall_connector"`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

PHASES = ("post", "lookup", "queue", "read", "validate")
SAVE_S = 1.0  # the source's saves go on a little after its answer
WARM_UP_S = 2.0


@dataclass
class Instance:
    url: str
    agent: str
    gaps: list[float] = field(default_factory=list)  # seconds between tokens of its background streams


class Load:
    def __init__(self, http: aiohttp.ClientSession, model: str, first: Instance, second: Instance) -> None:
        self.http, self.model = http, model
        self.source, self.target = first, second
        self._seeds = itertools.count(random.randrange(1 << 30))

    def prompt(self, tokens: int) -> list[int]:
        return random.Random(next(self._seeds)).choices(range(10, 1000), k=tokens)

    async def complete(
        self, at: Instance, prompt: list[int], tokens: int, params: Any = None
    ) -> tuple[float, list[float]]:
        """(seconds to the first token, seconds between the others)."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "stream": True, "kv_transfer_params": params}  # fmt: skip
        start = last = time.perf_counter()
        first, gaps = None, []
        async with self.http.post(at.url + "/v1/completions", json=body) as got:
            if got.status != 200:
                raise SystemExit(f"{at.url} answered {got.status}: {(await got.text())[:300]}")
            async for line in got.content:
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                if first is None:
                    first = now - start
                else:
                    gaps.append(now - last)
                last = now
        if first is None:
            raise SystemExit(f"{at.url} gave no token for a prompt of {len(prompt)} tokens")
        return first, gaps

    async def metrics(self, at: Instance) -> dict[str, float]:
        """Sums over all labels but `phase` and `result`."""
        sums: dict[str, float] = {}
        async with self.http.get(at.url + "/metrics") as got:
            for line in (await got.text()).splitlines():
                sample = re.fullmatch(r"(vllm:[\w:]+)(?:\{(.*)\})? (\S+)", line)
                if sample:
                    labels = dict(re.findall(r'(\w+)="([^"]*)"', sample[2] or ""))
                    name = sample[1] + "".join(f"/{labels[k]}" for k in ("phase", "result") if k in labels)
                    sums[name] = sums.get(name, 0.0) + float(sample[3])
        return sums

    async def _background(self, at: Instance) -> None:
        while True:
            _, gaps = await self.complete(at, self.prompt(64), 200)
            at.gaps += gaps

    @asynccontextmanager
    async def background(self, streams: int) -> AsyncIterator[None]:
        """Half of the streams on each."""
        tasks = [asyncio.create_task(self._background((self.source, self.target)[n % 2])) for n in range(streams)]
        try:
            if streams:
                await asyncio.sleep(WARM_UP_S)
            for instance in (self.source, self.target):
                instance.gaps.clear()
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def migrate(self, tokens: int, stall_s: float = 0.0) -> dict[str, Any]:
        """One prompt moved: what the target's own counters say about the pull, and when its first token came."""
        prompt = self.prompt(tokens)
        await self.complete(self.source, prompt, 1)
        await asyncio.sleep(SAVE_S)
        before = await self.metrics(self.target)
        stalled = None
        if stall_s:
            held = {"hold_gil_s": stall_s}
            stalled = asyncio.create_task(self.complete(self.source, self.prompt(16), 1, held))
            await asyncio.sleep(0.3)
        ttft, _ = await self.complete(self.target, prompt, 1, {"pega": {"source": self.source.agent}})
        if stalled is not None:
            if stalled.done():
                raise SystemExit("the source was not stalled; start it with benchmarks.stall_connector")
            await stalled
        await asyncio.sleep(0.2)
        after = await self.metrics(self.target)

        def gained(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        seconds = {p: gained(f"vllm:pega_migration_seconds_sum/{p}") for p in PHASES}
        nbytes = gained("vllm:pega_migration_bytes_total")
        total = sum(seconds.values())
        return {
            "ttft_s": ttft, "bytes": nbytes, "seconds": seconds,
            "gb_s": nbytes / 1e9 / total if total else 0.0,
            "control_share": 1 - seconds["read"] / total if total else None,
            "whole": gained("vllm:pega_migrations_total/done") == 1,
        }  # fmt: skip


def percentile(values: list[float], q: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(q / 100 * len(values)))] if values else None


async def case(load: Load, tokens: int, background: int, repeats: int) -> dict[str, Any]:
    moved, computed = [], []
    async with load.background(background):
        quiet = time.perf_counter()
        await asyncio.sleep(WARM_UP_S if background else 0)
        alone = [list(i.gaps) for i in (load.source, load.target)]
        for instance in (load.source, load.target):
            instance.gaps.clear()
        for _ in range(repeats):
            moved.append(await load.migrate(tokens))
            computed.append((await load.complete(load.target, load.prompt(tokens), 1))[0])
        during = [list(i.gaps) for i in (load.source, load.target)]
        seconds = time.perf_counter() - quiet
    return {
        "tokens": tokens, "background": background, "seconds": seconds, "pulls": moved,
        "whole": sum(m["whole"] for m in moved), "repeats": repeats,
        "gb_s": statistics.median(m["gb_s"] for m in moved),
        "control_share": statistics.median(m["control_share"] or 0.0 for m in moved),
        "ttft_migrated_s": statistics.median(m["ttft_s"] for m in moved),
        "ttft_recomputed_s": statistics.median(computed),
        "tpot_p99_s": {name: {"alone": percentile(alone[n], 99), "during": percentile(during[n], 99)}
                       for n, name in enumerate(("source", "target"))},
    }  # fmt: skip


def show(cases: list[dict[str, Any]]) -> None:
    print(f"{'tokens':>8} {'streams':>8} {'whole':>6} {'GB/s':>7} {'control':>8} {'TTFT moved':>11} {'recomputed':>11}")
    for c in cases:
        print(f"{c['tokens']:8} {c['background']:8} {c['whole']:3}/{c['repeats']:<2} {c['gb_s']:7.2f} "
              f"{c['control_share']:8.1%} {c['ttft_migrated_s']:9.3f} s {c['ttft_recomputed_s']:9.3f} s")  # fmt: skip


def plot(cases: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for tokens in sorted({c["tokens"] for c in cases}):
        rows = sorted((c for c in cases if c["tokens"] == tokens), key=lambda c: c["background"])
        loads = [c["background"] for c in rows]
        left.plot(loads, [c["gb_s"] for c in rows], "o-", label=f"{tokens} tokens")
        (line,) = right.plot(loads, [c["ttft_migrated_s"] for c in rows], "o-", label=f"{tokens}, migrated")
        right.plot(loads, [c["ttft_recomputed_s"] for c in rows], "x--", color=line.get_color(), label="recomputed")
    left.set(xlabel="background streams", ylabel="GB/s", title="Effective bandwidth of a pull", ylim=(0, None))
    right.set(xlabel="background streams", ylabel="s", title="Time to first token on the target", yscale="log")
    left.legend()
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


async def run(args: argparse.Namespace) -> dict[str, Any]:
    instances = [Instance(url.rstrip("/"), agent) for url, _, agent in (i.partition("=") for i in args.instance)]
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        load = Load(http, args.model, *instances)
        await load.migrate(args.tokens[0])  # connections, first touch of pages
        result: dict[str, Any] = {"model": args.model, "cases": []}
        for tokens, background in itertools.product(args.tokens, args.background):
            result["cases"].append(await case(load, tokens, background, args.repeats))
        if args.stall:
            idle = [await load.migrate(args.tokens[0]) for _ in range(args.repeats)]
            held = [await load.migrate(args.tokens[0], args.stall) for _ in range(args.repeats)]
            result["stall"] = {"seconds": args.stall, "ttft_idle_s": statistics.median(m["ttft_s"] for m in idle),
                               "ttft_stalled_s": statistics.median(m["ttft_s"] for m in held),
                               "whole": sum(m["whole"] for m in held), "repeats": args.repeats}  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instance", action="append", required=True, metavar="URL=AGENT", help="twice: source, target")
    parser.add_argument("--model", required=True, help="the name that both serve")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 65536])
    parser.add_argument("--background", type=int, nargs="+", default=[0, 8, 24], help="decode streams, half on each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stall", type=float, default=0.0, metavar="SECONDS", help="hold the source's GIL for so long")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    if len(args.instance) != 2 or not all("=" in i for i in args.instance):
        parser.error("give --instance URL=AGENT twice: the source, then the target")
    result = asyncio.run(run(args))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    show(result["cases"])
    if "stall" in result:
        s = result["stall"]
        print(f"source stalled for {s['seconds']:g} s: TTFT {s['ttft_stalled_s']:.3f} s, idle {s['ttft_idle_s']:.3f} s")
    if args.plot:
        plot(result["cases"], args.plot)


if __name__ == "__main__":
    main()
