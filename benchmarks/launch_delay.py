# SPDX-License-Identifier: Apache-2.0
"""How long a process' own kernel launches take while the engine moves blocks in it.

Every submission holds the driver's lock, and a launch waits for it. This is what CudaOptions' copies_per_slice and
slice_pause_us were chosen by.

    python benchmarks/launch_delay.py --json results.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

import cupy as cp
import numpy as np
from rig import GIB, Rig

from vllm_pega_connector import _native

LINE = (
    "{range_bytes:>6} B {backend:>7} {copies:>10} x {pause_us:>2} us {batch:d}: {gib_per_s:5.1f} GiB/s, "
    "launch p50 {p50_us:6.1f} p99 {p99_us:7.1f} p99.9 {p999_us:7.1f} max {max_us:8.1f} us"
)
NOOP = cp.RawKernel('extern "C" __global__ void noop() {}', "noop")


def launches(seconds: float, step: object) -> np.ndarray:
    """Microseconds of launches, ten every half millisecond; `step` is called between them."""
    out = []
    end = time.perf_counter() + seconds
    stream = cp.cuda.Stream(non_blocking=True)
    while time.perf_counter() < end:
        for _ in range(10):
            start = time.perf_counter()
            NOOP((1,), (1,), (), stream=stream)
            out.append(time.perf_counter() - start)
        stream.synchronize()
        step()
        time.sleep(0.0003)
    return np.array(out) * 1e6


def measure(rig: Rig, policy: _native.Policy | None, seconds: float) -> dict:
    """Launch times while two jobs each way are always under way, and the rate that these reach."""
    blocks = min(rig.moving, max(2, 16384 // rig.segments))  # enough to fill the driver's queue
    idle = [(side, rows) for side in ("load", "save") for rows in np.split(rig.moves(side, "shuffled", blocks), 2)]
    busy: dict[int, tuple[str, np.ndarray]] = {}
    moved = 0
    jobs = itertools.count(1 << 32)

    def step() -> None:
        nonlocal moved
        for result in rig.engine.poll():
            moved += result.bytes
            idle.append(busy.pop(result.job_id))
        while policy is not None and idle:
            job = next(jobs)
            busy[job] = idle.pop()
            rig.engine.submit(job, *busy[job], policy=policy)

    times = launches(seconds, step)
    if not rig.engine.drain(30.0):
        raise RuntimeError("jobs did not end")
    rig.engine.poll()
    p50, p99, p999 = (float(np.percentile(times, q)) for q in (50, 99, 99.9))
    return {
        "gib_per_s": moved / GIB / seconds,
        "p50_us": p50,
        "p99_us": p99,
        "p999_us": p999,
        "max_us": float(times.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="per case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for size in (4096, 65536):
        rig = Rig(0, size, 64 << 20)
        cases = [(backend, 32, 20, True) for backend in ("none", "none", "kernel", "staged")]
        cases += [("memcpy", 8, 20, False), ("memcpy", 32, 20, False), ("memcpy", 1 << 30, 0, False)]
        cases += [("memcpy", copies, pause, True) for copies in (8, 32, 128, 1024) for pause in (0, 20)]
        for backend, copies, pause, batch in cases:
            rig.open(copies_per_slice=copies, slice_pause_us=pause, batch_copies=batch)
            policy = None if backend == "none" else _native.Policy(backend, 8, 1 << 16, 256 << 20, 2)
            found = measure(rig, policy, args.seconds)
            rig.close()
            rows.append(
                {"range_bytes": size, "backend": backend, "copies": copies, "pause_us": pause, "batch": batch, **found}
            )
            print(LINE.format(**rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
