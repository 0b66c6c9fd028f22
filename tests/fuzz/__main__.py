# SPDX-License-Identifier: Apache-2.0
"""Fuzzes every target, guided by what it executes: `make fuzz SECONDS=300`, or python -m tests.fuzz.

    python -m tests.fuzz --target profile_json --file CRASH    runs one input again

What is new is kept in .cache/fuzz/TARGET and used by the next run. An input that breaks a target is kept there too, and
belongs, once mended, into tests/fuzz/corpus/TARGET.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".cache" / "fuzz"
MAX_BYTES = 16384  # the largest built-in profile, and room


def fuzz_one(name: str, seconds: int) -> None:
    """In this process, which libFuzzer ends."""
    import atheris

    with atheris.instrument_imports(include=["vllm_pega_connector"]):
        from tests.fuzz.targets import SEEDS, TARGETS

    folder, seeds = FOLDER / name, FOLDER / f"{name}.seeds"
    folder.mkdir(parents=True, exist_ok=True)
    seeds.mkdir(exist_ok=True)
    for i, seed in enumerate(SEEDS[name]):
        (seeds / str(i)).write_bytes(seed)
    corpus = Path(__file__).parent / "corpus" / name
    folders = [folder, seeds, *([corpus] if corpus.is_dir() else [])]
    options = [
        f"-max_total_time={seconds}", f"-max_len={MAX_BYTES}", f"-artifact_prefix={FOLDER}/{name}-", "-timeout=20",
        "-rss_limit_mb=2048", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, *map(str, folders)], TARGETS[name])
    atheris.Fuzz()


def fuzz_all(seconds: float) -> int:
    """One target after the other, each in a process of its own, for its share of the time."""
    from tests.fuzz.targets import TARGETS

    failed = []
    for name in TARGETS:
        share, start = max(1, round(seconds / len(TARGETS))), time.monotonic()
        command = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(share)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * share + 300)
        stats = dict(line.removeprefix("stat::").split(":") for line in run.stderr.splitlines() if "stat::" in line)
        executions = int(stats.get("number_of_executed_units", 0))
        print(f"{name:16}{executions:>10} inputs in {time.monotonic() - start:4.0f} s", flush=True)
        if run.returncode != 0:
            failed.append(name)
            print(run.stdout[-3000:], run.stderr[-3000:])
        elif executions == 0:
            failed.append(name)
            print(f"nothing was tried:\n{run.stderr[-3000:]}")
    print(f"fuzz: {', '.join(failed)} failed; the input is in {FOLDER}" if failed else "fuzz: nothing broke")
    return int(bool(failed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together (default: %(default)s)")
    parser.add_argument("--target")
    parser.add_argument("--file", type=Path, help="run this input alone")
    args = parser.parse_args()
    if args.file:
        from tests.fuzz.targets import TARGETS

        TARGETS[args.target](args.file.read_bytes())
        return 0
    if args.target:
        fuzz_one(args.target, round(args.seconds))
    return fuzz_all(args.seconds)


if __name__ == "__main__":
    sys.exit(main())
