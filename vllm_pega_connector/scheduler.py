# SPDX-License-Identifier: Apache-2.0
"""Scheduler side: pure bookkeeping, no I/O. vLLM calls everything here on one thread, between steps; nothing waits.

`scheduler_state.py` has the state; `scheduler_loads.py`, `scheduler_saves.py` and `scheduler_room.py` decide; this file
follows requests and steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_pega_connector import compat
from vllm_pega_connector.config import MigrationConfig, PegaConfig, RequestParams
from vllm_pega_connector.guard import guarded, log_limited, logger, take_faults
from vllm_pega_connector.kv_events import KvEvents
from vllm_pega_connector.messages import PegaHandshake, PegaMetadata, PegaWorkerMetadata, Rank
from vllm_pega_connector.metrics import PegaStats
from vllm_pega_connector.migration.fingerprint import digest
from vllm_pega_connector.migration.hook import Migration
from vllm_pega_connector.migration.start import advertised
from vllm_pega_connector.scheduler_loads import Loads
from vllm_pega_connector.scheduler_room import Room
from vllm_pega_connector.scheduler_saves import Saves
from vllm_pega_connector.scheduler_state import GROUP, RequestState, Shared, computed_tokens

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


SLOT_STATES = ("free", "reserved", "ready", "pinned", "total")  # as the index counts them


class PegaScheduler:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: PegaConfig, saves: bool, loads: bool) -> None:
        self._vllm_config, self._kv_cache_config, self._config = vllm_config, kv_cache_config, config
        groups = compat.cache_groups(kv_cache_config)
        block_size = kv_cache_config.kv_cache_groups[GROUP].kv_cache_spec.block_size
        self._shared = Shared(config, groups, block_size, compat.hash_bytes(vllm_config))
        if compat.wants_kv_events(vllm_config):
            self._shared.events = KvEvents(kv_cache_config, block_size, self._shared.key_bytes)
        blocks_per_step = -(-vllm_config.scheduler_config.max_num_batched_tokens // block_size) * len(groups)
        self._room = Room(self._shared, vllm_config)
        self._loads = Loads(self._shared, loads, compat.drops_last_hit_block(vllm_config), self._room)
        self._saves = Saves(self._shared, saves, kv_cache_config.num_blocks, blocks_per_step)
        self._handshakes: dict[Rank, PegaHandshake] = {}
        self._reported: dict[Rank, PegaHandshake] = {}  # beside other connectors: by the workers, until all have
        self._requests: dict[str, RequestState] = {}
        self._growing: dict[str, RequestState] = {}  # those that have, or soon have, blocks to save
        self._starting: set[str] = set()  # in this step
        self._fingerprint: dict[str, str] = {}
        self._told_drops: Counter[str] = Counter()
        self._told_failures: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()  # blocks by direction since the last report
        self._told_evictions = 0
        self._told_pool: tuple[int, ...] = ()

    @property
    def drops(self) -> Counter[str]:
        return self._shared.drops

    @property
    def load_failures(self) -> Counter[str]:
        return self._shared.load_failures

    @property
    def _migration(self) -> Migration | None:
        return self._shared.migration

    # --- start ---

    def set_workers(self, handshakes: dict[Rank, PegaHandshake]) -> None:
        """Makes the index over the slots that every rank has. Told again (after sleep), it keeps what it knows."""
        from vllm_pega_connector._native import SlotIndex

        # MultiConnector hands every child the metadata of the first that has any; then `update` brings ours.
        ours = all(isinstance(h, PegaHandshake) for h in handshakes.values())
        if not ours or not handshakes or handshakes == self._handshakes:
            return
        self._handshakes = dict(handshakes)
        self._shared.ranks = frozenset(handshakes)
        first = next(iter(handshakes.values()))
        slots = [min(h.slots[c] for h in handshakes.values()) for c in range(len(first.slots))]
        self._shared.index = SlotIndex(slots, first.group_classes, self._shared.key_bytes)
        if self._shared.events is not None:
            self._shared.events.watch(self._shared.index)
        if self._migration is not None:
            self._migration.close()
        if self._config.migration is not None:
            self._shared.migration = self._start_migration(self._config.migration, handshakes, slots)

    def _start_migration(
        self, config: MigrationConfig, handshakes: dict[Rank, PegaHandshake], slots: list[int]
    ) -> Migration | None:
        """Without it serving goes on, so what is in its way is a warning."""
        from vllm_pega_connector.migration.start import start

        ranks = [handshakes[rank] for rank in sorted(handshakes)]
        problem = compat.hash_seed_problem(self._vllm_config)
        shares = [h.share for h in ranks if h.share is not None]
        if not problem and (len(self._shared.groups) > 1 or self._shared.groups[GROUP].window):
            problem = "it knows one cache group of full attention only"
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
            return start(
                config,
                self._shared.index,
                GROUP,
                slot_class,
                self._shared.key_bytes,
                slots[slot_class],
                pools,
                fingerprint,
            )
        except (OSError, ValueError, RuntimeError) as error:
            logger.warning("PegaConnector: no migration: %s", error)
            return None

    def bind_block_pool(self, pool: Any) -> None:
        self._shared.pool = pool

    # --- requests ---

    def on_new_request(self, request: Request) -> None:
        params = RequestParams.parse(request.kv_transfer_params, self._config)
        for problem in params.problems:
            self.drops["bad_request_params"] += 1
            log_limited("params", "PegaConnector: ignoring kv_transfer_params of %s: %s", request.request_id, problem)
        self._requests[request.request_id] = RequestState(request, params)

    def match(self, request: Request, computed: int) -> tuple[int | None, bool]:
        if self._room.gives_way(request.request_id):
            return None, False
        state = self._requests.get(request.request_id)
        return self._loads.match(state, computed) if state is not None else (0, False)

    def after_alloc(self, request: Request, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        if not external_tokens:
            self._room.settled(request.request_id)
        if state := self._requests.get(request.request_id):
            self._loads.after_alloc(state, block_ids, external_tokens)

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request is over; its blocks are about to be freed, so what is worth saving is held now.

        Where its KV may be had is the answer, for whoever goes on with it on another instance.
        """
        state = self._requests.pop(request.request_id, None)
        self._growing.pop(request.request_id, None)
        self._room.settled(request.request_id)
        if state is not None:
            self._finish(state, block_ids)
        if self._migration is None or not self._migration.port or self._config.migration is None:
            return None
        source = str(advertised(self._config.migration, self._migration.port))
        blocks = computed_tokens(request) // self._shared.block_size
        return {"pega": {"source": source, "blocks": blocks, "fingerprint": digest(self._fingerprint)}}

    def _finish(self, state: RequestState, block_ids: tuple[list[int], ...]) -> None:
        if self._shared.ready:
            self._loads.release(state)
        if state.load is not None:
            # Its blocks may hold anything until the load has drained; vLLM keeps them until then.
            self._loads.cancel.append(state.load.job_id)
            return
        if block_ids:
            state.block_ids = [list(ids) for ids in block_ids]
            state.saved = state.saved or [0] * len(block_ids)
            state.last_slot = state.last_slot or [-1] * len(block_ids)
            self._saves.collect(state, finished=True)

    # --- every step ---

    def build_metadata(self, output: SchedulerOutput) -> PegaMetadata:
        if self._migration is not None:
            self._migration.poll()
        self._follow(output)
        self._collect()
        metadata = PegaMetadata(self._loads.new_jobs + self._saves.take_jobs(bool(self._requests)), self._loads.cancel)
        self._loads.new_jobs, self._loads.cancel = [], []
        return metadata

    def _follow(self, output: SchedulerOutput) -> None:
        """Which blocks every request has. Of hundreds that decode only few get one in a step."""
        self._starting.clear()
        for request_id in output.preempted_req_ids or ():
            if state := self._requests.get(request_id):
                state.restart([])
        for new in output.scheduled_new_reqs:
            self._start(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._start(request_id, new_blocks or [])
            elif new_blocks and (state := self._requests.get(request_id)):
                for ids, new_ids in zip(state.block_ids, new_blocks, strict=True):
                    ids.extend(new_ids)
                if self._saves.due(state):
                    self._growing[request_id] = state

    def _start(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        if state := self._requests.get(request_id):
            state.restart(block_ids)
            self._starting.add(request_id)
            if self._saves.due(state):
                self._growing[request_id] = state

    def _collect(self) -> None:
        """Not of those that start in this step: what they hit in the GPU's prefix cache may be computed by this very
        step, for another request, and its saves run before it."""
        for request_id, state in list(self._growing.items()):
            if request_id in self._starting:
                continue
            self._saves.collect(state, finished=False)
            if not self._saves.due(state):
                del self._growing[request_id]

    # --- results ---

    def received(self, request_ids: Iterable[str]) -> None:
        """Loads that have arrived, of any connector."""
        for request_id in request_ids:
            if request_id in self._requests:
                self._room.arrived(request_id)

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
        job = self._shared.jobs.get(job_id)
        if job is None or rank not in job.waiting:
            self.drops["duplicate_report"] += 1
            log_limited("report", "PegaConnector: rank %s reported job %s twice; ignored", rank, job_id)
            return
        job.waiting.discard(rank)
        if error:
            job.errors.append(error)
        if not job.waiting:
            del self._shared.jobs[job_id]
            if not job.errors:
                self._moved[job.direction] += job.blocks
            (self._saves if job.direction == "save" else self._loads).end(job)

    # --- questions ---

    def busy(self) -> bool:
        """True while anything moves or is held for that: the engine must go on stepping until it has ended. vLLM itself
        does not count what loads while the engine is paused, and gives GPU memory away once a paused one is idle."""
        return bool(self._shared.jobs) or self._saves.held > 0

    def make_room(self) -> bool:
        """vLLM is about to preempt for want of blocks. True if some come back soon: the backlog's at once."""
        held = self._saves.held
        self._saves.give_way(held)
        return held > 0

    def take_events(self) -> list[KVCacheEvent]:
        return self._shared.events.take() if self._shared.events is not None else []

    def reset(self) -> bool:
        """Forgets every key. What is in flight ends, and is not published."""
        if self._shared.index is None:
            return True
        for state in self._requests.values():
            self._loads.release(state)
            state.loaded = {}
        self._saves.forget_backlog()
        self._shared.index.reset()
        self._shared.epoch += 1
        if self._migration is not None:
            saving = [job.slots_of(GROUP) for job in self._shared.jobs.values() if job.direction == "save"]
            self._migration.reset(b"".join(saving + self._saves.collected_slots(GROUP)))
        return True

    def shutdown(self) -> None:
        if self._migration is not None:
            self._migration.close()

    def counts(self) -> dict[str, int]:
        """What is held and where, for metrics and tests; all but `ready`, `free` and `total` are 0 at idle."""
        slots = self._slots()
        if self._migration is not None:
            slots |= self._migration.counts()
        held, jobs = self._saves.held, len(self._shared.jobs)
        return {**slots, "held_blocks": held, "jobs": jobs, "requests": len(self._requests)}

    def _slots(self) -> dict[str, int]:
        """Slots by state, of all size classes."""
        if self._shared.index is None:
            return {}
        return dict(zip(SLOT_STATES, self._shared.index.totals(), strict=True))

    def take_stats(self) -> PegaStats | None:
        """What was dropped, failed or evicted since the last call, and the pool as it stands. vLLM asks every step."""
        if self._shared.index is None:
            return None
        slots, faults = self._shared.index.totals(), take_faults()
        migrations = self._migration.take_stats() if self._migration is not None else None
        lost = not (dict.__eq__(self.drops, self._told_drops) and dict.__eq__(self.load_failures, self._told_failures))
        if not (faults or migrations or lost or self._moved or slots != self._told_pool):
            return None  # an eviction changes `slots` or comes with a move
        stats, evictions = PegaStats.empty(), self._shared.index.evictions
        stats.data["faults"] = faults
        if lost:
            drops = self.drops - self._told_drops
            stats.data["ignored_params"] = drops.pop("bad_request_params", 0)
            stats.data["faults"] += drops.pop("duplicate_report", 0)
            stats.data["drops"] = dict(drops)
            stats.data["failures"] = dict(self.load_failures - self._told_failures)
            self._told_drops, self._told_failures = self.drops.copy(), self.load_failures.copy()
        if self._moved:
            stats.data["blocks"], self._moved = dict(self._moved), Counter()
        stats.data["evictions"] = evictions - self._told_evictions
        if migrations:
            stats.add_migrations(migrations)
        if slots != self._told_pool:
            stats.data["pool"] = dict(zip(SLOT_STATES, slots, strict=True))
        self._told_evictions, self._told_pool = evictions, slots
        return stats
