# SPDX-License-Identifier: Apache-2.0
"""`pega calibrate`: measures this machine's device and writes a device profile of it."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .config import ConfigError
from .profile import DeviceProfile, read_profile, write_profile

OBJECTIVES = ("throughput", "balanced", "tail", "strict")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this device and write a profile of it",
        description="Measures throughput and the effect on decode of every setting that Auto can choose, with the "
        "engine itself, and writes a device profile. Nothing else should use the device meanwhile.",
        epilog="example: pega calibrate --out my-gpu.json --plot my-gpu.png; then set "
        '"device_profile": "/path/of/my-gpu.json" in kv_connector_extra_config',
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="FILE", default="profile.json", help="default: profile.json; replaced whole")
    parser.add_argument("--quick", action="store_true", help="under 20 s and coarse, instead of under two minutes")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves here")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda", help="default: cuda, the first GPU")
    parser.add_argument("--json", action="store_true", help="print what Auto will do as JSON, no progress")
    parser.set_defaults(run=run, command="calibrate")


def run(args: Any) -> int:
    out = _writable("--out", args.out)
    plot = _writable("--plot", args.plot) if args.plot else None
    if plot is not None:
        if plot.suffix.lower() != ".png":
            raise ConfigError([f"--plot: got {plot}; allowed: a name that ends in .png"])
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(["--plot: matplotlib is missing; install vllm-pega-connector[bench] or omit --plot"])
    try:
        from . import _native, calibrate  # noqa: F401 - said before anything is measured
        from .calibrate_bench import CudaPlace, HostPlace
    except ImportError as error:
        raise ConfigError([f"the native module is missing ({error}); reinstall vllm-pega-connector"]) from None
    place: Any = CudaPlace() if args.device == "cuda" else HostPlace()
    plan = calibrate.PLANS[args.device, args.quick]
    console = Console(stderr=True)  # results go to standard output
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, disable=args.json) as bar:
            task = bar.add_task(place.title, total=1.0)
            found = calibrate.calibrate(
                place, plan, lambda text, part: bar.update(task, description=text, completed=part)
            )
    except (RuntimeError, MemoryError) as error:  # wrong bytes, a failed transfer, too little memory to pin
        print(f"pega calibrate: {error}; no profile was written", file=sys.stderr)
        return 1
    profile = calibrate.profile_of(found, place, plan)
    _write(profile, out)
    if plot is not None:
        from .calibrate_plot import draw

        draw(profile, plot)
    decisions = decide_all(read_profile(out))
    if args.json:
        print(
            json.dumps({"profile": str(out), "seconds": time.perf_counter() - start, "decisions": decisions}, indent=1)
        )
        return 0
    _show(Console(), decisions)
    print(f"\n{out} written after {time.perf_counter() - start:.0f} s: {profile['provenance']['notes'][0]}")
    print(f'to use it: "device_profile": "{out.resolve()}"')
    return 0


def _writable(option: str, name: str) -> Path:
    """Said before minutes of measuring, not after."""
    path = Path(name).expanduser()
    if path.is_dir():
        raise ConfigError([f"{option}: {path} is a folder; give a file's name"])
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError([f"{option}: cannot write into the folder {path.parent}"])
    return path


def _write(profile: dict[str, Any], out: Path) -> None:
    DeviceProfile.model_validate(profile)
    try:
        write_profile(profile, out)
    except OSError as error:
        raise ConfigError([f"--out: cannot write {out}: {error.strerror}"]) from None


def decide_all(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """What Auto does under this profile, for 64 MiB of ranges of usual sizes under each objective."""
    from . import _native

    known, rows = _native.DeviceProfile(profile), []
    for direction in ("load", "save"):
        for size in (512, 4 << 10, 64 << 10, 1 << 20):
            shape = _native.TransferShape(direction, (64 << 20) // size, 64 << 20, size, size)
            for objective in OBJECTIVES:
                decision = _native.decide(shape, known, objective, _native.Policy())
                row = {"direction": direction, "range_bytes": size, "objective": objective}
                fields = ("backend", "max_grid_blocks", "chunk_descriptors", "chunk_bytes", "inflight_chunks", "reason")
                rows.append(row | {name: getattr(decision, name) for name in fields})
    return rows


def _show(console: Console, decisions: list[dict[str, Any]]) -> None:
    from .calibrate import size_name

    table = Table(title="Auto, for 64 MiB (CTAs x chunk)", box=None, pad_edge=False)
    for column in ("direction", "ranges of", *OBJECTIVES):
        table.add_column(column)
    rows: dict[tuple[str, int], list[str]] = {}
    for d in decisions:
        ctas = "" if d["backend"] == "memcpy" else f" {d['max_grid_blocks']}"
        chunk = "" if d["backend"] == "kernel" else f" x {size_name(d['chunk_bytes'])}"
        rows.setdefault((d["direction"], d["range_bytes"]), []).append(f"{d['backend']}{ctas}{chunk}")
    for (direction, size), cells in rows.items():
        table.add_row(direction, size_name(size), *cells)
    console.print(table)
