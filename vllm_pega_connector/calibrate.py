# SPDX-License-Identifier: Apache-2.0
"""Measures a device with the project's own engine and makes a device profile of what it saw.

Auto chooses only among settings that a profile holds, and compares them by throughput and by what decode feels: so
every setting is measured both ways, with the very limits that Auto will hand to the engine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from typing import Any

import numpy as np

from .calibrate_bench import Bench
from .calibrate_decode import Bursts, open_decode, step_times
from .config import ObjectiveName
from .profile import CurvePoint, Defaults, InterferencePoint, Setting

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DIRECTIONS = ("load", "save")
BACKENDS = ("memcpy", "kernel", "chunked", "staged")
# Most important first: 4 KiB is a fragmented transfer, 64 KiB a usual one, 1 MiB a block of all layers.
SIZES = (4 * KIB, 64 * KIB, MIB, 512, 16 * KIB, 256 * KIB, 2 * KIB, 2 * MIB)
# A single copy command costs microseconds; so many tell its rate.
MOST_COPIES = 8192


@dataclass(frozen=True)
class Plan:
    """What is measured, and in how long. `decode_sizes`: how many of SIZES are measured beside decode."""

    settings: tuple[Setting, ...]
    defaults: dict[str, Defaults]
    total_bytes: int  # of a transfer
    curve_s: float
    decode_s: float
    decode_sizes: int
    repeats: tuple[int, int]  # at least, at most
    rounds: int  # of decode runs
    spread_ms: dict[ObjectiveName, float] = field(default_factory=dict)


def _settings(backend: Any, *values: tuple[int, int, int]) -> tuple[Setting, ...]:
    return tuple(Setting(backend=backend, grid=g, chunk_descriptors=d, chunk_bytes=b) for g, d, b in values)


CUDA_DEFAULTS = {
    "memcpy": Defaults(max_grid_blocks=1, chunk_descriptors=4096, chunk_bytes=4 * MIB, inflight_chunks=2),
    "kernel": Defaults(max_grid_blocks=8, inflight_chunks=1),
    "chunked": Defaults(max_grid_blocks=8, chunk_descriptors=8192, chunk_bytes=4 * MIB, inflight_chunks=2),
    # Two stages under way leave gaps between them; three reach 0.90 of the wire both ways where two reach 0.87.
    "staged": Defaults(max_grid_blocks=16, chunk_descriptors=65536, chunk_bytes=4 * MIB, inflight_chunks=3),
}
CUDA_SETTINGS = (
    *_settings("memcpy", (0, 0, 4 * MIB), (0, 0, 16 * MIB)),
    *_settings("kernel", *((grid, 0, 0) for grid in (2, 8, 16, 32))),
    *_settings("chunked", (2, 0, 512 * KIB), (4, 0, MIB), (8, 0, 4 * MIB)),
    *_settings("staged", (2, 0, 2 * MIB), (8, 0, 4 * MIB), (16, 0, 4 * MIB), (8, 0, 8 * MIB), (16, 0, 8 * MIB)),
    *_settings("staged", (16, 0, 16 * MIB), (32, 0, 16 * MIB)),
)
# Not measured here but chosen: on an H200, 64 MiB each way every 50 ms make a decode step 5 % longer at once, 0.6 %
# spread over 20 ms; whoever waits for a load waits that much longer.
CUDA_SPREAD_MS: dict[ObjectiveName, float] = {"balanced": 20, "tail": 40, "strict": 80}
CUDA_QUICK = (
    *_settings("memcpy", (0, 0, 4 * MIB)),
    *_settings("kernel", (4, 0, 0), (8, 0, 0), (16, 0, 0)),
    *_settings("chunked", (8, 0, 4 * MIB)),
    *_settings("staged", (2, 0, 2 * MIB), (16, 0, 4 * MIB), (16, 0, 16 * MIB)),
)
HOST_DEFAULTS = {
    "memcpy": Defaults(max_grid_blocks=1, chunk_descriptors=1024, chunk_bytes=MIB, inflight_chunks=2),
    "kernel": Defaults(max_grid_blocks=2, inflight_chunks=1),
    "chunked": Defaults(max_grid_blocks=1, chunk_descriptors=1024, chunk_bytes=MIB, inflight_chunks=2),
    "staged": Defaults(max_grid_blocks=2, chunk_descriptors=1024, chunk_bytes=MIB, inflight_chunks=2),
}
HOST_SETTINGS = (
    *_settings("memcpy", (0, 0, MIB)),
    *_settings("kernel", (1, 0, 0), (2, 0, 0)),
    *_settings("chunked", (1, 1024, 256 * KIB), (2, 1024, MIB)),
    *_settings("staged", (2, 0, MIB)),
)
PLANS = {
    ("cuda", False): Plan(CUDA_SETTINGS, CUDA_DEFAULTS, 64 * MIB, 20, 75, 3, (3, 7), 2, CUDA_SPREAD_MS),
    ("cuda", True): Plan(CUDA_QUICK, CUDA_DEFAULTS, 32 * MIB, 4, 6, 1, (2, 3), 1, CUDA_SPREAD_MS),
    ("host", False): Plan(HOST_SETTINGS, HOST_DEFAULTS, 16 * MIB, 20, 40, 3, (3, 7), 2),
    ("host", True): Plan(HOST_SETTINGS, HOST_DEFAULTS, 2 * MIB, 1.5, 2, 1, (2, 3), 1),
}


def policy_of(setting: Setting, default: Defaults) -> Any:
    """What Auto makes of a setting: its own fields, the rest from the profile's defaults."""
    from . import _native

    return _native.Policy(
        setting.backend,
        setting.grid or default.max_grid_blocks,
        setting.chunk_descriptors or default.chunk_descriptors or 1 << 20,
        setting.chunk_bytes or default.chunk_bytes or GIB,
        default.inflight_chunks,
    )


@dataclass
class Found:
    """Measurements by direction, growing."""

    wires: dict[str, list[float]] = field(default_factory=lambda: {d: [] for d in DIRECTIONS})  # GiB/s
    curve: dict[str, list[CurvePoint]] = field(default_factory=lambda: {d: [] for d in DIRECTIONS})
    interference: dict[str, list[InterferencePoint]] = field(default_factory=lambda: {d: [] for d in DIRECTIONS})
    submit_us: dict[tuple[str, str], list[float]] = field(default_factory=dict)  # by direction and backend
    latency_us: dict[tuple[str, str], float] = field(default_factory=dict)
    noise: list[float] = field(default_factory=list)  # how far p99 of equal runs without transfer lay apart
    step_ms: float = 0.0


def calibrate(place: Any, plan: Plan, progress: Callable[[str, float], None]) -> Found:
    """Everything, calling `progress` with words and the share done. Raises RuntimeError if a byte is wrong."""
    found = Found()
    progress("latency of the smallest transfer", 0)
    with Bench(place, 4096, 4096, segments=1) as bench:
        _latency(bench, plan, found)
    decode = open_decode(place)
    steps = 2 * len(SIZES)
    curve_end = time.perf_counter()  # when the curves up to a size ought to be done, decode left out
    for i, size in enumerate(SIZES):
        with Bench(place, size, plan.total_bytes) as bench:
            progress(f"throughput, {size_name(size)}", 2 * i / steps)
            curve_end = max(curve_end, time.perf_counter()) + plan.curve_s / len(SIZES)
            _curve(bench, plan, found, curve_end)
            if i < plan.decode_sizes:
                progress(f"decode beside transfers, {size_name(size)}", (2 * i + 1) / steps)
                _interference(bench, plan, found, decode, plan.decode_s / plan.decode_sizes)
    progress("done", 1)
    return found


def _rotated(items: list[Any], by: int) -> Iterator[Any]:
    by %= len(items)
    yield from items[by:] + items[:by]


def _latency(bench: Bench, plan: Plan, found: Found) -> None:
    moves = bench.moves(1)
    for direction, backend in product(DIRECTIONS, BACKENDS):
        first = next(s for s in plan.settings if s.backend == backend)
        policy = policy_of(first, plan.defaults[backend])
        times = [bench.timed(direction, moves, policy) for _ in range(16)]
        found.latency_us[direction, backend] = statistics.median(times[1:]) * 1e6


def _moves(bench: Bench, setting: Setting) -> np.ndarray:
    return bench.moves(MOST_COPIES) if setting.backend == "memcpy" else bench.moves()


def _curve(bench: Bench, plan: Plan, found: Found, end: float) -> None:
    cells = list(product(DIRECTIONS, plan.settings))
    times: list[list[float]] = [[] for _ in cells]
    submits: list[list[float]] = [[] for _ in cells]
    wires: dict[str, list[float]] = {d: [] for d in DIRECTIONS}
    moves = [_moves(bench, setting) for _, setting in cells]
    policies = [policy_of(setting, plan.defaults[setting.backend]) for _, setting in cells]
    for (direction, _), rows, policy in zip(cells, moves, policies, strict=True):
        bench.verify(direction, rows, policy)
    least, most = plan.repeats
    for repeat in range(most):
        if repeat >= least and time.perf_counter() > end:
            break
        for direction in DIRECTIONS:
            count, seconds = bench.wire_s(direction)
            wires[direction].append(count / GIB / seconds)
        for i in _rotated(list(range(len(cells))), repeat * 5):
            direction, rows, policy = cells[i][0], moves[i], policies[i]
            seconds, submit = bench.submit_s(lambda d=direction, r=rows, p=policy: bench.timed(d, r, p), direction)  # type: ignore[misc]
            times[i].append(seconds)
            submits[i].append(submit)
    for (direction, setting), rows, seconds_of, submit_of in zip(cells, moves, times, submits, strict=True):
        ranges = bench.ranges(rows)
        rate = ranges * bench.range_bytes / GIB / statistics.median(seconds_of)
        point = CurvePoint(**setting.model_dump(), range_bytes=bench.range_bytes, gib_per_s=_round(rate))
        found.curve[direction].append(point)
        cost = statistics.median(submit_of) * 1e6 / ranges
        found.submit_us.setdefault((direction, setting.backend), []).append(cost)
    for direction in DIRECTIONS:
        found.wires[direction] += wires[direction]


def _p99(times: list[float]) -> float:
    return float(np.percentile(times, 99))


def _interference(bench: Bench, plan: Plan, found: Found, decode: Any, seconds: float) -> None:
    """Growth of the p99 of a step. Half of the wire is asked for; runs without transfer lie between the others."""
    cells = list(product(DIRECTIONS, plan.settings))
    every = 8  # runs for one without transfer
    share = seconds / (len(cells) * plan.rounds * (1 + 1 / every) + 1)
    alone = [step_times(decode, share, 8)]
    beside: list[list[float]] = [[] for _ in cells]
    for round_ in range(plan.rounds):
        for n, i in enumerate(_rotated(list(range(len(cells))), round_ * 7), 1):
            direction, setting = cells[i]
            rows = bench.moves()
            period = 2 * bench.ranges(rows) * bench.range_bytes / GIB / statistics.median(found.wires[direction])
            with Bursts(bench, direction, rows, policy_of(setting, plan.defaults[setting.backend]), period):
                beside[i] += step_times(decode, share, 8)
            if n % every == 0 or n == len(cells):
                alone.append(step_times(decode, share, 8))
    base = _p99([t for run in alone for t in run])
    each = [_p99(run) for run in alone]
    found.noise.append((max(each) - min(each)) / base)
    found.step_ms = statistics.median(t for run in alone for t in run) * 1e3
    for (direction, setting), times in zip(cells, beside, strict=True):
        growth = round(max(0.0, _p99(times) / base - 1), 3)
        point = InterferencePoint(**setting.model_dump(), range_bytes=bench.range_bytes, p99_growth=growth)
        found.interference[direction].append(point)


def profile_of(found: Found, place: Any, plan: Plan) -> dict[str, Any]:
    """The device profile, as write_profile() takes it."""
    name = "-".join("".join(c if c.isalnum() else " " for c in (place.gpu_name or "host").lower()).split())
    sides = {}
    for direction in DIRECTIONS:
        sides[direction] = {
            "contiguous_gib_per_s": _round(statistics.median(found.wires[direction])),
            # The least: a size with few ranges to a chunk pays the chunk's own cost as well.
            "submit_us_per_range": {b: round(min(found.submit_us[direction, b]), 3) for b in BACKENDS},
            "latency_us": {b: round(found.latency_us[direction, b], 1) for b in BACKENDS},
            "curve": [p.model_dump() for p in sorted(found.curve[direction], key=_order)],
            "interference": [p.model_dump() for p in sorted(found.interference[direction], key=_order)],
        }
    sizes = ", ".join(size_name(size) for size in sorted(SIZES[: plan.decode_sizes]))
    return {
        "name": name,
        "provenance": {
            "gpu": place.title,
            "driver": place.driver,
            "date": str(date.today()),
            "method": f"pega calibrate: {plan.total_bytes >> 20} MiB of shuffled ranges in one direction, bytes "
            f"checked, medians of {plan.repeats[0]} or more; p99 of a synthetic decode step of {found.step_ms:.1f} ms "
            f"beside bursts at half the wire's rate, ranges of {sizes}.",
            "notes": [
                "p99 of the runs without transfer lay apart by "
                + ", ".join(f"{noise:.1%}" for noise in found.noise)
                + ": smaller growths are noise.",
                f"{plan.rounds} rounds of decode runs, {plan.decode_s:.0f} s in all.",
            ],
        },
        "directions": sides,
        "defaults": {backend: default.model_dump() for backend, default in plan.defaults.items()},
        "spread_ms": plan.spread_ms,
    }


def _order(point: CurvePoint | InterferencePoint) -> tuple[int, int, int, int, int]:
    return BACKENDS.index(point.backend), point.grid, point.chunk_descriptors, point.chunk_bytes, point.range_bytes


def _round(rate: float) -> float:
    return float(f"{rate:.4g}")


def size_name(size: int) -> str:
    return f"{size} B" if size < KIB else f"{size >> 10} KiB" if size < MIB else f"{size >> 20} MiB"
