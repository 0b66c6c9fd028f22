# SPDX-License-Identifier: Apache-2.0
"""vLLM without a model: its real scheduler and our real connector, around a forward pass that only writes known KV.

`FakeEngine` steps as vLLM's EngineCore does, with one step in flight (Scheduler) or two (AsyncScheduler). The GPU
executes steps in order; what the connector hands over with a step runs behind all earlier ones.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from tests.support.fake_rival import Rival
from tests.support.fake_runner import FakeRunner, Rank, Step
from tests.support.fake_setup import Setup, make_kv_cache_config, make_vllm_config, structured_output
from tests.support.fake_transfers import FakeTransfers, Faults, RankMemory, TokenSequence, Violation, mix
from vllm_pega_connector import PegaConnector, guard
from vllm_pega_connector.messages import PegaHandshake


@dataclass
class FakeEngine:
    """`seen` counts what happened; `check_idle` is the end of every test."""

    setup: Setup
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=lambda: Faults(stall=0.0))
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        setup, config = self.setup, make_vllm_config(self.setup)
        cache = make_kv_cache_config(setup)
        kind = AsyncScheduler if setup.asynchronous else Scheduler
        self.scheduler = kind(config, cache, structured_output(), block_size=setup.block_size)
        self.scheduler.use_v2_model_runner = setup.v2_runner
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._allocated: list[int] = []
        self._hook_pool()
        self.ranks = [self._make_rank(config, cache, r) for r in range(len(setup.host_slots))]
        self.connector: Any = self.scheduler.connector
        assert isinstance(self.connector, PegaConnector) and self.connector._scheduler is not None
        self.pega = self.connector._scheduler
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, r): PegaHandshake((slots,), (4096,), (0,)) for r, slots in enumerate(setup.host_slots)}
        )
        self._hasher = get_request_block_hasher(setup.block_size, sha256)
        self.queue: deque[Step] = deque()  # newest first, as in EngineCore
        self.steps = 0
        self.weights = 0
        self.requests: dict[str, Request] = {}
        self.sequences: dict[str, TokenSequence] = {}
        self._keys: dict[bytes, np.ndarray] = {}
        self._aborts: list[str] = []
        self._faults_before = guard.faults
        self.runner = FakeRunner(setup, self.ranks, self.sequences, self.rng, self.seen)
        self.rival: Rival | None = None
        if setup.rival:
            self.rival = Rival(self.connector, setup.block_size, setup.rival, self.faults.stall, self.rng, self.seen)

    def _make_rank(self, config: VllmConfig, cache: KVCacheConfig, rank: int) -> Rank:
        setup = self.setup
        memory = RankMemory.make(setup.gpu_blocks, setup.host_slots[rank], setup.block_size, rank)
        transfers = FakeTransfers(memory, self.rng, self.faults, self._keys_of, self.seen)
        connector = PegaConnector(config, KVConnectorRole.WORKER, cache)
        assert connector._worker is not None
        connector._worker._engine = transfers  # what register_kv_caches makes over real tensors
        connector._worker._rank = (0, rank)
        return Rank(connector, transfers)

    def _keys_of(self, key: bytes) -> np.ndarray:
        return self._keys[key]

    def _hook_pool(self) -> None:
        """Notes which blocks the pool hands out: whatever they held is gone from then on."""
        get_new_blocks = self.pool.get_new_blocks

        def hooked(n: int) -> Any:
            blocks = get_new_blocks(n)
            self._allocated += [b.block_id for b in blocks]
            return blocks

        self.pool.get_new_blocks = hooked  # type: ignore

    # --- clients ---

    def add(self, prompt: list[int], max_tokens: int, *, name: str = "", salt: str | None = None, stop: bool = False,
            params: Any = None, skip_cache: bool = False, priority: int = 0) -> Request:  # fmt: skip
        name = name or f"r{len(self.requests)}"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            stop_token_ids=[0] if stop else None,
            skip_reading_prefix_cache=skip_cache or None,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        self.sequences[name] = TokenSequence(prompt, self._origin(salt))
        request = Request(
            name, list(prompt), sampling, None, arrival_time=float(len(self.requests)), cache_salt=salt,
            priority=priority, block_hasher=self._hash_blocks,
        )  # fmt: skip
        self.requests[name] = request
        self.scheduler.add_request(request)
        self._check_faults()
        return request

    def _origin(self, salt: str | None) -> int:
        origin = mix(17, self.weights)
        return functools.reduce(mix, (salt or "").encode(), origin)

    def _hash_blocks(self, request: Request) -> list[Any]:
        """vLLM's block hasher; notes what KV each new key stands for."""
        hashes = self._hasher(request)
        for i, key in enumerate(hashes, len(request.block_hashes)):
            self._learn(request, i, key)
        return hashes

    def _learn(self, request: Request, block: int, key: bytes) -> None:
        size = self.setup.block_size
        kv = np.array(self.sequences[request.request_id].kv(block * size, (block + 1) * size), np.int64)
        if not np.array_equal(self._keys.setdefault(bytes(key), kv), kv):
            raise Violation(f"one key stands for two different blocks: block {block} of {request.request_id}")

    def abort(self, name: str, during_step: bool = False) -> None:
        """Now, or just before the next step's output is processed, as EngineCore handles those that come meanwhile."""
        if during_step:
            self._aborts.append(name)
            return
        request = self.requests[name]
        if not request.is_finished():
            self.seen["aborts"] += 1
            self.seen["aborts while loading"] += request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._check_faults()

    def reset(self, running: bool = False, connector: bool = False) -> bool:
        """`reset_prefix_cache`. If all of it succeeded with nothing running, the model gets new weights."""
        done = self.scheduler.reset_prefix_cache(running, connector)
        self._check_faults()
        if done and connector and not self.queue:
            self.weights += 1
            self._keys.clear()
            for name, sequence in self.sequences.items():
                request = self.requests[name]
                if not request.is_finished():
                    sequence.new_weights(request.num_tokens, self._origin(request.cache_salt))
                    for i, key in enumerate(request.block_hashes):
                        self._learn(request, i, key)
            self.seen["new weights"] += 1
        return done

    # --- EngineCore ---

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self.queue)

    def step(self) -> None:
        """EngineCore.step, or step_with_batch_queue with async scheduling."""
        depth = 2 if self.setup.asynchronous else 1
        if self.scheduler.has_requests():
            self.queue.appendleft(self._schedule())
            executed = self.queue[0].output.total_num_scheduled_tokens > 0
            if len(self.queue) < depth and (executed or self.scheduler.has_requests()):
                if self.rng.random() < 0.5:  # the GPU may or may not be ahead of the scheduler
                    self._execute_up_to(self.queue[0])
                return
        elif not self.queue:
            return
        step = self.queue.pop()
        self._execute_up_to(step)
        if self.queue and self.rng.random() < 0.5:
            self._execute_up_to(self.queue[0])
        for name in self._aborts:
            self.abort(name)
        self._aborts.clear()
        assert step.result is not None
        self.scheduler.update_from_output(step.output, step.result)
        if self.setup.drafts and not self.setup.asynchronous and step.output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.runner.propose(step.output))
        self._check_faults()

    def run(self, max_steps: int = 5000) -> None:
        """Steps until nothing is left to do."""
        end = self.steps + max_steps
        while self.has_work():
            self.step()
            if self.steps > end:
                raise AssertionError(f"stuck after {max_steps} steps: {self.describe()}")

    def in_transfer(self) -> bool:
        """Whether blocks are in use by what vLLM cannot preempt: steps in flight, transfers of any kind, and requests
        that wait with blocks of their own: while they load, or loaded and not yet started."""
        counts, blocks_of = self.pega.counts(), self.scheduler.kv_cache_manager.get_block_ids
        waiting = [n for n, r in self.requests.items() if not r.is_finished() and r.status != RequestStatus.RUNNING]
        return bool(
            self.queue or self.scheduler.deferred_frees or any(blocks_of(name)[0] for name in waiting)
            or (self.rival is not None and self.rival.loads) or counts["held_blocks"] or counts["jobs"]
        )  # fmt: skip

    def describe(self) -> str:
        states = {name: str(r.status) for name, r in self.requests.items() if not r.is_finished()}
        pending = [sorted(rank.transfers.jobs) for rank in self.ranks]
        return f"requests {states}, connector {self.pega.counts()}, jobs on ranks {pending}"

    def _check_faults(self) -> None:
        if guard.faults != self._faults_before:
            raise AssertionError("the connector swallowed an exception of its own; it is in the log above")

    def _schedule(self) -> Step:
        self._allocated = []
        if self.rival is not None:
            self.rival.step = self.steps + 1
        output = self.scheduler.schedule()
        self.steps += 1
        self.seen["steps"] += 1
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        self._check_faults()
        return Step(self.steps, output, self._allocated)

    def _execute_up_to(self, step: Step) -> None:
        """The GPU executes steps in the order in which they were scheduled."""
        waiting = [s for s in self.queue if s.number <= step.number and s.result is None]
        for s in [*reversed(waiting), *([step] if step.result is None and step not in waiting else [])]:
            s.result = self.runner.execute(s)
            told = s.result.kv_connector_output
            if self.rival is not None and told is not None:
                brought = self.rival.run(s.number, self.ranks, self.sequences)
                told.finished_recving = brought | (told.finished_recving or set())

    # --- the end ---

    def check_idle(self) -> None:
        """Every request ended with the right tokens, and nothing is held, pinned or in flight."""
        assert not self.has_work(), self.describe()
        for name, request in self.requests.items():
            self._check_output(name, request)
        idle = self.pega.counts()
        assert all(idle[k] == 0 for k in ("reserved", "pinned", "held_blocks", "jobs", "requests")), idle
        assert [rank.transfers.pending for rank in self.ranks] == [0] * len(self.ranks)
        assert not self.scheduler.requests
        assert self.reset(connector=True), "GPU blocks are still in use"
        assert self.pool.get_num_free_blocks() == self.setup.gpu_blocks - 1  # all but the null block
        assert self.pega.counts()["free"] == min(self.setup.host_slots)
        self._check_faults()

    def _check_output(self, name: str, request: Request) -> None:
        sequence, tokens = self.sequences[name], list(request.all_token_ids)
        sequence.token(len(tokens))
        assert tokens == sequence.tokens[: len(tokens)], f"{name} has wrong tokens"
        output = tokens[request.num_prompt_tokens :]
        sampling = request.sampling_params
        assert sampling is not None and request.is_finished()
        stop = sampling.stop_token_ids or []
        if request.status == RequestStatus.FINISHED_STOPPED:
            assert output[-1] in stop and not set(output[:-1]) & set(stop)
        elif request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
            assert len(output) == sampling.max_tokens and not set(output) & set(stop)
        elif request.status == RequestStatus.FINISHED_ERROR:
            assert not self.setup.recompute and self.pega.load_failures
        else:
            assert request.status == RequestStatus.FINISHED_ABORTED, f"{name}: {request.status}"
