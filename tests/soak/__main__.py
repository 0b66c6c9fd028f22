# SPDX-License-Identifier: Apache-2.0
"""Random traffic on real vLLM for as long as asked: `make soak MINUTES=30 SEED=7`, or python -m tests.soak.

A life is one process: a model, a few engines one after the other, and their traffic. Lives follow each other until the
time is over. A wrong token, a leak, a hang or a crash ends the soak: what was done is saved, shrunk and named.
"""

from __future__ import annotations

import argparse
import os
import queue
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.soak import operations as ops
from tests.soak.process import fair_seconds
from tests.soak.shrink import shrink
from tests.support.line_process import LineProcess

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "soak"
SILENT_S = 300.0  # between two checks: several requests at their deadlines, an engine's start
FAULT_RATE = 0.02  # of what passes between worker and native engine


@dataclass
class End:
    kind: str = ""  # "" = well
    why: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    process: dict[str, float] = field(default_factory=dict)


def live(job: dict[str, Any], faults: str, report: Any, silent_s: float = SILENT_S) -> End:
    """One process; `report` is called with what it is like at each check."""
    with tempfile.NamedTemporaryFile("wb", suffix=".json") as file:
        file.write(msgspec.json.encode(job))
        file.flush()
        # One thread for the engine and one for its reference: more would wait for each other's barriers.
        environment = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # oneDNN keeps what it compiled for each of its last 1,024 shapes: 300 MiB that look like a leak.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        if faults not in ("none", "seam"):
            environment["VLLM_PEGA_FAULTS"] = faults
        process = LineProcess(
            lambda descriptor: [sys.executable, "-m", "tests.soak.player", file.name, descriptor],
            environment, stdout=sys.stderr,
        )  # fmt: skip
        said: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_listen, args=(process, said), daemon=True).start()
        end = End()
        heard = fair_seconds(process.process.pid)
        try:
            while True:
                try:
                    what = said.get(timeout=5)
                except queue.Empty:
                    if fair_seconds(process.process.pid) - heard < silent_s:
                        continue
                    process.process.send_signal(signal.SIGUSR1)  # says on standard error where each thread is
                    time.sleep(2)
                    end.kind, end.why = "hang", f"nothing for {silent_s:g} s; standard error says where"
                    return end
                if what is None:
                    status = process.process.wait()
                    end.kind, end.why = "crash", f"the process ended with {status}; standard error says why"
                    return end
                heard = fair_seconds(process.process.pid)
                if "waits" in what:
                    continue
                if "over" in what:
                    return end
                if "failed" in what:
                    end.kind, end.why = what["failed"], what["why"]
                    return end
                end.counts, end.process = Counter(what["counts"]), what["process"]
                report(end)
        finally:
            process.close()


def _listen(process: LineProcess, said: queue.Queue[dict[str, Any] | None]) -> None:
    try:
        while True:
            said.put(process.answer())
    except (EOFError, ValueError):
        said.put(None)


def summary(counts: Counter[str], process: dict[str, float], seconds: float, lives: int) -> str:
    c = counts
    return (
        f"{seconds / 60:5.1f} min  lives {lives}  engines {c['engines']}  requests {c['requests']} "
        f"({c['aborted']} aborted, {c['preempted']} preempted)  tokens {c['tokens compared']} ({c['ties']} ties)  "
        f"hit tokens {c['hit tokens']}  loads {c['loads done']}  saves {c['saves done']}  injected {c['injected']}  "
        f"RSS {process.get('rss_mib', 0):.0f} MiB  fds {process.get('fds', 0)}  threads {process.get('threads', 0)}  "
        f"shared {process.get('shared_mib', 0):.0f} MiB  /dev/shm {shm_mib():.0f} MiB"
    )


def shm_mib() -> float:
    found = os.statvfs("/dev/shm")
    return (found.f_blocks - found.f_bfree) * found.f_frsize / 2**20


def shrunk(job: dict[str, Any], faults: str, kind: str, journal: Path, minutes: float) -> Path:
    """A file of fewer operations that fail alike; that of all if no other does within the time."""
    deadline = time.monotonic() + 60 * minutes
    small = journal.with_suffix(".small.jsonl")

    def fails(items: list[ops.Operation]) -> bool:
        ops.write(small.with_suffix(".try"), items)
        again = {**job, "replay": str(small.with_suffix(".try")), "journal": ""}
        failed = live(again, faults, lambda end: None).kind == kind
        print(f"  {len(items)} operations: {'fail too' if failed else 'pass'}", flush=True)
        return failed

    items = ops.read(journal)
    first = max((at for at, item in enumerate(items) if isinstance(item, ops.Start)), default=0)
    if fails(items[first:]):
        items = items[first:]  # the last engine's alone
    elif not fails(items):
        print("  it does not fail again: a matter of timing")
        return journal
    # The start stays: without an engine nothing fails.
    kept = shrink(items[1:], lambda rest: fails([items[0], *rest]), lambda: time.monotonic() < deadline)
    ops.write(small, [items[0], *kept])
    return small


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(1 << 30)))
    parser.add_argument("--life-minutes", type=float, default=8, help="one process, one model (default: %(default)s)")
    parser.add_argument(
        "--faults", default="seam",
        help="none; seam: between worker and native engine, from here; else what VLLM_PEGA_FAULTS is set to",
    )  # fmt: skip
    parser.add_argument("--replay", help="do the operations of this file instead, once")
    parser.add_argument(
        "--model", help="with --replay: its layers, f full and s sliding; default: all full", default=""
    )
    parser.add_argument("--shrink-minutes", type=float, default=20, help="0: do not shrink (default: %(default)s)")
    args = parser.parse_args()
    rate = FAULT_RATE if args.faults == "seam" else 0.0
    print(f"soak: seed {args.seed}, faults {args.faults}", flush=True)
    started, last = time.monotonic(), 0.0
    total: Counter[str] = Counter()
    lives = 0
    while lives == 0 or (not args.replay and time.monotonic() - started < 60 * args.minutes):
        lives += 1
        seed = f"{args.seed}/{lives}"
        model = args.model if args.replay else random.Random(seed).choice(ops.MODELS)
        journal = FOLDER / f"{seed.replace('/', '-')}.jsonl"
        FOLDER.mkdir(parents=True, exist_ok=True)
        left = max(10.0, 60 * args.minutes - (time.monotonic() - started))
        job = {
            "seed": seed, "model": model, "fault_rate": rate, "journal": str(journal),
            "seconds": min(left, 60 * args.life_minutes), "replay": str(args.replay or ""),
        }  # fmt: skip
        before = Counter(total)

        def report(end: End, before: Counter[str] = before, lives: int = lives) -> None:
            nonlocal last
            if time.monotonic() - last > 30:
                last = time.monotonic()
                print(summary(before + end.counts, end.process, last - started, lives), flush=True)

        end = live(job, args.faults, report)
        total = before + end.counts
        if end.kind:
            print(f"FAILED, {end.kind}: {end.why}\nDone until then: {journal}")
            if args.shrink_minutes and end.kind != "leak":
                print(f"Shrinking, for {args.shrink_minutes:g} minutes at most", flush=True)
                journal = shrunk(job, args.faults, end.kind, journal, args.shrink_minutes)
            asked = f" --model {model}" if model else ""
            print(f"Replay: {sys.executable} -m tests.soak --faults {args.faults}{asked} --replay {journal}")
            return 1
        print(summary(total, end.process, time.monotonic() - started, lives), flush=True)
        journal.unlink()
    for need in ("tokens compared", "loads done", "saves done", "hit tokens"):
        if not total[need]:
            print(f"FAILED: nothing tried: no {need}")
            return 1
    print("soak: no wrong token, nothing held, nothing grown, nothing hung")
    return 0


if __name__ == "__main__":
    sys.exit(main())
