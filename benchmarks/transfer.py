# SPDX-License-Identifier: Apache-2.0
"""How fast blocks move between a GPU and the host pool, for any fragment size, backend and grid.

Everything of ours goes through the real TransferEngine: blocks in, bytes out, planned while a compute event is
awaited, as behind a step in service. Beside it, in the same run: one contiguous pinned copy (the wire),
cuMemcpyAsync for every range, cuMemcpyBatchAsync, and vLLM's swap_blocks_batch where vLLM is installed. Bytes are
checked for every setting; the L2 cache is flushed before every repetition; figures are medians.

    python benchmarks/transfer.py --json results.json --plot results.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import cupy as cp
from baselines import Baselines
from rig import DIRECTIONS, GIB, PATTERNS, Rig, sides

from vllm_pega_connector import _native

SIZES = (512, 2048, 4096, 16384, 65536, 262144, 1 << 20, 2 << 20)
# Copy-engine commands cost microseconds each; this many tell their rate.
MAX_COPIES = 8192


@dataclass(frozen=True)
class Setting:
    """What an engine is told: `inflight` chunks of at most `chunk_bytes` under way."""

    backend: str
    grid: int
    chunk_bytes: int
    inflight: int

    def policy(self) -> _native.Policy:
        if self.backend == "auto":
            return _native.Policy()
        return _native.Policy(self.backend, self.grid, 1 << 16, self.chunk_bytes, self.inflight)


@dataclass
class Row:
    direction: str
    pattern: str
    range_bytes: int
    total_bytes: int  # of all directions
    backend: str  # ours, or the name of a baseline
    grid: int  # per direction
    chunk_bytes: int
    inflight: int
    gib_per_s: float
    of_wire: float  # share of the contiguous pinned copy of as many bytes and the same directions, in this run
    spread: float  # (slowest - fastest) / median of the repetitions
    submit_us_per_range: float


MIB = 1 << 20
BACKENDS = ("memcpy", "kernel", "chunked", "staged")
# From little interference to most throughput; a profile's curve holds the shuffled ones.
LADDER = (
    *(Setting("memcpy", 1, chunk * MIB, 2) for chunk in (4, 16)),
    *(Setting("kernel", grid, 256 * MIB, 1) for grid in (2, 4, 8, 16, 32)),
    Setting("chunked", 2, MIB // 2, 2),
    *(Setting("chunked", grid, chunk * MIB, 2) for grid, chunk in ((4, 1), (4, 4), (8, 4), (16, 4))),
    *(Setting("staged", grid, chunk * MIB, 2) for grid, chunk in ((4, 1), (8, 2))),
    *(Setting("staged", grid, chunk * MIB, 3) for grid, chunk in ((8, 4), (16, 4), (8, 8), (16, 8))),
    *(Setting("staged", grid, 16 * MIB, 3) for grid in (16, 32)),
    Setting("auto", 0, 0, 0),
)
FEW = (
    Setting("memcpy", 1, 4 * MIB, 2),
    Setting("kernel", 8, 256 * MIB, 1),
    Setting("staged", 16, 16 * MIB, 3),
    Setting("auto", 0, 0, 0),
)


def measure(rig: Rig, direction: str, pattern: str, setting: Setting, repeat: int, name: str = "") -> Row:
    """One cell, its `of_wire` still 0. Raises RuntimeError if a byte is wrong."""
    blocks = rig.moving if setting.backend != "memcpy" else min(rig.moving, max(1, MAX_COPIES // rig.segments))
    moves = {side: rig.moves(side, pattern, blocks) for side in sides(direction)}
    rig.poison(moves)
    _, results = rig.transfer(moves, setting.policy())
    rig.check(moves)
    total, ranges = sum(r.bytes for r in results), sum(r.ranges for r in results)
    submitting = rig.submit_ns()
    seconds = [rig.transfer(moves, setting.policy())[0] for _ in range(repeat)]
    submitting = (rig.submit_ns() - submitting) / repeat
    median = statistics.median(seconds)
    rate = total / GIB / median
    return Row(
        direction, pattern, rig.range_bytes, total, name or setting.backend, setting.grid, setting.chunk_bytes,
        setting.inflight, rate, 0.0, (max(seconds) - min(seconds)) / median, submitting / 1e3 / ranges,
    )  # fmt: skip


def sweep_size(rig: Rig, args: argparse.Namespace) -> tuple[dict[str, float], dict[str, float], list[Row]]:
    """The wire by direction, the smallest transfer's microseconds by backend, and all rows of one range size."""
    rows: list[Row] = []
    rig.open(copies_per_slice=1 << 30, slice_pause_us=0, batch_copies=False)
    baselines = Baselines(rig, args.repeat, MAX_COPIES)
    wire = {direction: baselines.contiguous(direction) for direction in DIRECTIONS}
    for direction in DIRECTIONS:
        for name, run in baselines.per_range().items():
            rate = run(direction)
            rows.append(Row(direction, "shuffled", rig.range_bytes, 0, name, 0, 0, 0, rate, 0.0, 0, 0))
        everything = Setting("memcpy", 1, 256 << 20, 1)
        rows.append(measure(rig, direction, "shuffled", everything, args.repeat, "cuMemcpyAsync"))
    rig.close()
    rig.open(args.profile)
    for direction, pattern in itertools.product(DIRECTIONS, args.patterns):
        for setting in FEW if args.quick or pattern != "shuffled" else LADDER:
            rows.append(measure(rig, direction, pattern, setting, args.repeat))
    latency = {
        b: rig.latency_us(Setting(b, 1, 4 << 20, 1).policy(), args.repeat) for b in ("memcpy", "kernel", "staged")
    }
    rig.close()
    return wire, latency, rows


def best(rows: list[Row], size: int) -> str:
    """One line: the best setting of each direction for shuffled ranges."""
    out = []
    for direction in DIRECTIONS:
        mine = [r for r in rows if (r.range_bytes, r.direction, r.pattern) == (size, direction, "shuffled")]
        top = max(mine, key=lambda r: r.gib_per_s)
        out.append(
            f"{direction} {top.gib_per_s:.1f} GiB/s ({top.backend} {top.grid}x{top.chunk_bytes >> 10}K x{top.inflight})"
        )
    return ", ".join(out)


def auto_of_best(rows: list[Row]) -> dict[str, float]:
    """What Auto reached in each cell, as a share of the best fixed setting of ours there."""
    shares = {}
    for auto in (r for r in rows if r.backend == "auto"):
        cell = (auto.direction, auto.pattern, auto.range_bytes)
        fixed = [r for r in rows if (r.direction, r.pattern, r.range_bytes) == cell and r.backend in BACKENDS]
        shares["{} {} {}".format(*cell)] = auto.gib_per_s / max(r.gib_per_s for r in fixed)
    return shares


def profile_of(wire: dict[str, float], latency: dict[str, float], rows: list[Row]) -> dict:
    """What a device profile holds of each direction (vllm_pega_connector/profiles/schema.json)."""
    out = {}
    for direction in ("load", "save"):
        ours = BACKENDS
        mine = [r for r in rows if r.direction == direction and r.pattern == "shuffled" and r.backend in ours]
        out[direction] = {
            "contiguous_gib_per_s": round(wire[direction], 1),
            "submit_us_per_range": {
                b: round(statistics.median(r.submit_us_per_range for r in mine if r.backend == b), 3) for b in ours
            },
            "latency_us": {b: round(latency["kernel" if b == "chunked" else b], 1) for b in ours},
            "curve": [
                {"backend": r.backend, "grid": r.grid, "chunk_bytes": r.chunk_bytes, "range_bytes": r.range_bytes,
                 "gib_per_s": round(r.gib_per_s, 2)}
                for r in mine
            ],
        }  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ordinal", type=int, default=0)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="fragment sizes in bytes")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--total-mib", type=int, default=64, help="MiB per direction and repetition")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--profile", default="h200", help="what Auto (objective throughput) decides by")
    parser.add_argument("--quick", action="store_true", help="three settings only")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--plot", type=Path, help="draw them here (needs matplotlib)")
    args = parser.parse_args()
    if reason := _native.cuda_available():
        sys.exit(f"benchmarks/transfer.py needs a GPU: {reason}")
    cp.cuda.Device(args.ordinal).use()
    rows: list[Row] = []
    wires = []
    latencies = []
    for size in args.sizes:
        wire, latency, more = sweep_size(Rig(args.ordinal, size, args.total_mib << 20), args)
        wires.append(wire)
        latencies.append(latency)
        rows += more
        cp.get_default_memory_pool().free_all_blocks()
        print(f"{size:>8} B: {best(rows, size)}", flush=True)
    # The wire is the same for every range size, and one measurement of it may be disturbed.
    wire = {d: statistics.median(w[d] for w in wires) for d in DIRECTIONS}
    for row in rows:
        row.of_wire = row.gib_per_s / wire[row.direction]
    shares = auto_of_best(rows)
    if shares:
        worst = min(shares, key=lambda cell: shares[cell])
        print(f"Auto, of the best fixed setting: at least {shares[worst]:.3f} ({worst})")
    print(f"wire: {', '.join(f'{d} {wire[d]:.1f}' for d in DIRECTIONS)} GiB/s")
    if args.json:
        found = {
            "gpu": cp.cuda.runtime.getDeviceProperties(args.ordinal)["name"].decode(),
            "driver": cp.cuda.runtime.driverGetVersion(),
            "date": str(date.today()),
            "command": " ".join(["python", *(Path(word).name if "/" in word else word for word in sys.argv)]),
            "repeat": args.repeat,
            "wire_gib_per_s": wires,  # by range size; rows are compared with the median
            "profile": profile_of(wire, latencies[0], rows),
            "auto_of_best": shares,
            "rows": [asdict(r) for r in rows],
        }
        args.json.write_text(json.dumps(found, indent=1))
    if sys.stdout.isatty() or args.plot:
        import report

        report.table(rows)
        if args.plot:
            report.plot(rows, args.plot)


if __name__ == "__main__":
    main()
