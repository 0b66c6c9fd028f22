# SPDX-License-Identifier: Apache-2.0
"""The phases of benchmarks/serving_traffic.py: each asks one engine for something and answers with figures."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from serving_report import excess, percentiles, rate, thread_times
from serving_traffic_engine import Engine, Window

Note = Callable[[str, Any], None]
NOTHING = "no token came from the connector"


def session(engine: Engine, kind: str, streams: int, events: int, repeats: int) -> dict[str, Any]:
    """`load` or `store` beside decode streams; each repeat is framed by the same streams alone."""
    sizes, watch = engine.sizes, engine.watch
    known = [engine.prompt(sizes.load_prompt, seed=i) for i in range(sizes.load_prompts)]
    if kind == "load":
        engine.fill(known)
    alone: list[Window] = []
    busy: list[Window] = []
    steps: list[dict[str, float]] = []
    active: list[bool] = []
    moved: list[tuple[str, float, float]] = []
    asked, brought = 0, 0
    drops: Counter[str] = Counter()
    for turn in range(repeats):
        if kind == "load":
            prompts, tokens = [known[(turn * events + i) % len(known)] for i in range(events)], 1
        else:
            prompts, tokens = [engine.prompt(sizes.store_prompt) for _ in range(events)], 4
        names = engine.streams(streams)
        alone.append(engine.window(names))
        watch.clear()
        busy.append(engine.window(names, prompts, tokens))
        steps += watch.steps
        active += [i in watch.active for i in range(len(watch.steps))]
        brought += watch.external_tokens
        asked += sum(map(len, prompts))
        alone.append(engine.window(names))
        moved += watch.transfers
        drops += watch.drops
        engine.stop(names)
        engine.settle()
    result = summarise(alone, busy, events, sizes.excess_above_ms)
    result |= {"streams": streams, "events": events, "hit_rate": brought / asked, "drops": drops, "void": ""}
    result |= {"thread_us": thread_times(steps, active)} if engine.connected else {}
    result |= {f"{d}_gib_s": value for d in ("load", "save") if (value := rate(moved, d)) is not None}
    if engine.connected and kind == "store":
        result["stored_share"] = engine.share_found(prompts[-4:])
    if engine.connected and not (brought if kind == "load" else result["stored_share"]):
        result["void"] = NOTHING
    return result


def summarise(alone: list[Window], busy: list[Window], events: int, above_ms: float) -> dict[str, Any]:
    def flat(windows: list[Window]) -> list[float]:
        return [gap for window in windows for gaps in window.gaps for gap in gaps]

    each = [statistics.mean(excess(gaps, above_ms) for gaps in window.gaps) / events for window in busy]
    return {
        "alone": percentiles(flat(alone)),
        "alone_p99_each": [percentiles(flat([window]))["p99"] for window in alone],
        "itl": percentiles(flat(busy)),
        "itl_p99_each": [percentiles(flat([window]))["p99"] for window in busy],
        "excess_ms": statistics.mean(each),
        "excess_ms_each": each,
        "side_ms": percentiles([ms for window in busy for ms in window.side_ms]),
        # One stream's, for the plot: all streams get their tokens in the same steps.
        "gaps_ms": [round(gap, 3) for window in busy for gap in window.gaps[0]],
        "alone_gaps_ms": [round(gap, 3) for window in alone for gap in window.gaps[0]],
    }


def first_tokens(engine: Engine, tokens: int, repeats: int) -> dict[str, Any]:
    """Median time to first token of one prompt: computed, still on the GPU, and only in host memory."""
    watch, rows = engine.watch, []
    watch.clear()
    for _ in range(repeats):
        prompt = engine.prompt(tokens)
        row = {"cold": engine.time_to_first_token(prompt, engine.sizes.fill_tokens)}
        engine.settle()
        row["gpu"] = engine.time_to_first_token(prompt, 1)
        engine.settle()
        engine.reset()
        before = watch.external_tokens
        row["host"] = engine.time_to_first_token(prompt, 1)
        row["hit_rate"] = (watch.external_tokens - before) / tokens
        engine.settle()
        rows.append(row)
    result: dict[str, Any] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    result |= {"rows": rows, "load_gib_s": rate(watch.transfers, "load")}
    result["void"] = NOTHING if engine.connected and not result["hit_rate"] else ""
    return result


def throughput(engine: Engine, repeats: int) -> dict[str, Any]:
    """Seconds for a batch of new prompts with 8 tokens each."""
    seconds = []
    for _ in range(repeats):
        prompts = [engine.prompt(engine.sizes.store_prompt) for _ in range(engine.sizes.throughput_requests)]
        start = time.perf_counter()
        for prompt in prompts:
            engine.add(prompt, 8)
        engine.drain()
        seconds.append(time.perf_counter() - start)
        engine.settle()
    result: dict[str, Any] = {"seconds": seconds, "void": ""}
    if engine.connected:
        result["stored_share"] = engine.share_found(prompts[:: max(1, len(prompts) // 4)])
        result["void"] = "" if result["stored_share"] else "nothing was stored"
    return result


def warm_up(engine: Engine) -> None:
    """Every shape that will be met, and a request beside streams."""
    sizes = engine.sizes
    for tokens in (64, sizes.context, sizes.batched, max(sizes.ttft_prompts)):
        engine.add(engine.prompt(tokens), 4)
        engine.drain()
    names = engine.streams(8)
    engine.window(names, [engine.prompt(sizes.store_prompt)])
    engine.stop(names)
    engine.settle()
    gc.collect()
    gc.freeze()


def measure(engine: Engine, phases: list[str], events: int, repeats: int, note: Note) -> None:
    """Runs the phases in order; `note` gets each one's figures as soon as they are there."""
    warm_up(engine)
    for phase in phases:
        began = time.perf_counter()
        if phase == "ttft":
            note(phase, {str(n): first_tokens(engine, n, repeats + 1) for n in engine.sizes.ttft_prompts})
        elif phase == "throughput":
            note(phase, throughput(engine, repeats))
        else:
            note(phase, session(engine, phase[:-1], int(phase[-1]), events, repeats))
        print(f"{phase} took {time.perf_counter() - began:.1f} s", flush=True)
