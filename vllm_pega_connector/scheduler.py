# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: what to save, what to load, and what is held meanwhile. Pure bookkeeping, no I/O.

Three objects carry all state: a `RequestState` per live request, a `Job` per transfer in flight, and the native
`SlotIndex`. vLLM calls everything here on one thread, between steps; nothing waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_pega_connector import compat
from vllm_pega_connector.config import MigrationConfig, PegaConfig, PolicyConfig, RequestParams
from vllm_pega_connector.guard import guarded, log_limited, logger, take_faults
from vllm_pega_connector.messages import PegaHandshake, PegaMetadata, PegaWorkerMetadata, Rank, TransferJob
from vllm_pega_connector.metrics import PegaStats
from vllm_pega_connector.migration.fingerprint import digest
from vllm_pega_connector.migration.hook import Ask, Migration
from vllm_pega_connector.migration.start import advertised

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NO_SLOT = 0xFFFFFFFF  # what SlotIndex.reserve answers for a key that is present or has no room
GROUP = 0  # full attention has one cache group; moves carry the group so that more can follow

# Of a small GPU cache 5 % would be less than one prompt's blocks; saves may then hold this many, but never more
# than a quarter, so that requests still run beside them.
SMALL_CACHE_HELD_BLOCKS = 64


@dataclass
class Match:
    """A host hit offered to vLLM: blocks [start, start + n) of the request, pinned in the index."""

    start: int
    slots: bytes
    index_version: int

    @property
    def blocks(self) -> int:
        return len(self.slots) // 4


@dataclass
class Job:
    """A transfer that some ranks have not reported yet. Saves hold GPU blocks, loads hold pins."""

    job_id: int
    direction: str
    slots: bytes
    waiting: set[Rank]
    held: list[KVCacheBlock] = field(default_factory=list)
    state: RequestState | None = None
    start: int = 0
    epoch: int = 0  # of a save: resets that came before its blocks were collected
    errors: list[str] = field(default_factory=list)


@dataclass
class RequestState:
    request: Request
    params: RequestParams
    block_ids: list[int] = field(default_factory=list)
    saved: int = 0  # blocks below this are stored, on their way, or given up
    last_slot: int = -1  # neighbour for the next slot
    match: Match | None = None
    load: Job | None = None
    load_limit: int | None = None  # after a failed load: never offer a block from here on again
    ask: Ask | None = None  # for blocks of another instance
    joined: bytes = b""  # block hashes joined, grown on demand
    joined_blocks: int = 0


@dataclass
class SaveBatch:
    """The blocks of this step that are saved under one policy; becomes one job."""

    policy: PolicyConfig | None
    epoch: int
    blocks: list[KVCacheBlock] = field(default_factory=list)
    slots: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class PegaScheduler:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: PegaConfig, saves: bool, loads: bool) -> None:
        self._config = config
        self._saves = saves
        self._loads = loads
        self._block_size: int = kv_cache_config.kv_cache_groups[GROUP].kv_cache_spec.block_size
        self._key_bytes = compat.hash_bytes(vllm_config)
        self._drop_last_hit = compat.drops_last_hit_block(vllm_config)
        self._max_held = _max_held_blocks(config, kv_cache_config.num_blocks)
        self._index: Any = None  # made when the workers' pools are known
        self._pool: Any = None  # vLLM's block pool
        self._handshakes: dict[Rank, PegaHandshake] = {}
        self._reported: dict[Rank, PegaHandshake] = {}  # beside other connectors: by the workers, until all have
        self._requests: dict[str, RequestState] = {}
        self._jobs: dict[int, Job] = {}
        self._next_job = 1
        self._batches: dict[tuple[PolicyConfig | None, int], SaveBatch] = {}  # by policy and epoch
        self._new_loads: list[TransferJob] = []
        self._cancel: list[int] = []
        self._held = 0
        self.drops: Counter[str] = Counter()
        self.load_failures: Counter[str] = Counter()
        self._told_drops: Counter[str] = Counter()
        self._told_failures: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()  # blocks by direction since the last report
        self._told_evictions = 0
        self._told_pool: dict[str, int] = {}
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._migration: Migration | None = None
        self._fingerprint: dict[str, str] = {}
        self._epoch = 0  # counts resets: what was collected before one is not given to other instances

    # --- start ---

    def set_workers(self, handshakes: dict[Rank, PegaHandshake]) -> None:
        """Makes the index over the slots that every rank has. Told again (after sleep), it keeps what it knows."""
        from vllm_pega_connector._native import SlotIndex

        # MultiConnector hands every child the metadata of the first that has any; then `update` brings ours.
        ours = all(isinstance(h, PegaHandshake) for h in handshakes.values())
        if not ours or not handshakes or handshakes == self._handshakes:
            return
        self._handshakes = dict(handshakes)
        first = next(iter(handshakes.values()))
        slots = [min(h.slots[c] for h in handshakes.values()) for c in range(len(first.slots))]
        self._index = SlotIndex(slots, first.group_classes, self._key_bytes)
        if self._migration is not None:
            self._migration.close()
        if self._config.migration is not None:
            self._migration = self._start_migration(self._config.migration, handshakes, slots)

    def _start_migration(
        self, config: MigrationConfig, handshakes: dict[Rank, PegaHandshake], slots: list[int]
    ) -> Migration | None:
        """Without it serving goes on, so what is in its way is a warning."""
        from vllm_pega_connector.migration.start import start

        ranks = [handshakes[rank] for rank in sorted(handshakes)]
        problem = compat.hash_seed_problem(self._vllm_config)
        shares = [h.share for h in ranks if h.share is not None]
        if not problem and len(shares) < len(ranks):
            problem = "not all workers share their pools"
        if problem:
            logger.warning("PegaConnector: no migration: %s", problem)
            return None

        def fingerprint() -> dict[str, str]:
            layouts = [h.layout for h in ranks]
            self._fingerprint = compat.kv_fingerprint(
                self._vllm_config, self._kv_cache_config, config.model_id, layouts
            )
            return self._fingerprint

        slot_class = ranks[0].group_classes[GROUP]
        pools = [(share, list(zip(h.slot_bytes, h.slots, strict=True))) for share, h in zip(shares, ranks, strict=True)]
        try:
            return start(config, self._index, GROUP, slot_class, self._key_bytes, slots[slot_class], pools, fingerprint)
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("PegaConnector: no migration: %s", error)
            return None

    def bind_block_pool(self, pool: Any) -> None:
        self._pool = pool

    @property
    def _ready(self) -> bool:
        return self._index is not None and self._pool is not None

    # --- requests ---

    def on_new_request(self, request: Request) -> None:
        params = RequestParams.parse(request.kv_transfer_params, self._config)
        for problem in params.problems:
            self.drops["bad_request_params"] += 1
            log_limited("params", "PegaConnector: ignoring kv_transfer_params of %s: %s", request.request_id, problem)
        self._requests[request.request_id] = RequestState(request, params)

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `computed_tokens`, asynchronously). O(1) when nothing has changed."""
        state = self._requests.get(request.request_id)
        if state is None or not self._ready or not self._loads or request.skip_reading_prefix_cache:
            return 0, False
        start = computed_tokens // self._block_size
        if self._migration is not None and self._not_yet(state, start, self._migration):
            return None, False
        last = state.match
        # A pinned answer stays true whatever happens to the index; an empty one may improve with it.
        if last is None or last.start != start or (not last.slots and last.index_version != self._index.version):
            self._release_match(state)
            last = state.match = self._lookup(state, start)
        tokens = last.blocks * self._block_size
        return tokens, tokens > 0

    def _not_yet(self, state: RequestState, start: int, migration: Migration) -> bool:
        """True while blocks of this request are on their way from another instance. Asks for them once."""
        migration.poll()
        sources = migration.sources(state.params.source)
        if not sources or (state.ask is not None and state.ask.over):
            return False
        request = state.request
        # LoRA adapters are told apart by name alone; another instance's may differ.
        blocks = 0 if request.lora_request is not None or state.load_limit is not None else len(request.block_hashes)
        if start >= blocks or _past_end(request, start * self._block_size):
            return False
        if state.ask is None:
            state.ask = migration.ask()
        return migration.not_yet(state.ask, sources, lambda: request.block_hashes[start:blocks])

    def _lookup(self, state: RequestState, start: int) -> Match:
        blocks = len(state.request.block_hashes)
        if state.load_limit is not None:
            blocks = min(blocks, state.load_limit)
        version = self._index.version
        if start >= blocks or _past_end(state.request, start * self._block_size):
            return Match(start, b"", version)
        joined = self._joined(state, blocks)
        slots: bytes = self._index.match_and_pin(GROUP, joined, start)
        if self._drop_last_hit and slots:
            self._index.unpin(GROUP, slots[-4:])
            slots = slots[:-4]
        return Match(start, slots, version)

    def _joined(self, state: RequestState, blocks: int) -> bytes:
        """The first `blocks` block hashes of a request, joined; grown once, then reused."""
        if state.joined_blocks < blocks:
            state.joined += b"".join(state.request.block_hashes[state.joined_blocks : blocks])
            state.joined_blocks = blocks
        return state.joined if state.joined_blocks == blocks else state.joined[: blocks * self._key_bytes]

    def _release_match(self, state: RequestState) -> None:
        if state.match is not None:
            if state.match.slots:
                self._index.unpin(GROUP, state.match.slots)
            state.match = None

    def after_alloc(self, request: Request, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """vLLM took `external_tokens` of our offer, or none of it."""
        state = self._requests.get(request.request_id)
        if state is None or state.match is None:
            return
        match, state.match = state.match, None
        # Rounded up: what vLLM counts on must be loaded, should it ever cut within a block.
        blocks = min(-(-external_tokens // self._block_size), match.blocks)
        taken, rest = match.slots[: 4 * blocks], match.slots[4 * blocks :]
        if rest:
            self._index.unpin(GROUP, rest)
        if not taken:
            return
        job = self._new_job("load", taken)
        job.state, job.start = state, match.start
        state.load = job
        first, end = match.start, match.start + blocks
        self._new_loads.append(
            TransferJob(
                job.job_id,
                "load",
                _moves(block_ids[GROUP][first:end], taken),
                self._joined(state, end)[first * self._key_bytes :],
                request.request_id,
                state.params.load_policy,
            )
        )

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request is over; its blocks are about to be freed, so what is worth saving is held now.

        Where its KV may be had is the answer, for whoever goes on with it on another instance.
        """
        state = self._requests.pop(request.request_id, None)
        if state is not None:
            self._finish(state, block_ids)
        if self._migration is None or not self._migration.port or self._config.migration is None:
            return None
        source = str(advertised(self._config.migration, self._migration.port))
        blocks = _computed(request) // self._block_size
        return {"pega": {"source": source, "blocks": blocks, "fingerprint": digest(self._fingerprint)}}

    def _finish(self, state: RequestState, block_ids: tuple[list[int], ...]) -> None:
        if self._ready:
            self._release_match(state)
        if state.load is not None:
            # Its blocks may hold anything until the load has drained; vLLM keeps them until then.
            self._cancel.append(state.load.job_id)
            return
        if block_ids:
            state.block_ids = block_ids[GROUP]
            self._collect(state, last_chance=True)

    # --- every step ---

    def build_metadata(self, output: SchedulerOutput) -> PegaMetadata:
        if self._migration is not None:
            self._migration.poll()
        requests = self._requests
        for request_id in output.preempted_req_ids or ():
            if state := requests.get(request_id):
                state.block_ids, state.saved, state.last_slot = [], 0, -1
        for new in output.scheduled_new_reqs:
            if state := requests.get(new.req_id):
                state.block_ids, state.saved = list(new.block_ids[GROUP]), 0
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            state = requests.get(request_id)
            if state is None:
                continue
            if request_id in cached.resumed_req_ids:
                state.block_ids, state.saved = list(new_blocks[GROUP]) if new_blocks else [], 0
            elif new_blocks:
                state.block_ids.extend(new_blocks[GROUP])
        if self._saves and self._ready:
            size = self._block_size
            # Not those that start in this step: what they hit in the GPU's prefix cache may be computed by this very
            # step, for another request, and its saves run before it.
            for request_id in cached.req_ids:
                state = requests.get(request_id)
                if state is None or request_id in cached.resumed_req_ids:
                    continue
                if state.saved < _computed(state.request) // size:
                    self._collect(state, last_chance=False)
        jobs = self._new_loads + [self._save_job(batch) for batch in self._batches.values() if batch.blocks]
        metadata = PegaMetadata(jobs, self._cancel)
        self._new_loads, self._cancel, self._batches = [], [], {}
        return metadata

    def _collect(self, state: RequestState, last_chance: bool) -> None:
        """Adds the request's full, computed and not yet stored blocks to this step's saves.

        Over the bound on held blocks the rest waits for a later step, while the request itself holds its blocks;
        at the last chance it is dropped.
        """
        if not (self._saves and self._ready and state.params.save):
            return
        request = state.request
        tokens = _computed(request)
        if not self._config.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        first = state.saved
        end = min(tokens // self._block_size, len(request.block_hashes), len(state.block_ids))
        if end <= first:
            return
        hashes = request.block_hashes
        present = self._index.contains(GROUP, b"".join(hashes[first:end]))
        pool_blocks = self._pool.blocks
        wanted: list[int] = []
        state.saved = end
        for i in range(first, end):
            if present[i - first]:
                continue
            block = pool_blocks[state.block_ids[i]]
            if block.is_null or block.block_hash != compat.pool_hash(hashes[i], GROUP):
                continue  # not what the key says (or not to be cached at all)
            if self._held + len(wanted) >= self._max_held:
                if last_chance:
                    self.drops["too_many_pending"] += sum(not p for p in present[i - first :])
                else:
                    state.saved = i
                break
            wanted.append(i)
        if wanted:
            self._reserve(state, wanted)

    def _reserve(self, state: RequestState, wanted: list[int]) -> None:
        hashes = state.request.block_hashes
        slots = self._index.reserve(GROUP, b"".join([hashes[i] for i in wanted]), state.last_slot)
        policy = state.params.save_policy
        batch = self._batches.setdefault((policy, self._epoch), SaveBatch(policy, self._epoch))
        held = []
        for i, slot in zip(wanted, np.frombuffer(slots, np.uint32).tolist(), strict=True):
            if slot == NO_SLOT:
                self.drops["pool_full"] += 1
                continue
            held.append(self._pool.blocks[state.block_ids[i]])
            batch.slots.append(slot.to_bytes(4, "little"))
            batch.keys.append(hashes[i])
            state.last_slot = slot
        self._pool.touch(held)
        self._held += len(held)
        batch.blocks += held

    def _save_job(self, batch: SaveBatch) -> TransferJob:
        slots = b"".join(batch.slots)
        job = self._new_job("save", slots)
        job.held, job.epoch = batch.blocks, batch.epoch
        moves = _moves([b.block_id for b in batch.blocks], slots)
        return TransferJob(job.job_id, "save", moves, b"".join(batch.keys), policy=batch.policy)

    def _new_job(self, direction: str, slots: bytes) -> Job:
        job = Job(self._next_job, direction, slots, set(self._handshakes))
        self._next_job += 1
        self._jobs[job.job_id] = job
        return job

    # --- results ---

    def update(self, metadata: PegaWorkerMetadata) -> None:
        if metadata.handshakes:
            self._reported |= metadata.handshakes
            parallel = self._vllm_config.parallel_config
            if len(self._reported) == parallel.tensor_parallel_size * parallel.pipeline_parallel_size:
                self.set_workers(dict(self._reported))
        for rank, job_id, error in metadata.ended:
            self._report(rank, job_id, error)

    @guarded(lambda: None)  # each by itself: a fault in one must not lose the reports behind it
    def _report(self, rank: Rank, job_id: int, error: str) -> None:
        job = self._jobs.get(job_id)
        if job is None or rank not in job.waiting:
            self.drops["duplicate_report"] += 1
            log_limited("report", "PegaConnector: rank %s reported job %s twice; ignored", rank, job_id)
            return
        job.waiting.discard(rank)
        if error:
            job.errors.append(error)
        if not job.waiting:
            del self._jobs[job_id]
            if not job.errors:
                self._moved[job.direction] += len(job.slots) // 4
            self._end(job)

    def _end(self, job: Job) -> None:
        if job.direction == "save":
            # First, and whatever the index says: GPU blocks that are held for ever cost the engine more than a slot.
            self._held -= len(job.held)
            self._pool.free_blocks(reversed(job.held))  # the tail of a prefix goes first
            if self._migration is not None and job.epoch != self._epoch:
                self._migration.saved(job.slots)
            if job.errors:
                self._index.abandon(GROUP, job.slots)
                self.drops["save_failed"] += len(job.slots) // 4
                log_limited("save", "PegaConnector: a save failed and is dropped: %s", job.errors[0])
            else:
                self._index.publish(GROUP, job.slots)
            return
        state = job.state
        assert state is not None
        state.load = None
        self._index.unpin(GROUP, job.slots)
        if not job.errors:
            return
        state.load_limit = job.start
        failures = [e for e in job.errors if not e.startswith("cancelled")]  # we cancel when the request has gone
        if failures:
            self.load_failures[failures[0].split(":", 1)[0]] += 1
            log_limited("load", "PegaConnector: a load failed, its blocks are computed instead: %s", failures[0])

    # --- questions ---

    def has_pending_saves(self) -> bool:
        """True while GPU blocks are held: the engine must go on stepping until they are given back."""
        return self._held > 0

    def reset(self) -> bool:
        """Forgets every key. What is in flight ends, and is not published."""
        if self._index is None:
            return True
        for state in self._requests.values():
            self._release_match(state)
        self._index.reset()
        self._epoch += 1
        if self._migration is not None:
            saving = [job.slots for job in self._jobs.values() if job.direction == "save"]
            saving += [slot for batch in self._batches.values() for slot in batch.slots]
            self._migration.reset(b"".join(saving))
        return True

    def shutdown(self) -> None:
        if self._migration is not None:
            self._migration.close()

    def counts(self) -> dict[str, int]:
        """What is held and where, for metrics and tests; all but `ready`, `free` and `total` are 0 at idle."""
        slots = self._index.counts(0) if self._index is not None else {}
        if self._migration is not None:
            slots |= self._migration.counts()
        return {**slots, "held_blocks": self._held, "jobs": len(self._jobs), "requests": len(self._requests)}

    def take_stats(self) -> PegaStats | None:
        """What was dropped, failed or evicted since the last call, and the pool as it stands."""
        if self._index is None:
            return None
        stats = PegaStats.empty()
        evictions = self._index.evictions
        slots = self._index.counts(0)
        drops = self.drops - self._told_drops
        stats.data["ignored_params"] = drops.pop("bad_request_params", 0)
        stats.data["faults"] = drops.pop("duplicate_report", 0) + take_faults()
        stats.data["drops"] = dict(drops)
        stats.data["blocks"], self._moved = dict(self._moved), Counter()
        stats.data["failures"] = dict(self.load_failures - self._told_failures)
        stats.data["evictions"] = evictions - self._told_evictions
        if self._migration is not None:
            stats.add_migrations(self._migration.take_stats())
        stats.data["pool"] = {} if slots == self._told_pool else slots
        self._told_drops, self._told_failures = self.drops.copy(), self.load_failures.copy()
        self._told_evictions, self._told_pool = evictions, slots
        return None if stats.is_empty() else stats


def _computed(request: Request) -> int:
    """Tokens whose KV is surely written, or will be before the next hand-over on the compute stream.

    Placeholders are sampled or drafted tokens that are still in flight; and once there is output, the last token's
    slot may hold the KV of a rejected draft.
    """
    tokens = request.num_computed_tokens - getattr(request, "num_output_placeholders", 0)
    return min(tokens, request.num_tokens - (1 if request.num_output_tokens else 0))


def _past_end(request: Request, tokens: int) -> bool:
    """True if nothing is left to load: all but the last token is there already."""
    return tokens >= request.num_tokens - 1


def _moves(blocks: list[int], slots: bytes) -> bytes:
    moves = np.empty((len(blocks), 3), np.uint32)
    moves[:, 0] = GROUP
    moves[:, 1] = blocks
    moves[:, 2] = np.frombuffer(slots, np.uint32)
    return moves.tobytes()


def _max_held_blocks(config: PegaConfig, gpu_blocks: int) -> int:
    if config.max_pending_save_blocks != "auto":
        return config.max_pending_save_blocks
    return max(1, gpu_blocks // 20, min(SMALL_CACHE_HELD_BLOCKS, gpu_blocks // 4))
