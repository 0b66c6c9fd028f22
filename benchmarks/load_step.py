# SPDX-License-Identifier: Apache-2.0
"""Where the time goes in the steps in which vLLM takes up a request whose prompt came from host memory.

Decode streams run while known prompts arrive, as in benchmarks/serving_traffic.py, and the parts of vLLM's step are
timed: scheduler, model runner, output. `--no-copies` hands every load over without its blocks: all but the copying
happens (the tokens are then wrong, which the time does not mind), so that what is left is vLLM's and ours. Without a
connector (`none`) the prompts are few enough to stay in the GPU's own prefix cache: that is what vLLM needs for any
known prompt, and so the floor under every connector.

    python benchmarks/load_step.py --streams 8 --json load-step.json
    python benchmarks/load_step.py --streams 8 --no-copies --json load-step.json    # adds to the file
    python benchmarks/load_step.py --streams 8 --connector none --json load-step.json
    python benchmarks/load_step.py --tiny                                           # on CPU
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from serving_report import percentiles, thread_times
from serving_traffic import SETUPS, kv_transfer
from serving_traffic_engine import TINY, Engine, Sizes
from serving_traffic_phases import warm_up

# Whatever of these a vLLM has. A part's time includes that of the parts that it calls.
PARTS = {
    "scheduler": ("schedule", "_update_waiting_for_remote_kv", "update_from_output", "_free_request"),
    "cache manager": ("allocate_slots", "cache_blocks", "get_computed_blocks", "free"),
    "executor": ("execute_model", "sample_tokens"),
    "runner": ("add_requests", "finish_requests", "update_requests", "prepare_inputs", "prepare_attn", "sample"),
    "output processor": ("process_outputs",),
}

ON_GPU = 3  # prompts that stay in the GPU's cache, beside 8 streams


class Parts:
    """Milliseconds of each part since the last `take`."""

    def __init__(self, engine: Engine) -> None:
        core: Any = engine.engine.engine_core
        core = core.engine_core
        places = {
            "scheduler": core.scheduler,
            "cache manager": core.scheduler.kv_cache_manager,
            "executor": core.model_executor,
            "runner": core.model_executor.driver_worker.worker.model_runner,
            "output processor": engine.engine.output_processor,
        }
        self._ms: dict[str, float] = defaultdict(float)
        for place, names in PARTS.items():
            for name in names:
                if hasattr(places[place], name):
                    self._time(places[place], name, f"{place}.{name}")

    def _time(self, owner: Any, name: str, label: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._ms[label] += (time.perf_counter() - start) * 1e3

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        taken = {label: round(ms, 3) for label, ms in self._ms.items()}
        self._ms.clear()
        return taken


class WithoutCopies:
    """The worker's native engine, but loads move no blocks."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job_id: int, direction: str, moves: bytes, keys: bytes = b"", *args: Any, **options: Any) -> bool:
        if direction == "load":
            moves, keys = moves[:0], b""
        return bool(self._engine.submit(job_id, direction, moves, keys, *args, **options))


def measure(engine: Engine, streams: int, events: int, copies: bool) -> dict[str, Any]:
    parts, steps = Parts(engine), []
    warm_up(engine)
    prompts = engine.sizes.load_prompts if engine.connected else ON_GPU
    known = [engine.prompt(engine.sizes.load_prompt, seed=i) for i in range(prompts)]
    engine.fill(known)
    if not copies:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        worker: Any = get_kv_transfer_group()
        worker._worker._engine = WithoutCopies(worker._worker._engine)
    names = engine.streams(streams)
    alone = engine.window(names)
    step = engine.step

    def stepped() -> Any:
        parts.take()
        start = time.perf_counter()
        outputs = step()
        steps.append({"ms": round((time.perf_counter() - start) * 1e3, 3), **parts.take(),
                      "connector": round(sum(engine.watch.steps[-2].values()) * 1e3, 3)})  # fmt: skip
        return outputs

    engine.step = stepped  # type: ignore[method-assign]
    engine.watch.clear()
    busy = engine.window(names, [known[i % len(known)] for i in range(events)], 1)
    watched = engine.watch.steps
    if engine.connected and not engine.watch.external_tokens:
        raise RuntimeError("no token came from the connector")
    slowest = sorted(steps, key=lambda row: -row["ms"])
    return {
        "alone": percentiles([gap for gaps in alone.gaps for gap in gaps]),
        "beside loads": percentiles([gap for gaps in busy.gaps for gap in gaps]),
        "ttft of known prompts": percentiles(busy.side_ms),
        "median step": slowest[len(slowest) // 2],
        "slowest steps": slowest[: events + 2],
        "thread_us": thread_times(watched, [True] * len(watched)) if engine.connected else {},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name in benchmarks/shapes.py, or a path; default: qwen3-4b, or tiny")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script on CPU")
    parser.add_argument("--connector", choices=SETUPS, default="pega", metavar="NAME", help=", ".join(SETUPS))
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--events", type=int, default=10)
    parser.add_argument("--no-copies", action="store_true", help="loads move nothing")
    parser.add_argument("--json", type=Path, help="adds to this file")
    args = parser.parse_args()
    if args.no_copies and not args.connector.startswith("pega"):
        parser.error("--no-copies: only our own connector can leave its copies out")
    sizes = TINY if args.tiny else Sizes()
    model = args.model or ("tiny" if args.tiny else "qwen3-4b")
    engine = Engine(model, sizes, kv_transfer(SETUPS[args.connector], sizes.host_bytes))
    found = measure(engine, args.streams, args.events, not args.no_copies) | engine.facts
    before, beside = found["alone"]["p99"], found["beside loads"]["p99"]
    name = f"{args.connector}, {args.streams} streams{', no copies' if args.no_copies else ''}"
    print(f"{name}: p99 {before:.2f} ms alone, {beside:.2f} beside loads ({beside / before:.2f} x)")
    print(f"  {'milliseconds':44}   median  slowest     next")
    rows = {"median": found["median step"], "slowest": found["slowest steps"][0], "next": found["slowest steps"][1]}
    for label in dict.fromkeys(key for row in rows.values() for key in row):
        print(f"  {label:44}" + "".join(f"{row.get(label, 0):9.2f}" for row in rows.values()))
    if args.json:
        document = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps(document | {name: found}, indent=1))
    os._exit(0)  # an interpreter that held an engine takes its time to end


if __name__ == "__main__":
    main()
