# SPDX-License-Identifier: Apache-2.0
"""Decode latency beside transfers, on a real vLLM engine in this process.

While the engine decodes, a paced native transfer engine of the connector's own kind moves fragments of the instance's
KV cache, both ways, every period: shuffled blocks of 16 fragments each, as of 16 layers. "wall" is the time between
steps; "gpu" that of the step's CUDA graph, by events around its replay. Each mode is measured in several rounds of
rotated order, with runs without any transfer first, in the middle and last: their spread is the noise, and it is
printed. Beside latency stand the rate reached and the time a burst took, since a throttled copy always looks gentle.

    python benchmarks/serving_interference.py --model qwen3-4b --json interference.json

`--model`: a name in SHAPES (dummy weights; needs no download), or a path with weights. On CPU vLLM it runs too, to
try the script: --model PATH --contexts 128 --steps 40 --burst-kib 256.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
from shapes import SHAPES, model_options

SETS = 10  # bursts that may be under way at once; each has blocks and slots of its own
SEGMENTS = 16  # fragments of a block, each in an area of its own
NONE = "no transfer"


@dataclass(frozen=True)
class Mode:
    name: str
    policy: dict[str, Any] | None  # None: Auto
    objective: str = "balanced"
    moves: bool = True  # False: bursts of no bytes, which show what this script itself costs the engine


MODES = (
    Mode("empty bursts", None, moves=False),
    *(Mode(f"auto {objective}", None, objective) for objective in ("balanced", "tail", "throughput", "strict")),
    Mode("memcpy", {"backend": "memcpy"}),
    Mode("kernel, full grid", {"backend": "kernel", "max_grid_blocks": 16384}),
    Mode("kernel, 256 CTAs", {"backend": "kernel", "max_grid_blocks": 256}),
    Mode("kernel, 8 CTAs", {"backend": "kernel", "max_grid_blocks": 8}),
    Mode(
        "chunked, 8 CTAs, 1024 awaited",
        {"backend": "chunked", "max_grid_blocks": 8, "chunk_descriptors": 1024, "inflight_chunks": 1},
    ),
    Mode(
        "chunked, 8 CTAs, 1024, 8 in flight",
        {"backend": "chunked", "max_grid_blocks": 8, "chunk_descriptors": 1024, "inflight_chunks": 8},
    ),
    Mode(
        "staged, 4 CTAs, 1 MiB x 2",
        {"backend": "staged", "max_grid_blocks": 4, "chunk_bytes": 1 << 20, "inflight_chunks": 2},
    ),
    Mode(
        "staged, 16 CTAs, 8 MiB x 3",
        {"backend": "staged", "max_grid_blocks": 16, "chunk_bytes": 8 << 20, "inflight_chunks": 3},
    ),
    Mode(
        "staged, 8 CTAs, 8 MiB, over 20 ms",
        {"backend": "staged", "max_grid_blocks": 8, "chunk_bytes": 8 << 20, "inflight_chunks": 2, "spread_us": 20_000},
    ),
)


class Server:
    """A vLLM engine stepped here; measures wall time between steps and, on a GPU, each step by events."""

    def __init__(self, model: str, max_length: int, batch: int) -> None:
        import torch
        from vllm import EngineArgs, LLMEngine

        options = model_options(model)
        self.cuda = torch.cuda.is_available()
        if self.cuda:
            sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= max(batch, 1)]
            options["compilation_config"] = {
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes,
            }  # fmt: skip
            options["gpu_memory_utilization"] = 0.6
        else:
            options |= {"enforce_eager": True, "num_gpu_blocks_override": 512, "block_size": 32}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(skip_tokenizer_init=True, max_model_len=max_length, seed=0,
                       enable_prefix_caching=False, async_scheduling=False, max_num_seqs=max(batch, 8), **options)
        )  # fmt: skip
        core: Any = self.engine.engine_core
        self.worker = core.engine_core.model_executor.driver_worker.worker
        kv = self.worker.model_runner.kv_caches
        self.kv = list(kv.values()) if isinstance(kv, dict) else [t for t in kv if t is not None]
        self._events: list[tuple[Any, Any]] = []
        if self.cuda:
            self._time_steps(torch.cuda)
        self._count = itertools.count()

    def _time_steps(self, cuda: Any) -> None:
        """Events around each replay of a CUDA graph: the step on the GPU, without what the CPU prepares before it."""
        replay = cuda.CUDAGraph.replay

        def timed(graph: Any) -> None:
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            replay(graph)
            end.record()
            self._events.append((start, end))

        cuda.CUDAGraph.replay = timed

    def decode(self, batch: int, context: int, steps: int, warm_up: int) -> tuple[list[float], list[float]]:
        """(milliseconds between decode steps on the wall, milliseconds of each graph on the GPU) of one pure decode."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=steps, temperature=0, ignore_eos=True, detokenize=False)
        for i in range(batch):
            prompt = [(j * 7 + i) % 1000 + 3 for j in range(context)]
            self.engine.add_request(f"d{next(self._count)}", {"prompt_token_ids": prompt}, params)
        stamps: list[float] = []
        self._events.clear()
        while self.engine.has_unfinished_requests():
            self.engine.step()
            stamps.append(time.perf_counter())
        skip = warm_up + len(stamps) - steps  # prefill steps, then warm-up
        if self._events:
            self._events[-1][1].synchronize()
        gpu = [start.elapsed_time(end) for start, end in self._events[warm_up:]]
        return (np.diff(stamps)[skip:] * 1e3).tolist(), gpu


class Stress:
    """Moves `fragments` of `size` bytes each way, or one way, every `period` seconds, from a thread of its own."""

    def __init__(self, kv: Any, fragments: int, size: int, period_s: float, directions: str) -> None:
        from vllm_pega_connector import _native
        from vllm_pega_connector.devices import open_device
        from vllm_pega_connector.profile import load_profile

        self._native = _native
        self._period_s = period_s
        self._sides = ("load", "save") if directions == "both" else (directions,)
        count = fragments // SEGMENTS
        self.bytes_per_burst = count * SEGMENTS * size * len(self._sides)
        half = count * SETS
        # The end of a layer's memory: blocks that a few decode streams never reach.
        room = kv.untyped_storage().nbytes() if kv.storage_offset() == 0 else kv.numel() * kv.element_size()
        area = 2 * half * size
        if room < area * SEGMENTS * 3 // 2:
            raise SystemExit(f"the KV cache of a layer has {room >> 20} MiB; {area * SEGMENTS * 3 >> 21} are needed")
        base = kv.data_ptr() + (room - area * SEGMENTS) // 4096 * 4096
        segments = [_native.Segment(base + i * area, size, size, 0) for i in range(SEGMENTS)]
        layout = _native.GroupLayout(segments, 2 * half)
        self._pool = _native.HostPool([(size * SEGMENTS, 2 * SETS * count)], prefault=True)
        device = open_device(kv.device)
        device.register_pool(self._pool)
        self._stream = device.current_stream
        profile = _native.DeviceProfile(load_profile("auto", device.gpu_name))
        self.profile = profile.name
        self._engine = _native.TransferEngine(device.native, self._pool, [layout], [0], profile)
        rng = np.random.default_rng(0)
        self._sets: list[dict[str, np.ndarray]] = [{} for _ in range(SETS)]
        for k, side in enumerate(("load", "save")):
            blocks = rng.permutation(half) + k * half
            for i, moves in enumerate(self._sets):
                slots = np.arange(count) + (k * SETS + i) * count
                mine = blocks[i * count : (i + 1) * count]
                moves[side] = np.stack([np.zeros(count), mine, slots], 1).astype(np.uint32, order="C")
        self._jobs = itertools.count(1)

    def run(self, mode: Mode, stop: threading.Event) -> dict[str, Any]:
        """Hands a burst over every period until told to stop; where SETS are under way the next is late.

        The rate is that of the jobs that were seen to end after the first, over the time between the first and the
        last of these: a burst that is spread over a period has neither a head nor a tail that counts for nothing.
        """
        policy = self._native.Policy(**mode.policy) if mode.policy else None
        took: list[float] = []
        used: set[str] = set()
        owner: dict[int, int] = {}  # of a job: its set
        left = [0] * SETS  # jobs of a set under way

        seen: list[tuple[float, int]] = []  # when jobs were found to have ended, and how many had by then

        def collect() -> None:
            results = self._engine.poll()
            for result in results:
                if result.status != "done":
                    raise RuntimeError(f"{result.direction} {result.status}: {result.error}")
                left[owner.pop(result.job_id)] -= 1
                took.append(result.queue_s + result.transfer_s)
                used.add(f"{result.direction} {result.backend}: {result.reason}")
            if results:
                seen.append((time.perf_counter(), len(took)))

        due = time.perf_counter()
        while not stop.is_set():
            collect()
            free = next((i for i, jobs in enumerate(left) if jobs == 0), None)
            if free is not None:
                for side in self._sides:
                    job = next(self._jobs)
                    owner[job], left[free] = free, left[free] + 1
                    moves = self._sets[free][side][: None if mode.moves else 0]
                    self._engine.submit(job, side, moves, policy=policy, objective=mode.objective)
            due = max(due + self._period_s, time.perf_counter() - self._period_s)
            stop.wait(max(0.0, due - time.perf_counter()))
        collect()
        if len(seen) < 2:
            raise RuntimeError(f"the run was over before two bursts had ended; {len(took)} jobs had")
        (began, before), (ended, after) = seen[0], seen[-1]
        moved = (after - before) / len(self._sides) * self.bytes_per_burst if mode.moves else 0
        if not self._engine.drain(30):
            raise RuntimeError("a burst did not end within 30 s")
        collect()
        return {"gib_per_s": moved / (ended - began) / 2**30, "burst_ms": statistics.median(took) * 1e3,
                "backends": sorted(used)}  # fmt: skip

    def close(self) -> None:
        self._engine.close(10)


def percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99, p999 = np.percentile(values, (50, 99, 99.9))
    return {"mean": float(np.mean(values)), "p50": float(p50), "p99": float(p99), "p99.9": float(p999),
            "max": float(max(values)), "samples": len(values)}  # fmt: skip


def measure(server: Server, stress: Stress | None, mode: Mode, case: dict[str, int]) -> dict[str, Any]:
    """One run of one mode."""
    moved: dict[str, Any] = {}
    if stress is None:
        wall, gpu = server.decode(**case)
    else:
        stop = threading.Event()
        thread = threading.Thread(target=lambda: moved.update(stress.run(mode, stop)))
        thread.start()
        try:
            wall, gpu = server.decode(**case)
        finally:
            stop.set()
            thread.join()
    return {"mode": mode.name, "wall": wall, "gpu": gpu, **moved}


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a mode, all rounds pooled; growth is against all runs without transfer of the same case."""
    rows = []
    base = {k: percentiles([v for r in runs if r["mode"] == NONE for v in r[k]]) for k in ("wall", "gpu")}
    for name in dict.fromkeys(r["mode"] for r in runs):
        mine = [r for r in runs if r["mode"] == name]
        row: dict[str, Any] = {"mode": name, "rounds": len(mine)}
        for clock in ("wall", "gpu"):
            row[clock] = percentiles([v for r in mine for v in r[clock]])
            if row[clock]:
                row[f"{clock}_p99_growth"] = row[clock]["p99"] / base[clock]["p99"] - 1
                spread = [percentiles(r[clock])["p99"] for r in mine]
                row[f"{clock}_p99_of_rounds"] = [min(spread), max(spread)]
        for key in ("gib_per_s", "burst_ms"):
            if key in mine[0]:
                row[key] = statistics.median(r[key] for r in mine)
        row["backends"] = sorted({b for r in mine for b in r.get("backends", ())})
        rows.append(row)
    return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n### {title}\n")
    print("| mode | GiB/s | burst ms | wall mean | p50 | p99 | p99.9 | max | wall p99 (rounds) | GPU step p99 |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        wall, gpu = row["wall"], row["gpu"]
        rate = f"{row['gib_per_s']:.3f} | {row['burst_ms']:.2f}" if "gib_per_s" in row else "- | -"
        low, high = row["wall_p99_of_rounds"]
        step = f"{gpu['p99']:.3f} ({row['gpu_p99_growth']:+.1%})" if gpu else "-"
        print(
            f"| {row['mode']} | {rate} | {wall['mean']:.3f} | {wall['p50']:.3f} | {wall['p99']:.3f} "
            f"({row['wall_p99_growth']:+.1%}) | {wall['p99.9']:.3f} | {wall['max']:.3f} | {low:.2f}-{high:.2f} | "
            f"{step} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b", help=f"a path, or one of {', '.join(SHAPES)}")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.5], help="GiB/s asked for, all directions")
    parser.add_argument("--fragment-bytes", type=int, nargs="+", default=[4096])
    parser.add_argument("--burst-kib", type=int, default=65536, help="per direction and burst")
    parser.add_argument("--directions", choices=("both", "load", "save"), nargs="+", default=["both"])
    parser.add_argument("--modes", nargs="*", help="only modes whose name contains one of these")
    parser.add_argument("--policy", action="append", type=json.loads, default=[], metavar="JSON",
                        help='one more mode, for example \'{"backend": "staged", "spread_us": 10000}\'')  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--warm-up", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    modes = [m for m in MODES if args.modes is None or any(word in m.name for word in args.modes)]
    modes += [Mode(", ".join(map(str, policy.values())), policy) for policy in args.policy]
    if not modes:
        parser.error(f"--modes {args.modes} names none of: {', '.join(m.name for m in MODES)}")
    server = Server(args.model, max(args.contexts) + args.steps + 16, max(args.batches))
    server.decode(1, 64, args.warm_up + 8, 0)
    document: dict[str, Any] = {
        "options": {k: str(v) for k, v in vars(args).items() if k != "json"},
        "host": platform.platform(),
        "modes": [asdict(m) for m in modes],
        "cases": [],
    }
    for batch, context, rate, size, directions in itertools.product(
        args.batches, args.contexts, args.rates, args.fragment_bytes, args.directions
    ):
        fragments = (args.burst_kib << 10) // size
        period = fragments * size * (2 if directions == "both" else 1) / (rate * 2**30)
        stress = Stress(server.kv[0], fragments, size, period, directions)
        case = {"batch": batch, "context": context, "steps": args.steps, "warm_up": args.warm_up}
        none, runs = Mode(NONE, None), []
        server.decode(**case)
        for turn in range(args.rounds):
            order = modes[turn * len(modes) // args.rounds :] + modes[: turn * len(modes) // args.rounds]
            half = len(order) // 2
            plan: list[Mode] = [none, *order[:half], none, *order[half:], none]
            runs += [measure(server, None if m is none else stress, m, case) for m in plan]
        stress.close()
        rows = summarise(runs)
        show(f"{directions}, {size} B fragments, batch {batch}, context {context}, {rate} GiB/s asked for", rows)
        moved = {"directions": directions, "fragment_bytes": size, "fragments": fragments, "rate": rate}
        document["cases"].append({**case, **moved, "period_s": period, "profile": stress.profile, "rows": rows})
        if args.json:
            args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
