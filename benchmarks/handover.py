# SPDX-License-Identifier: Apache-2.0
"""A prompt that one instance has just prefilled is handed over to another: PegaConnector against vLLM's
MooncakeConnector, in turns, on one machine.

Real vLLM instances share its GPU (or its CPU), two for each of `--setups`. For every prompt length, with and without
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
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from migration_goals import ALONE_S, Pair, milliseconds

SETUPS = {
    "pega, network": ("pega", {"same_host": "off"}),
    "pega, same host": ("pega", {}),
    "mooncake": ("mooncake", {}),
}


class Handover(Pair):
    def __init__(self, name: str, args: argparse.Namespace) -> None:
        super().__init__(args, *SETUPS[name])
        self.name = name

    def run(self, tokens: int, stall_s: float = 0.0) -> dict[str, Any]:
        seed = self.computed(tokens)
        self.target.ask("decoded")
        alone = time.monotonic()
        time.sleep(ALONE_S)
        moved = self.migrate_stalled_source(seed, tokens, stall_s) if stall_s else self.migrate(seed, tokens)
        self.source.ask("settle")
        gaps = self.target.ask("decoded")
        start, end = moved["start"], moved["end"]
        return {
            "ttft_s": moved["ttft_s"],
            "found": moved["cached_tokens"],
            "alone": [gap for at, gap in gaps if alone < at <= start],
            "during": [gap for at, gap in gaps if start < at <= end + gap],
        }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "ttft_s": statistics.median(r["ttft_s"] for r in runs),
        "ttft_s_each": [r["ttft_s"] for r in runs],
        "tokens_found_least": min(r["found"] for r in runs),
        "tpot_ms": {what: milliseconds(gap for r in runs for gap in r[what]) for what in ("alone", "during")},
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
    pairs: list[Handover] = []
    rows: list[dict[str, Any]] = []
    try:
        for name in args.setups:
            pairs.append(Handover(name, args))
            pairs[-1].run(args.tokens[0])  # connections, graphs, first touch of pages
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
                    seen[pair.name].append(pair.run(tokens, stall))
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
