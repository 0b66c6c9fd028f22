# SPDX-License-Identifier: Apache-2.0
"""What migration has to show, in one run on one machine; two real vLLM instances share its GPU (or its CPU).

    python benchmarks/migration_goals.py --model qwen3-4b --json migration.json
    python benchmarks/migration_goals.py --model tiny --tokens 1024 2048 --streams 0 2 --rounds 2 --stall 3 --quick

agents   Pulls of 256 MiB by two agents against a bare Mooncake read of the same slots; then 200 pulls while as many
         processes spin as there are cores (benchmarks/bench_migration_agents.py says what is measured). By Mooncake,
         then directly from pool to pool.
stall    A pull of the first of --tokens while the source's main thread holds the GIL, and one from an idle source, in
         turns; then while the target's does. "pull" is the agents' time, from the engine's post until the last block is
         published; TTFT is the target's. The target cannot give a token while it is stalled itself.
load     For 0, 8 and 24 decode streams on each instance, every size migrated and recomputed on the target, in turns:
         bandwidth, shares, TTFT, and the streams' time per output token alone and during either.

All are medians over pairs; the order of a pair and of the loads changes from round to round. The JSON file is written
anew after every measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_migration_agents import PHASES, measure, show
from migration_instance import Handle

ALONE_S = 1.0


class Report:
    def __init__(self, path: str | None, budget_s: float) -> None:
        self._path = Path(path) if path else None
        self._start = time.monotonic()
        self._budget_s = budget_s
        self.result: dict[str, Any] = {"cores": os.cpu_count(), "agents": [], "stall": {}, "load": {}}

    def left(self) -> float:
        return self._budget_s - (time.monotonic() - self._start)

    def write(self) -> None:
        self.result["seconds"] = time.monotonic() - self._start
        if self._path:
            scratch = self._path.with_suffix(".part")
            scratch.write_text(json.dumps(self.result, indent=1) + "\n")
            scratch.replace(self._path)


def agents(report: Report, quick: bool) -> None:
    cores = os.cpu_count() or 1
    mib, rounds, many = (64, 5, 20) if quick else (256, 30, 200)
    cases = ((512, False, 0, rounds), (2304, True, 0, rounds), (512, True, cores, many))
    for same_host, (slot_kib, shuffled, busy, n) in itertools.product((False, True), cases):
        result = measure(mib, slot_kib, n, shuffled, busy, same_host)
        show(result)
        report.result["agents"].append(result)
        report.write()


class Pair:
    """The two instances; prompts are numbered, so that both make the same."""

    def __init__(self, args: argparse.Namespace, *connector: Any) -> None:
        self.source = Handle(args.model, args.host_gib, args.gpu_blocks, *connector)
        self.source.agent = self.source.ask("ready")  # one after the other: each measures the memory that is free
        self.target = Handle(args.model, args.host_gib, args.gpu_blocks, *connector)
        self.target.agent = self.target.ask("ready")
        self._seeds = itertools.count(1)

    def close(self) -> None:
        self.source.close()
        self.target.close()

    def computed(self, tokens: int) -> int:
        """A prompt that the source holds in its pool."""
        seed = next(self._seeds)
        self.source.ask("give", seed, tokens)
        self.source.ask("settle")
        return seed

    def migrate(self, seed: int, tokens: int, hold_gil_s: float = 0) -> dict[str, Any]:
        return pulled(self.target.ask("run", seed, tokens, self.source.agent, hold_gil_s))

    def recompute(self, tokens: int) -> dict[str, Any]:
        return self.target.ask("run", next(self._seeds), tokens, None, 0)

    def migrate_stalled_source(self, seed: int, tokens: int, seconds: float) -> dict[str, Any]:
        self.source.tell("hold_gil", seconds)
        time.sleep(0.2)
        moved = self.migrate(seed, tokens)
        held = self.source.answer()
        moved["inside"] = held["start"] < moved["start"] and moved["end"] < held["end"]
        return moved


def pulled(run: dict[str, Any]) -> dict[str, Any]:
    """A run with what its pulls say, put together."""
    pulls = run.pop("pulls")
    seconds = {phase: sum(p["seconds"].get(phase, 0.0) for p in pulls) for phase in PHASES}
    total = sum(seconds.values())
    nbytes = sum(p["bytes"] for p in pulls)
    return run | {
        "pull_s": total, "bytes": nbytes, "seconds": seconds, "gap_s": max((p["gap_s"] for p in pulls), default=0.0),
        "whole": bool(pulls) and all(p["blocks"] == p["asked"] for p in pulls),
        "gb_s": nbytes / 1e9 / total if total else 0.0, "control_share": 1 - seconds["read"] / total if total else 0.0,
        "reasons": [p["reason"] for p in pulls if p["reason"]],
    }  # fmt: skip


def stall(report: Report, pair: Pair, side: str, tokens: int, seconds: float, rounds: int) -> None:
    pairs: list[dict[str, Any]] = []
    for n in range(rounds):
        if report.left() < 2 * seconds:
            break
        done: dict[str, Any] = {}
        for what in ("idle", "stalled")[:: 1 if n % 2 else -1]:
            seed = pair.computed(tokens)
            if what == "idle":
                done[what] = pair.migrate(seed, tokens)
            elif side == "source":
                done[what] = pair.migrate_stalled_source(seed, tokens, seconds)
            else:
                done[what] = pair.migrate(seed, tokens, seconds)
            pair.target.ask("settle")
        pairs.append(done)
    if not pairs:
        return
    result = {
        "tokens": tokens, "seconds": seconds, "rounds": len(pairs),
        "whole": all(p[w]["whole"] for p in pairs for w in p),
        "pull_idle_s": statistics.median(p["idle"]["pull_s"] for p in pairs),
        "pull_stalled_s": statistics.median(p["stalled"]["pull_s"] for p in pairs),
        "pull_stalled_to_idle": statistics.median(p["stalled"]["pull_s"] / p["idle"]["pull_s"] for p in pairs),
        "ttft_idle_s": statistics.median(p["idle"]["ttft_s"] for p in pairs),
        "ttft_stalled_s": statistics.median(p["stalled"]["ttft_s"] for p in pairs),
        "ttft_stalled_to_idle": statistics.median(p["stalled"]["ttft_s"] / p["idle"]["ttft_s"] for p in pairs),
    }  # fmt: skip
    if side == "source":
        result["pulls_inside_the_stall"] = sum(p["stalled"]["inside"] for p in pairs)
    print(f"--- {side} stalled")
    show(result)
    report.result["stall"][side] = result | {"pairs": pairs}
    report.write()


def load(report: Report, pair: Pair, args: argparse.Namespace) -> None:
    seen: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for n in range(args.rounds):
        turned = args.streams[n % len(args.streams) :] + args.streams[: n % len(args.streams)]
        for streams in turned:
            if report.left() < 15:
                return
            for side, instance in enumerate((pair.source, pair.target)):
                instance.ask("background", streams, 10**6 * (1 + 2 * n + side), args.context)
            for tokens in args.tokens[:: 1 if n % 2 else -1]:
                seen.setdefault((streams, tokens), []).append(one_load(pair, tokens, n))
                report.result["load"] = [loaded(*key, rounds) for key, rounds in sorted(seen.items())]
                report.write()
            pair.source.ask("quiet")
            pair.target.ask("quiet")


def one_load(pair: Pair, tokens: int, n: int) -> dict[str, Any]:
    """One migrated and one recomputed, with the streams' tokens before and during."""
    seed = pair.computed(tokens)
    pair.target.ask("settle")
    began = time.monotonic()
    time.sleep(ALONE_S)
    spans: dict[str, tuple[float, float]] = {"alone": (began, time.monotonic())}
    done: dict[str, Any] = {}
    for what in ("migrated", "recomputed")[:: 1 if n % 2 else -1]:
        done[what] = pair.migrate(seed, tokens) if what == "migrated" else pair.recompute(tokens)
        spans[what] = (done[what]["start"], done[what]["end"])
        pair.target.ask("settle")
    for side, instance in (("source", pair.source), ("target", pair.target)):
        decoded = instance.ask("decoded")
        done[f"tpot_{side}"] = {
            name: [gap for at, gap in decoded if begin < at <= end + gap] for name, (begin, end) in spans.items()
        }
    return done


def milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    values = sorted(s * 1e3 for s in seconds)
    if not values:
        return {}
    return {"mean": statistics.fmean(values), "p50": statistics.median(values),
            "p99": values[int(0.99 * (len(values) - 1))], "max": values[-1], "count": len(values)}  # fmt: skip


def loaded(streams: int, tokens: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    moved = [r["migrated"] for r in rounds]
    return {
        "streams": streams, "tokens": tokens, "rounds": len(rounds), "whole": sum(m["whole"] for m in moved),
        "gb": statistics.median(m["bytes"] for m in moved) / 1e9,
        "gb_s": statistics.median(m["gb_s"] for m in moved),
        "control_share": statistics.median(m["control_share"] for m in moved),
        "phase_ms": {p: 1e3 * statistics.median(m["seconds"][p] for m in moved) for p in PHASES},
        "gap_ms_max": 1e3 * max(m["gap_s"] for m in moved),
        "ttft_migrated_s": statistics.median(m["ttft_s"] for m in moved),
        "ttft_without_pull_s": statistics.median(m["ttft_s"] - m["pull_s"] for m in moved),
        "ttft_recomputed_s": statistics.median(r["recomputed"]["ttft_s"] for r in rounds),
        "ttft_migrated_to_recomputed": statistics.median(
            r["migrated"]["ttft_s"] / r["recomputed"]["ttft_s"] for r in rounds
        ),
        "tpot_ms": {side: {what: milliseconds(gap for r in rounds for gap in r[f"tpot_{side}"][what])
                           for what in ("alone", "migrated", "recomputed")}
                    for side in ("source", "target")},
        "reasons": [r for m in moved for r in m["reasons"]],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b", help="a name in benchmarks/shapes.py, or a path")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 8, 24], help="on each instance")
    parser.add_argument("--context", type=int, default=512, help="tokens of a stream's prompt")
    parser.add_argument("--rounds", type=int, default=3, help="of the loads")
    parser.add_argument("--stall", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--stall-rounds", type=int, default=5)
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--gpu-blocks", type=int, default=8192)
    parser.add_argument("--budget", type=float, default=380.0, metavar="SECONDS", help="what is left then is left out")
    parser.add_argument("--quick", action="store_true", help="smaller pulls between the agents")
    parser.add_argument("--only", choices=("agents", "engines"), help="half of it")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    report = Report(args.json, args.budget)
    signal.alarm(int(args.budget) + 60)  # whoever hangs; the instances end with us
    if args.only != "engines":
        agents(report, args.quick)
    if args.only != "agents":
        pair = Pair(args)
        try:
            report.result["engines_ready_s"] = time.monotonic() - report._start
            pair.migrate(pair.computed(args.tokens[0]), args.tokens[0])  # connections, graphs, first touch of pages
            pair.recompute(args.tokens[-1])
            stall(report, pair, "source", args.tokens[0], args.stall, args.stall_rounds)
            load(report, pair, args)
            stall(report, pair, "target", args.tokens[0], args.stall, args.stall_rounds)
        finally:
            pair.close()
        for case in report.result["load"]:
            print("---")
            show(case | {"tpot_ms": json.dumps(case["tpot_ms"])})
    report.write()
    print(f"{report.result['seconds']:.0f} s")


if __name__ == "__main__":
    main()
