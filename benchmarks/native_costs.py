# SPDX-License-Identifier: Apache-2.0
"""What the native engine costs the threads of vLLM: hand-over, planning, lookup. No GPU needed.

    python benchmarks/native_costs.py [--json FILE]

Peers spend 5 to 48 ms of Python and driver time per step where `hand-over` and `lookup` stand here.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_pega_connector import _native as native

BLOCKS = 1024  # of one hand-over: 16k tokens of 16
LAYERS = 36  # Qwen3-4B
PAGE_BYTES = 256  # small: the copying itself is not what is measured here
PLAN_FRAGMENTS = 65_536
INDEX_SLOTS = 1_000_000
LOOKUP_KEYS = 8_192


def cost_us(
    run: Callable[[int], object], repeats: int, between: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """{"median", "least"} time of `run(i)` in microseconds; `between` runs untimed after each.

    On a machine with other work the least tells more about the code, the median more about the machine.
    """
    times = []
    for i in range(repeats):
        start = time.perf_counter()
        run(i)
        times.append((time.perf_counter() - start) * 1e6)
        between()
    return {"median": statistics.median(times), "least": min(times)}


def make_memory(blocks: int, layers: int) -> tuple[np.ndarray, native.GroupLayout, native.HostPool]:
    """(device buffer to keep alive, layout of one allocation per layer, pool of as many slots as blocks)."""
    device = np.zeros((layers, blocks, PAGE_BYTES), dtype=np.uint8)
    segments = [native.Segment(page.ctypes.data, PAGE_BYTES, PAGE_BYTES, i + 1) for i, page in enumerate(device)]
    layout = native.GroupLayout(segments, blocks)
    return device, layout, native.HostPool([(layout.slot_bytes, blocks)])


def shuffled_moves(count: int, blocks: int) -> np.ndarray:
    """uint32 [count, 3] rows of (0, block, slot): scattered blocks into scattered slots, the worst case."""
    rng = np.random.default_rng(0)
    moves = np.zeros((count, 3), dtype=np.uint32)
    moves[:, 1] = rng.permutation(blocks)[:count]
    moves[:, 2] = rng.permutation(blocks)[:count]
    return moves


def hand_over() -> dict[str, float]:
    """Microseconds that submit() of BLOCKS x LAYERS fragments takes on the calling thread, engine thread running."""
    _device, layout, pool = make_memory(2 * BLOCKS, LAYERS)
    profile = native.DeviceProfile({"name": "benchmark"})
    engine = native.TransferEngine(native.HostDevice(1), pool, [layout], [0], profile)
    moves, keys = shuffled_moves(BLOCKS, 2 * BLOCKS), bytes(32 * BLOCKS)

    def settle() -> None:
        if not engine.drain(30) or [r.status for r in engine.poll()] != ["done"]:
            raise RuntimeError("the benchmark's transfer did not finish")

    cost = cost_us(lambda i: engine.submit(i, "save", moves, keys), 200, settle)
    engine.close()
    return cost


def planning(blocks: int, layers: int) -> dict[str, float]:
    """Microseconds to sort, expand and merge shuffled blocks; without the cost of making the Python list."""
    _device, layout, pool = make_memory(blocks, layers)
    profile = native.DeviceProfile({"name": "benchmark"})
    # A device that never gets a chunk: the job waits for an event, and is planned meanwhile.
    engine = native.TransferEngine(
        native.SimDevice(1, max_delay_steps=10**6), pool, [layout], [0], profile, threaded=False
    )
    moves = shuffled_moves(blocks, blocks)

    def submit(i: int) -> None:
        event = engine.record_event()
        engine.submit(i, "load", moves, event=event)
        engine.release_event(event)

    def end() -> None:
        engine.cancel(next(ids))
        engine.step()
        (result,) = engine.poll()
        if result.ranges != blocks * layers:
            raise RuntimeError(f"{result.ranges} ranges planned, not {blocks * layers}")
        submit(result.job_id + 1)

    ids = itertools.count()
    submit(0)
    cost = cost_us(lambda _: engine.step(), 50, end)
    engine.close()
    return cost


def lookup() -> dict[str, dict[str, float]]:
    """Microseconds for a prompt of LOOKUP_KEYS blocks in an index with INDEX_SLOTS ready keys."""
    rng = np.random.default_rng(0)
    index = native.SlotIndex([INDEX_SLOTS], [0])
    keys = rng.integers(0, 256, (INDEX_SLOTS, 32), dtype=np.uint8)
    for start in range(0, INDEX_SLOTS, 50_000):
        index.publish(0, index.reserve(0, keys[start : start + 50_000].tobytes()))
    prompts = [keys[rng.integers(0, INDEX_SLOTS - LOOKUP_KEYS) :][:LOOKUP_KEYS].tobytes() for _ in range(50)]
    scattered = [keys[rng.permutation(INDEX_SLOTS)[:LOOKUP_KEYS]].tobytes() for _ in range(20)]
    held: list[bytes] = []

    def unpin() -> None:
        index.unpin(0, held.pop())

    costs = {}
    for name, many in (("", prompts), (" scattered", scattered)):
        pin = lambda i, many=many: held.append(index.match_and_pin(0, many[i]))  # noqa: E731
        costs[f"lookup and pin of {LOOKUP_KEYS:,}{name} keys"] = cost_us(pin, len(many), unpin)
        match = lambda i, many=many: index.match(0, many[i])  # noqa: E731
        costs[f"lookup of {LOOKUP_KEYS:,}{name} keys"] = cost_us(match, len(many))
    fresh = rng.integers(0, 256, (50, 256, 32), dtype=np.uint8)
    costs["reserve 256 slots, evicting"] = cost_us(lambda i: index.reserve(0, fresh[i].tobytes()), 50)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write {name: {median, least}} to this file")
    arguments = parser.parse_args()
    costs = {
        f"hand-over of {BLOCKS:,} blocks x {LAYERS} layers": hand_over(),
        f"planning {PLAN_FRAGMENTS:,} fragments, {PLAN_FRAGMENTS // 32:,} blocks": planning(PLAN_FRAGMENTS // 32, 32),
        f"planning {PLAN_FRAGMENTS:,} fragments, {PLAN_FRAGMENTS:,} blocks": planning(PLAN_FRAGMENTS, 1),
        **lookup(),
    }
    print(f"{'microseconds':<48} {'median':>10} {'least':>10}")
    for name, us in costs.items():
        print(f"{name:<48} {us['median']:>10.1f} {us['least']:>10.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(costs, indent=2) + "\n")


if __name__ == "__main__":
    main()
