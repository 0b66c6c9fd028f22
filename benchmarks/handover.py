# SPDX-License-Identifier: Apache-2.0
"""A prompt that one instance has just prefilled is handed over to another: PegaConnector against vLLM's
MooncakeConnector, in turns, on one machine.

Four real vLLM instances share its GPU (or its CPU), two of each connector. For every prompt length, with and without
decode streams on both instances, and while the source's main thread holds the GIL: the time to the target's first token
once the source has its own, and the time per token of the streams meanwhile.

    python benchmarks/handover.py --model qwen3-4b --json handover.json
    python benchmarks/handover.py --model tiny --tokens 1024 --streams 0 2 --rounds 2 --stall 2

Both use Mooncake's TCP transport over loopback: MooncakeConnector moves GPU memory with it, PegaConnector its host
pool (`network`), or copies from pool to pool (`same host`), and then loads. Only a hand-over is compared: what
MooncakeConnector does not do is in docs/migration.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from migration_instance import Handle

ALONE_S = 1.0
SETUPS = {
    "pega, network": ("pega", {"same_host": "off"}),
    "pega, same host": ("pega", {}),
    "mooncake": ("mooncake", {}),
}


class Pair:
    def __init__(self, name: str, args: argparse.Namespace, seeds: itertools.count[int]) -> None:
        self.name, self._seeds = name, seeds
        connector, migration = SETUPS[name]
        self.source = Handle(args.model, args.host_gib, args.gpu_blocks, connector, migration)
        self.address = self.source.ask("ready")  # one after the other: each measures the memory that is free
        self.target = Handle(args.model, args.host_gib, args.gpu_blocks, connector, migration)
        self.target.ask("ready")

    def hand_over(self, tokens: int, stall_s: float = 0.0) -> dict[str, Any]:
        seed = next(self._seeds)
        self.source.ask("give", seed, tokens)
        self.source.ask("settle")
        self.target.ask("decoded")
        alone = time.monotonic()
        time.sleep(ALONE_S)
        if stall_s:
            self.source.tell("hold_gil", stall_s)
            time.sleep(0.2)
        run = self.target.ask("run", seed, tokens, self.address, 0)
        if stall_s:
            self.source.answer()
        self.source.ask("settle")
        gaps = self.target.ask("decoded")
        start, end = run["start"], run["end"]
        return {
            "ttft_s": run["ttft_s"],
            "found": run["cached_tokens"],
            "alone": [gap for at, gap in gaps if alone < at <= start],
            "during": [gap for at, gap in gaps if start < at <= end + gap],
        }

    def close(self) -> None:
        self.source.close()
        self.target.close()


def ms(values: list[float]) -> dict[str, float]:
    values = sorted(v * 1e3 for v in values)
    return {"p50": statistics.median(values), "p99": values[int(0.99 * (len(values) - 1))], "max": values[-1],
            "count": len(values)} if values else {}  # fmt: skip


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ttft_s": statistics.median(r["ttft_s"] for r in runs),
        "ttft_s_each": [r["ttft_s"] for r in runs],
        "tokens_found_least": min(r["found"] for r in runs),
        "tpot_ms": {what: ms([gap for r in runs for gap in r[what]]) for what in ("alone", "during")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b", help="a name in benchmarks/shapes.py, or a path")
    parser.add_argument("--setups", nargs="+", default=list(SETUPS), choices=list(SETUPS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 24], help="on each instance")
    parser.add_argument("--context", type=int, default=512, help="tokens of a stream's prompt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stall", type=float, default=10.0, metavar="SECONDS", help="0: without")
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--gpu-blocks", type=int, default=6144)
    parser.add_argument("--budget", type=float, default=500.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.alarm(int(args.budget) + 30)  # whoever hangs; the instances end with us
    began = time.monotonic()
    seeds = itertools.count(1)
    pairs: list[Pair] = []
    rows: list[dict[str, Any]] = []
    try:
        for name in args.setups:
            pairs.append(Pair(name, args, seeds))
            pairs[-1].hand_over(args.tokens[0])  # connections, graphs, first touch of pages
        print(f"{len(pairs)} pairs are ready after {time.monotonic() - began:.0f} s")
        cases = [(tokens, streams, 0.0) for streams in args.streams for tokens in args.tokens]
        cases += [(args.tokens[0], 0, args.stall)] if args.stall else []
        for tokens, streams, stall in cases:
            seen: dict[str, list[dict[str, Any]]] = {pair.name: [] for pair in pairs}
            for n in range(args.rounds if not stall else min(3, args.rounds)):
                for pair in pairs[n % len(pairs) :] + pairs[: n % len(pairs)]:
                    if time.monotonic() - began > args.budget:
                        break
                    for side, instance in enumerate((pair.source, pair.target)):
                        instance.ask("background", streams, 10**6 * (1 + 2 * n + side), args.context)
                    seen[pair.name].append(pair.hand_over(tokens, stall))
                    for instance in (pair.source, pair.target):
                        instance.ask("quiet")
            for name, runs in seen.items():
                if not runs:
                    continue
                rows.append({"setup": name, "tokens": tokens, "streams": streams, "stall_s": stall, **summary(runs)})
                tpot = rows[-1]["tpot_ms"]
                print(f"{name:16} {tokens:6} tokens, {streams:2} streams{f', stalled {stall:g} s' if stall else '':16}"
                      f" TTFT {rows[-1]['ttft_s'] * 1e3:8.1f} ms, {rows[-1]['tokens_found_least']} tokens found"
                      + "".join(f"  TPOT p99 {what} {tpot[what]['p99']:.2f} ms" for what in tpot if tpot[what]),
                      flush=True)  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")
    finally:
        for pair in pairs:
            pair.close()


if __name__ == "__main__":
    main()
