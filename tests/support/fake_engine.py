# SPDX-License-Identifier: Apache-2.0
"""vLLM without a model: its real scheduler and our real connector, around a forward pass that only writes known KV.

`FakeEngine` steps as vLLM's EngineCore does, with one step in flight (Scheduler) or two (AsyncScheduler). The GPU
executes steps in order; what the connector hands over with a step runs behind all earlier ones.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import random
import tempfile
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.fake_transfers import VOCAB, FakeTransfers, Faults, RankMemory, TokenSequence, Violation, mix
from vllm_pega_connector import PegaConnector, guard
from vllm_pega_connector.messages import PegaHandshake, PegaWorkerMetadata

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Setup:
    """One engine: how it schedules, and how the connector is configured."""

    asynchronous: bool = False
    drafts: int = 0  # draft tokens per step
    eagle: bool = False  # drafts come from an EAGLE head: vLLM drops the last block of a hit
    v2_runner: bool = False  # resumed requests are announced as new ones
    priority: bool = False
    block_size: int = 16
    gpu_blocks: int = 32
    max_seqs: int = 4
    budget: int = 64  # tokens per step
    host_slots: tuple[int, ...] = (64,)  # one number per rank
    role: str = "kv_both"
    recompute: bool = True  # kv_load_failure_policy; otherwise a failed load fails its request
    rival: float = 0.0  # how often another connector, beside ours in a MultiConnector, is taken instead
    settings: tuple[tuple[str, Any], ...] = ()

    def room(self) -> int:
        """Tokens that one request may ever have, so that it fits the GPU alone, drafts and lookahead included."""
        return (self.gpu_blocks - 2) * self.block_size - 3 * (self.drafts + 1)


@functools.cache
def _base_config() -> VllmConfig:
    for chatty in ("vllm.v1", "vllm.config", "vllm.distributed"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    init_none_hash(sha256)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": MAX_MODEL_LEN, "torch_dtype": "float32",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN)
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip


@functools.cache
def _speculation(drafts: int, eagle: bool) -> SpeculativeConfig:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3, prompt_lookup_min=2,
        target_model_config=_base_config().model_config, target_parallel_config=ParallelConfig(),
    )  # fmt: skip
    if eagle:
        config.method = "eagle"  # only the scheduler looks at it; there is no head to load
    return config


@functools.cache
def _structured_output() -> StructuredOutputManager:
    return StructuredOutputManager(_base_config())


def make_vllm_config(setup: Setup) -> VllmConfig:
    config = copy.copy(_base_config())
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = setup.max_seqs
    config.scheduler_config.max_num_batched_tokens = setup.budget
    config.scheduler_config.max_num_scheduled_tokens = setup.budget
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.policy = "priority" if setup.priority else "fcfs"
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = setup.block_size
    config.cache_config.num_gpu_blocks = setup.gpu_blocks
    config.speculative_config = _speculation(setup.drafts, setup.eagle) if setup.drafts else None
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="PegaConnector",
        kv_connector_module_path="vllm_pega_connector",
        kv_role=setup.role,
        kv_load_failure_policy="recompute" if setup.recompute else "fail",
        kv_connector_extra_config=dict(setup.settings),
    )
    return config


def make_kv_cache_config(setup: Setup) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=setup.block_size, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return KVCacheConfig(setup.gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])


@dataclass
class _Live:
    """What the model runner knows of a request."""

    sequence: TokenSequence
    table: list[int]
    computed: int  # tokens whose KV is there and right
    length: int  # tokens known, sampled ones included
    fresh: bool = True  # (re)started in this step: it has no drafts yet


@dataclass
class _Rank:
    connector: PegaConnector
    transfers: FakeTransfers

    def collect(self, finished: set[str], rng: random.Random) -> KVConnectorOutput:
        """The worker's hooks after a step, in vLLM's order."""
        results = self.connector.get_transfer_results(finished)
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        meta = output.kv_connector_worker_meta
        if meta is not None and rng.random() < self.transfers.faults.report_twice:
            assert isinstance(meta, PegaWorkerMetadata)
            meta.ended.append(rng.choice(meta.ended))
            self.transfers.seen["reported twice"] += 1
        return output


@dataclass
class _Step:
    number: int
    output: SchedulerOutput
    allocated: list[int]  # GPU blocks that the pool handed out for it
    result: ModelRunnerOutput | None = None


@dataclass
class FakeEngine:
    """`seen` counts what happened, `computed` tokens by request; `check_idle` is the end of every test."""

    setup: Setup
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=lambda: Faults(stall=0.0))
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        setup, config = self.setup, make_vllm_config(self.setup)
        cache = make_kv_cache_config(setup)
        kind = AsyncScheduler if setup.asynchronous else Scheduler
        self.scheduler = kind(config, cache, _structured_output(), block_size=setup.block_size)
        self.scheduler.use_v2_model_runner = setup.v2_runner
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self._allocated: list[int] = []
        self._hook_pool()
        self.ranks = [self._make_rank(config, cache, r) for r in range(len(setup.host_slots))]
        self.connector = self.scheduler.connector
        assert isinstance(self.connector, PegaConnector) and self.connector._scheduler is not None
        self.pega = self.connector._scheduler
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, r): PegaHandshake((slots,), (4096,), (0,)) for r, slots in enumerate(setup.host_slots)}
        )
        self._offers: dict[str, tuple[int, int]] = {}  # the other connector's answers: first block, blocks
        self._rival_loads: dict[str, tuple[int, int, list[int]]] = {}  # and loads: step, first block, GPU blocks
        if setup.rival:
            self._add_rival()
        self._aggregator = KVOutputAggregator(len(self.ranks))
        self._hasher = get_request_block_hasher(setup.block_size, sha256)
        self.queue: deque[_Step] = deque()  # newest first, as in EngineCore
        self.steps = 0
        self.computed: Counter[str] = Counter()
        self.weights = 0
        self.requests: dict[str, Request] = {}
        self.sequences: dict[str, TokenSequence] = {}
        self._keys: dict[bytes, np.ndarray] = {}
        self._live: dict[str, _Live] = {}
        self._aborts: list[str] = []
        self._faults_before = guard.faults

    def _make_rank(self, config: VllmConfig, cache: KVCacheConfig, rank: int) -> _Rank:
        setup = self.setup
        memory = RankMemory.make(setup.gpu_blocks, setup.host_slots[rank], setup.block_size, rank)
        transfers = FakeTransfers(memory, self.rng, self.faults, self._keys_of, self.seen)
        connector = PegaConnector(config, KVConnectorRole.WORKER, cache)
        assert connector._worker is not None
        connector._worker._engine = transfers  # what register_kv_caches makes over real tensors
        connector._worker._rank = (0, rank)
        return _Rank(connector, transfers)

    def _keys_of(self, key: bytes) -> np.ndarray:
        return self._keys[key]

    def _hook_pool(self) -> None:
        """Notes which blocks the pool hands out: whatever they held is gone from then on."""
        get_new_blocks = self.pool.get_new_blocks

        def hooked(n: int) -> Any:
            blocks = get_new_blocks(n)
            self._allocated += [b.block_id for b in blocks]
            return blocks

        self.pool.get_new_blocks = hooked  # type: ignore[method-assign]

    def _add_rival(self) -> None:
        """Answers in our stead now and then, as the first connector with a hit does in a MultiConnector, and loads."""
        ask, take = self.connector.get_num_new_matched_tokens, self.connector.update_state_after_alloc
        size = self.setup.block_size

        def asked(request: Request, computed: int) -> tuple[int | None, bool]:
            answer = ask(request, computed)
            self._offers.pop(request.request_id, None)
            if self.rng.random() >= self.setup.rival:
                return answer
            self.seen["answers thrown away"] += bool(answer[0])
            blocks = self.rng.randint(0, max(0, len(request.block_hashes) - computed // size))
            self._offers[request.request_id] = (computed // size, blocks)
            return blocks * size, blocks > 0

        def taken(request: Request, blocks: Any, tokens: int) -> None:
            offer = self._offers.pop(request.request_id, None)
            take(request, blocks, 0 if offer else tokens)
            if offer and tokens:
                start, n = offer
                table = blocks.get_block_ids()[0][start : start + n]
                self._rival_loads[request.request_id] = (self.steps + 1, start, table)

        self.connector.get_num_new_matched_tokens = asked  # type: ignore[method-assign]
        self.connector.update_state_after_alloc = taken  # type: ignore[method-assign]

    def _run_rival(self, step: int) -> set[str]:
        """The requests whose KV the other connector has brought by now."""
        done = {
            name
            for name, (handed_over, _, _) in self._rival_loads.items()
            if handed_over <= step and self.rng.random() >= self.faults.stall
        }
        size = self.setup.block_size
        for name in done:
            _, start, table = self._rival_loads.pop(name)
            kv = np.array(self.sequences[name].kv(start * size, (start + len(table)) * size)).reshape(-1, size)
            for rank in self.ranks:
                rank.transfers.memory.gpu[table] = kv + rank.transfers.memory.mark
            self.seen["loads of another connector"] += 1
        return done

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
            self.scheduler.update_draft_token_ids(self._propose(step.output))
        self._check_faults()

    def run(self, max_steps: int = 5000) -> None:
        """Steps until nothing is left to do."""
        end = self.steps + max_steps
        while self.has_work():
            self.step()
            if self.steps > end:
                raise AssertionError(f"stuck after {max_steps} steps: {self.describe()}")

    def in_transfer(self) -> bool:
        """Whether blocks are in use by what vLLM cannot preempt: steps in flight, and transfers of any kind."""
        counts = self.pega.counts()
        return bool(
            self.queue or self.scheduler.deferred_frees or self.scheduler.kv_holding_waiting or self._rival_loads
            or counts["held_blocks"] or counts["jobs"]
        )  # fmt: skip

    def describe(self) -> str:
        states = {name: str(r.status) for name, r in self.requests.items() if not r.is_finished()}
        pending = [sorted(rank.transfers.jobs) for rank in self.ranks]
        return f"requests {states}, connector {self.pega.counts()}, jobs on ranks {pending}"

    def _check_faults(self) -> None:
        if guard.faults != self._faults_before:
            raise AssertionError("the connector swallowed an exception of its own; it is in the log above")

    def _schedule(self) -> _Step:
        self._allocated = []
        output = self.scheduler.schedule()
        self.steps += 1
        self.seen["steps"] += 1
        self.seen["preemptions"] += len(output.preempted_req_ids or ())
        self._check_faults()
        return _Step(self.steps, output, self._allocated)

    # --- the model runner ---

    def _execute_up_to(self, step: _Step) -> None:
        """The GPU executes steps in the order in which they were scheduled."""
        waiting = [s for s in self.queue if s.number <= step.number and s.result is None]
        for s in [*reversed(waiting), *([step] if step.result is None and step not in waiting else [])]:
            s.result = self._execute(s)

    def _execute(self, step: _Step) -> ModelRunnerOutput:
        output = step.output
        for rank in self.ranks:
            rank.transfers.memory.poison(step.allocated, step.number)
        self._update_states(output)
        for rank in self.ranks:
            rank.connector.bind_connector_metadata(output.kv_connector_metadata)
            rank.transfers.run()
        names = list(output.num_scheduled_tokens)
        sampled = self._forward(step)
        results = []
        for rank in self.ranks:
            rank.transfers.run()
            result = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, [sampled[n] for n in names])
            result.kv_connector_output = rank.collect(output.finished_req_ids, self.rng)
            results.append(result)
        result = self._aggregator.aggregate(results)
        assert result is not None and result.kv_connector_output is not None
        brought = self._run_rival(step.number)
        if brought:
            result.kv_connector_output.finished_recving = brought | (
                result.kv_connector_output.finished_recving or set()
            )
        return result

    def _update_states(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._live.pop(name, None)
        for live in self._live.values():
            live.fresh = False
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            assert tokens is not None
            self._start(new.req_id, new.block_ids[0], new.num_computed_tokens, len(tokens))
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                assert blocks is not None
                self._start(name, blocks[0], computed, len(cached.all_token_ids[name]))
            elif blocks is not None:
                self._live[name].table.extend(blocks[0])

    def _start(self, name: str, table: list[int], computed: int, length: int) -> None:
        self._live[name] = _Live(self.sequences[name], list(table), computed, length)
        self.seen["cached starts"] += computed > 0

    def _forward(self, step: _Step) -> dict[str, list[int]]:
        """Writes the KV of every scheduled token, drafts included, then reads all KV that attention would read."""
        sampled: dict[str, list[int]] = {}
        reads: list[tuple[str, _Live, int]] = []
        for name, tokens in step.output.num_scheduled_tokens.items():
            live = self._live[name]
            drafts = self._drafts(live, step.output.scheduled_spec_decode_tokens.get(name, []))
            start, end = live.computed, live.computed + tokens - len(drafts)
            assert end <= live.length and (not drafts or end == live.length), f"{name}: {start}, {end}, {live.length}"
            kv, accepted = self._draft_kv(live, drafts)
            self._write(live, start, live.sequence.kv(start, end) + kv)
            reads.append((name, live, end))
            sampled[name] = []
            if end == live.length:
                live.sequence.token(end + accepted)
                sampled[name] = live.sequence.tokens[end : end + accepted + 1]
                live.length = end + accepted + 1
            live.computed = end + accepted
            self.computed[name] += end - start
            self.seen["drafts accepted"] += accepted
            self.seen["drafts rejected"] += len(drafts) - accepted
        for name, live, end in reads:
            self._check_reads(step, name, live, end)
        return sampled

    def _drafts(self, live: _Live, scheduled: list[int]) -> list[int]:
        """Async scheduling sends placeholders: the runner has the drafts. A request just started has none."""
        if -1 not in scheduled or live.fresh:
            return scheduled
        return self._guess(live, len(scheduled))

    def _guess(self, live: _Live, n: int) -> list[int]:
        truth = [live.sequence.token(live.length + i) for i in range(n)]
        return [t if self.rng.random() < 0.6 else self.rng.randrange(VOCAB) for t in truth]

    def _propose(self, output: SchedulerOutput) -> DraftTokenIds:
        names = list(output.num_scheduled_tokens)
        return DraftTokenIds(names, [self._guess(self._live[n], self.rng.randint(0, self.setup.drafts)) for n in names])

    def _draft_kv(self, live: _Live, drafts: list[int]) -> tuple[list[int], int]:
        """KV of the draft tokens, and how many of them are what the model would have sampled."""
        kv: list[int] = []
        prefix = live.sequence.kv(live.length - 1, live.length)[0]
        accepted, right = 0, True
        for i, token in enumerate(drafts):
            prefix = mix(prefix, token)
            kv.append(prefix)
            right = right and token == live.sequence.token(live.length + i)
            accepted += right
        return kv, accepted

    def _slots(self, live: _Live, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        size = self.setup.block_size
        return np.asarray(live.table)[positions // size] * size + positions % size

    def _write(self, live: _Live, start: int, kv: list[int]) -> None:
        slots = self._slots(live, start, start + len(kv))
        for rank in self.ranks:
            rank.transfers.memory.gpu.reshape(-1)[slots] = np.array(kv, np.int64) + rank.transfers.memory.mark

    def _check_reads(self, step: _Step, name: str, live: _Live, end: int) -> None:
        slots = self._slots(live, 0, end)
        expected = np.array(live.sequence.kv(0, end), np.int64)
        for r, rank in enumerate(self.ranks):
            found = rank.transfers.memory.gpu.reshape(-1)[slots]
            wrong = np.flatnonzero(found - rank.transfers.memory.mark != expected)
            if len(wrong):
                at = int(wrong[0])
                raise Violation(
                    f"step {step.number}, rank {r}: {name} attends to {len(wrong)} wrong positions, the first {at} of "
                    f"{end} in block {slots[at] // self.setup.block_size}: {self._whose(int(found[at]))}"
                )

    def _whose(self, kv: int) -> str:
        """For people: what a wrong slot holds."""
        if kv < 0:
            return f"nothing since step {-(1 << 40) - kv} allocated it"
        plain = kv & ((1 << 56) - 1)
        for name, sequence in self.sequences.items():
            if plain in sequence._kv:
                return f"position {sequence._kv.index(plain)} of {name}"
        return "the KV of a rejected draft, or of other weights"

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
