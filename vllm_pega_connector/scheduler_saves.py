# SPDX-License-Identifier: Apache-2.0
"""Saves: which GPU blocks are stored when, and which of them are held meanwhile."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm_pega_connector import compat
from vllm_pega_connector.config import PegaConfig, PolicyConfig
from vllm_pega_connector.guard import log_limited
from vllm_pega_connector.messages import TransferJob
from vllm_pega_connector.scheduler_state import GROUP, Job, RequestState, Shared, computed_tokens, move_rows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

NO_SLOT = 0xFFFFFFFF  # what SlotIndex.reserve answers for a key that is present or has no room

# Of a small GPU cache 5 % would be less than one prompt's blocks; saves may then hold this many, but never more
# than a quarter, so that requests still run beside them.
SMALL_CACHE_HELD_BLOCKS = 64


@dataclass
class Chunk:
    """Blocks of one request and cache group that are worth saving, in order."""

    group: int
    policy: PolicyConfig | None
    keys: list[bytes]
    blocks: list[KVCacheBlock]
    near: int  # slot beside which theirs should lie

    def split(self, n: int) -> Chunk:
        """Takes the first `n` blocks away."""
        head = Chunk(self.group, self.policy, self.keys[:n], self.blocks[:n], self.near)
        self.keys, self.blocks = self.keys[n:], self.blocks[n:]
        return head


@dataclass
class SaveBatch:
    """The blocks of this step that are saved under one policy; becomes one job."""

    policy: PolicyConfig | None
    epoch: int
    groups: list[int] = field(default_factory=list)
    blocks: list[KVCacheBlock] = field(default_factory=list)
    slots: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def slots_of(self, group: int) -> bytes:
        return b"".join(s for g, s in zip(self.groups, self.slots, strict=True) if g == group)


class Saves:
    """Blocks of running requests wait for room with their request. Those of a finished one wait in the backlog, which
    holds them as vLLM would if it delayed freeing them; but the backlog can give way at once when blocks run short.
    """

    def __init__(self, shared: Shared, enabled: bool, gpu_blocks: int, blocks_per_step: int) -> None:
        self._shared = shared
        self._enabled = enabled
        self._max_moving = max_held_blocks(shared.config, gpu_blocks)
        # What the backlog leaves free while requests run: what they may want in one step.
        self._leave_free = min(blocks_per_step, gpu_blocks // 4)
        self._batches: dict[tuple[PolicyConfig | None, int], SaveBatch] = {}  # by policy and epoch
        self._backlog: deque[Chunk] = deque()
        self._waiting = 0  # blocks in the backlog
        self._moving = 0  # blocks in batches and jobs

    @property
    def held(self) -> int:
        return self._moving + self._waiting

    @property
    def _room(self) -> int:
        return max(0, self._max_moving - self._moving)

    def collected_slots(self, group: int) -> list[bytes]:
        """Of what waits for the next metadata."""
        return [batch.slots_of(group) for batch in self._batches.values()]

    def collect(self, state: RequestState, finished: bool) -> None:
        """Adds the request's full, computed and not yet stored blocks to this step's saves.

        Over the bound the rest waits: with the request, or, once that is over, in the backlog.
        """
        if not (self._enabled and self._shared.ready and state.params.save):
            return
        for group in range(len(state.block_ids)):
            self._collect_group(state, group, finished)

    def _collect_group(self, state: RequestState, group: int, finished: bool) -> None:
        request = state.request
        tokens = computed_tokens(request)
        if not self._shared.config.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        first, ids, hashes = state.saved[group], state.block_ids[group], request.block_hashes
        end = min(tokens // self._shared.block_size, len(hashes), len(ids))
        if end <= first:
            return
        present = self._shared.index.contains(group, b"".join(hashes[first:end]))
        in_window = self._shared.groups[group].first_needed(request.num_computed_tokens, self._shared.block_size)
        room = len(ids) if finished else self._room
        wanted: list[int] = []
        state.saved[group] = end
        for i in range(first, end):
            if present[i - first]:
                continue
            block = self._shared.pool.blocks[ids[i]]
            if block.is_null or block.block_hash != compat.pool_hash(hashes[i], group):
                continue  # not what the key says (or not to be cached at all)
            if i < in_window and not finished and block.ref_cnt:
                continue  # the request has given it back: it may be another's, who computes it in this very step
            if len(wanted) >= room:
                state.saved[group] = i
                break
            wanted.append(i)
        if not wanted:
            return
        blocks = [self._shared.pool.blocks[ids[i]] for i in wanted]
        chunk = Chunk(group, state.params.save_policy, [hashes[i] for i in wanted], blocks, state.last_slot[group])
        self._shared.pool.touch(blocks)
        now = chunk.split(self._room)
        state.last_slot[group] = self._reserve(now)
        if chunk.blocks:
            chunk.near = state.last_slot[group]
            self._backlog.append(chunk)
            self._waiting += len(chunk.blocks)

    def _reserve(self, chunk: Chunk) -> int:
        """Moves a chunk of held blocks into this step's saves, as far as there are slots. Returns the last slot."""
        slots = self._shared.index.reserve(chunk.group, b"".join(chunk.keys), chunk.near)
        batch = self._batches.setdefault(
            (chunk.policy, self._shared.epoch), SaveBatch(chunk.policy, self._shared.epoch)
        )
        last = chunk.near
        for block, key, slot in zip(chunk.blocks, chunk.keys, np.frombuffer(slots, np.uint32).tolist(), strict=True):
            if slot == NO_SLOT:
                self._shared.pool.free_blocks([block])
                continue
            batch.groups.append(chunk.group)
            batch.blocks.append(block)
            batch.slots.append(slot.to_bytes(4, "little"))
            batch.keys.append(key)
            last = slot
            self._moving += 1
        if NO_SLOT in np.frombuffer(slots, np.uint32):
            absent = self._shared.index.contains(chunk.group, b"".join(chunk.keys)).count(0)
            self._shared.drops["pool_full"] += absent  # the others are there already
        return last

    def _drain_backlog(self) -> None:
        while self._backlog and self._room:
            chunk = self._backlog[0]
            part = chunk.split(self._room)
            self._waiting -= len(part.blocks)
            chunk.near = self._reserve(part)
            if not chunk.blocks:
                self._backlog.popleft()

    def give_way(self, wanted: int) -> None:
        """Drops up to `wanted` blocks of the backlog, the ends of prefixes first."""
        while self._backlog and wanted > 0:
            chunk = self._backlog[-1]
            kept = chunk.split(max(0, len(chunk.blocks) - wanted))
            self._shared.pool.free_blocks(reversed(chunk.blocks))
            self._shared.drops["too_many_pending"] += len(chunk.blocks)
            wanted -= len(chunk.blocks)
            self._waiting -= len(chunk.blocks)
            self._backlog.pop()
            if kept.blocks:
                self._backlog.append(kept)

    def forget_backlog(self) -> None:
        """After a reset the keys stand for nothing any more."""
        for chunk in self._backlog:
            self._shared.pool.free_blocks(reversed(chunk.blocks))
        self._backlog.clear()
        self._waiting = 0

    def take_jobs(self, requests_run: bool) -> list[TransferJob]:
        if self._backlog:
            self._drain_backlog()
            if requests_run:
                self.give_way(self._leave_free - self._shared.pool.get_num_free_blocks())
        jobs = [self._job(batch) for batch in self._batches.values() if batch.blocks]
        self._batches = {}
        return jobs

    def _job(self, batch: SaveBatch) -> TransferJob:
        job = self._shared.new_job("save", tuple((g, batch.slots_of(g)) for g in sorted(set(batch.groups))))
        job.held, job.epoch = batch.blocks, batch.epoch
        moves = move_rows(batch.groups, [b.block_id for b in batch.blocks], b"".join(batch.slots))
        return TransferJob(job.job_id, "save", moves, b"".join(batch.keys), policy=batch.policy)

    def end(self, job: Job) -> None:
        # First, and whatever the index says: GPU blocks that are held for ever cost the engine more than a slot.
        self._moving -= len(job.held)
        self._shared.pool.free_blocks(reversed(job.held))  # the tail of a prefix goes first
        if self._shared.migration is not None and job.epoch != self._shared.epoch:
            self._shared.migration.saved(job.slots_of(GROUP))
        settle = self._shared.index.abandon if job.errors else self._shared.index.publish
        for group, slots in job.slots:
            settle(group, slots)
        if job.errors:
            self._shared.drops["save_failed"] += job.blocks
            log_limited("save", "PegaConnector: a save failed and is dropped: %s", job.errors[0])


def max_held_blocks(config: PegaConfig, gpu_blocks: int) -> int:
    if config.max_pending_save_blocks != "auto":
        return config.max_pending_save_blocks
    return max(1, gpu_blocks // 20, min(SMALL_CACHE_HELD_BLOCKS, gpu_blocks // 4))
