# SPDX-License-Identifier: Apache-2.0
"""What the connector costs vLLM's scheduler: `build_connector_meta` with many long requests, and a long lookup.

Real vLLM scheduler, block pool and requests, and our real connector; only the model and the workers are missing: every
request gets a made-up token a step, and transfers are reported done in the step that hands them over.

    python -m benchmarks.scheduler_costs [--json FILE] [--profile]

Goals: build_connector_meta at most 300 us (median) at 256 running requests of 32k tokens; lookup of an 8,192-block
prompt at most 0.5 ms in an index of one million slots that takes at most 150 MB. Times are the thread's own, so that
other work on the machine counts only by what it does to caches. Needs no GPU.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import gc
import json
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from tests.support.fake_setup import Setup, make_kv_cache_config, make_vllm_config, structured_output
from vllm_pega_connector.messages import PegaHandshake, PegaWorkerMetadata

BLOCK = 16
REQUESTS = 256
TOKENS = 32_768
SLOTS = 1_000_000
PROMPT_BLOCKS = 8192
RANK = (0, 0)
Watch = Callable[[], Any]
GOALS = {"build, decode": 300.0, "lookup": 500.0, "index MB": 150.0}


class Rig:
    """vLLM's scheduler with our connector, stepped with made-up tokens."""

    def __init__(self, gpu_blocks: int, max_seqs: int, slots: int) -> None:
        setup = Setup(block_size=BLOCK, gpu_blocks=gpu_blocks, max_seqs=max_seqs, budget=1 << 20, host_slots=(slots,))
        config = make_vllm_config(setup)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = config.scheduler_config.max_model_len = 1 << 18
        self.scheduler = Scheduler(config, make_kv_cache_config(setup), structured_output(), block_size=BLOCK)
        self.connector: Any = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware({RANK: PegaHandshake((slots,), (4096,), (0,))})
        self.pega = self.connector._scheduler
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._ended: list[int] = []
        self.saved = 0
        self.build_us: list[float] = []
        build = self.connector.build_connector_meta

        def timed(output: Any) -> Any:
            start = time.thread_time()
            metadata = build(output)
            self.build_us.append((time.thread_time() - start) * 1e6)
            self._ended += [job.job_id for job in metadata.jobs]
            self.saved += sum(len(job.moves) // 12 for job in metadata.jobs if job.direction == "save")
            return metadata

        self.connector.build_connector_meta = timed

    def request(self, tokens: int, seed: int, max_tokens: int = 1 << 16) -> Request:
        prompt = np.random.default_rng(seed).integers(3, 30_000, tokens).tolist()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(f"r{seed}", prompt, params, None, block_hasher=self._hasher)

    def step(self) -> None:
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        sampled = [[7] if self._at_end(name) else [] for name in names]
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        metadata = PegaWorkerMetadata([(RANK, job, "") for job in self._ended])
        result.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=metadata)
        self._ended = []
        self.scheduler.update_from_output(output, result)

    def _at_end(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return request.num_computed_tokens >= request.num_tokens


def summary(us: list[float]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(us, (50, 90, 99))
    return {"median": float(p50), "p90": float(p90), "p99": float(p99), "max": max(us), "least": min(us)}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def index_mb() -> float:
    """Resident memory of an index whose slots all hold a key."""
    from vllm_pega_connector._native import SlotIndex

    rng = np.random.default_rng(0)
    key_bytes, rows = 32, 50_000
    rng.bytes(rows * key_bytes)
    before = resident_mb()
    index = SlotIndex([SLOTS], [0], key_bytes)
    for _ in range(SLOTS // rows):
        index.publish(0, index.reserve(0, rng.bytes(rows * key_bytes)))
    if index.counts(0)["ready"] != SLOTS:
        raise RuntimeError(f"the index holds {index.counts(0)}")
    return resident_mb() - before


def build(steps: int, prompt_tokens: int, watch: Watch) -> tuple[dict[str, float], float]:
    """Microseconds of build_connector_meta while REQUESTS requests decode, and blocks saved a step.

    A sixteenth of the requests fills a block each step. With `prompt_tokens`, a prompt of that length comes every
    fourth step, and only the steps that save its blocks count.
    """
    rig = Rig(gpu_blocks=(REQUESTS + 16) * (TOKENS // BLOCK + 32) + 1, max_seqs=REQUESTS + 16, slots=SLOTS)
    for i in range(REQUESTS):
        rig.scheduler.add_request(rig.request(TOKENS + i % BLOCK, i))
    while rig.saved < REQUESTS * (TOKENS // BLOCK):  # prefill, and its saves within their bound
        rig.step()
    prompts = [rig.request(prompt_tokens, REQUESTS + i, 3) for i in range(steps // 4 if prompt_tokens else 0)]
    gc.collect()
    gc.freeze()
    rig.build_us.clear()
    counted, total = [], rig.saved
    with watch():
        for i in range(steps):
            if prompt_tokens and i % 4 == 0:
                rig.scheduler.add_request(prompts[i // 4])
            before = rig.saved
            rig.step()
            if rig.saved - before >= prompt_tokens // BLOCK:
                counted.append(rig.build_us[-1])
    gc.unfreeze()
    running = len(rig.scheduler.running)
    if running < REQUESTS or rig.saved == total or rig.pega.drops:
        raise RuntimeError(f"{running} requests ran, {rig.saved - total} blocks saved, drops {dict(rig.pega.drops)}")
    return summary(counted), (rig.saved - total) / steps


def lookup(prompts: int, watch: Watch) -> dict[str, float]:
    """Microseconds of a prompt's first get_num_new_matched_tokens in a full index."""
    rig = Rig(gpu_blocks=64, max_seqs=8, slots=SLOTS)
    rng = np.random.default_rng(0)
    index = rig.pega._shared.index
    for i in range(prompts):
        index.publish(0, index.reserve(0, b"".join(rig.request(PROMPT_BLOCKS * BLOCK, i).block_hashes)))
    while free := index.counts(0)["free"]:
        index.publish(0, index.reserve(0, rng.bytes(min(50_000, free) * 32)))
    us = []
    with watch():
        for turn in range(5 * prompts):
            request = rig.request(PROMPT_BLOCKS * BLOCK, turn % prompts)  # new, as it comes: its hashes just made
            rig.connector.on_new_request(request)
            start = time.thread_time()
            tokens, _ = rig.connector.get_num_new_matched_tokens(request, 0)
            us.append((time.thread_time() - start) * 1e6)
            if tokens != PROMPT_BLOCKS * BLOCK:
                raise RuntimeError(f"{tokens} tokens were found of {PROMPT_BLOCKS * BLOCK}")
            rig.connector.request_finished_all_groups(request, ([],))
    return summary(us)


@contextmanager
def profiled(on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    with cProfile.Profile() as profile:
        yield
    pstats.Stats(profile).sort_stats("cumulative").print_stats("pega|join|built-in", 25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="decode steps measured")
    parser.add_argument("--prompts", type=int, default=16, help="different prompts looked up")
    parser.add_argument("--profile", action="store_true", help="where the time goes; the times themselves then mislead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    def watch() -> Any:
        return profiled(args.profile)

    megabytes = index_mb()  # first, while the heap has no holes
    rows = {"lookup": lookup(args.prompts, watch)}
    rows["build, decode"], saved = build(args.steps, 0, watch)
    rows["build, 8k prompt"], _ = build(args.steps, 8192, watch)
    print(f"{'microseconds':<22} {'median':>9} {'p90':>9} {'p99':>9} {'max':>9} {'least':>9}  goal (median)")
    for name, us in rows.items():
        goal = f"{GOALS[name]:.0f}" if name in GOALS else "-"
        print(f"{name:<22} " + " ".join(f"{us[k]:9.1f}" for k in ("median", "p90", "p99", "max", "least")), "", goal)
    print(f"index of {SLOTS:,} slots: {megabytes:.1f} MB; goal {GOALS['index MB']:.0f}")
    print(f"blocks saved while {REQUESTS} requests decode: {saved:.1f} a step")
    if args.json:
        args.json.write_text(json.dumps({"us": rows, "index_mb": megabytes, "goals": GOALS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
