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
from vllm_pega_connector.scheduler_state import GROUP, Job, RequestState, Shared, computed_tokens, last_of, move_rows

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

# Blocks that a decoding request fills before they are saved together: a quarter of the work and of the jobs, for at
# most this many blocks lost to a preemption. Prompts do not wait, and what is over does not either.
DECODE_BLOCKS = 4

# Of a small GPU cache 5 % would be less than one prompt's blocks; saves may then hold this many, but never more
# than a quarter, so that requests still run beside them.
SMALL_CACHE_HELD_BLOCKS = 64


@dataclass
class Chunk:
    """Blocks of one request and cache group that are worth saving, in order; `keys`: their hashes, joined."""

    group: int
    policy: PolicyConfig | None
    keys: bytes
    blocks: list[KVCacheBlock]
    near: int  # slot beside which theirs should lie

    def split(self, n: int) -> Chunk:
        """Takes the first `n` blocks away."""
        cut = len(self.keys) // len(self.blocks) * n
        head = Chunk(self.group, self.policy, self.keys[:cut], self.blocks[:n], self.near)
        self.keys, self.blocks = self.keys[cut:], self.blocks[n:]
        return head


@dataclass(frozen=True)
class SavePart:
    """Blocks of one cache group and the uint32 slots and keys that they are stored under."""

    group: int
    blocks: list[KVCacheBlock]
    slots: bytes
    keys: bytes


@dataclass
class SaveBatch:
    """The blocks of this step that are saved under one policy; becomes one job."""

    policy: PolicyConfig | None
    epoch: int
    parts: list[SavePart] = field(default_factory=list)

    def slots_of(self, group: int) -> bytes:
        return b"".join(part.slots for part in self.parts if part.group == group)


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
        self._suffixes = [compat.pool_hash(b"", group) for group in range(len(shared.groups))]
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

    def due(self, state: RequestState) -> bool:
        """Whether a running request has, or is about to have, blocks to save."""
        if not (self._enabled and state.params.save and state.block_ids):
            return False
        saved = min(state.saved)
        if saved < state.request.num_prompt_tokens // self._shared.block_size:
            return True
        return self._shared.config.save_decode and len(state.block_ids[GROUP]) - saved > DECODE_BLOCKS

    def collect(self, state: RequestState, finished: bool) -> None:
        """Adds the request's full, computed and not yet stored blocks to this step's saves.

        Over the bound the rest waits: with the request, or, once that is over, in the backlog.
        """
        if not (self._enabled and self._shared.ready and state.params.save):
            return
        for group in range(len(state.block_ids)):
            self._collect_group(state, group, finished)

    def _collect_group(self, state: RequestState, group: int, finished: bool) -> None:
        ids, hashes, first = state.block_ids[group], state.request.block_hashes, state.saved[group]
        end = min(self._computed_blocks(state), len(hashes), len(ids))
        if end <= first:
            return
        mine = hashes[first:end]
        keys = self._shared.index.join(hashes, first, end)
        present = self._shared.index.contains(group, keys)
        absent = present.count(0)
        if not absent:  # as after a load
            state.saved[group] = end
            return
        pool = self._shared.pool.blocks
        blocks = [pool[i] for i in ids[first:end]]
        suffix = self._suffixes[group]
        in_window = self._shared.groups[group].first_needed(state.request.num_computed_tokens, self._shared.block_size)
        room = len(blocks) if finished else self._room
        if (
            absent == len(blocks) <= room
            and (finished or first >= in_window)
            and [block.block_hash for block in blocks] == [key + suffix for key in mine]
        ):
            state.saved[group] = end  # nearly always: all of them
        else:
            wanted = self._wanted(group, mine, blocks, present, 0 if finished else in_window - first)
            state.saved[group] = end if len(wanted) <= room else first + wanted[room]
            wanted = wanted[:room]
            if not wanted:
                return
            keys, blocks = b"".join(mine[i] for i in wanted), [blocks[i] for i in wanted]
        chunk = Chunk(group, state.params.save_policy, keys, blocks, state.last_slot[group])
        if self._shared.events is not None:
            self._shared.events.note(state.request, group, first, keys)
        self._shared.pool.touch(blocks)
        now = chunk if len(blocks) <= self._room else chunk.split(self._room)
        if now.blocks:
            state.last_slot[group] = self._reserve(now)
        if now is not chunk:
            chunk.near = state.last_slot[group]
            self._backlog.append(chunk)
            self._waiting += len(chunk.blocks)

    def _computed_blocks(self, state: RequestState) -> int:
        """Full blocks whose KV is worth saving, of what is computed."""
        tokens = computed_tokens(state.request)
        if not self._shared.config.save_decode:
            tokens = min(tokens, state.request.num_prompt_tokens)
        return tokens // self._shared.block_size

    def _wanted(
        self, group: int, keys: list[bytes], blocks: list[KVCacheBlock], present: bytes, in_window: int
    ) -> list[int]:
        """Which of these blocks can and should be saved. Those before `in_window` the request may have given back."""
        suffix = self._suffixes[group]
        wanted = []
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if present[i] or block.is_null or block.block_hash != key + suffix:
                continue  # there already, or not what the key says (or not to be cached at all)
            if i < in_window and block.ref_cnt:
                continue  # given back: it may be another's, who computes it in this very step
            wanted.append(i)
        return wanted

    def _reserve(self, chunk: Chunk) -> int:
        """Moves a chunk of held blocks into this step's saves, as far as there are slots. Returns the last slot."""
        index, epoch = self._shared.index, self._shared.epoch
        slots, keys, blocks = index.reserve(chunk.group, chunk.keys, chunk.near), chunk.keys, chunk.blocks
        none: int = index.NO_SLOT
        if none.to_bytes(4, "little") in slots:  # perhaps: these bytes may also lie across two slots
            numbers = np.frombuffer(slots, np.uint32)
            kept = np.flatnonzero(numbers != none).tolist()
            if len(kept) < len(blocks):
                # Of those without a slot some are there already, others find no room.
                self._shared.drops["pool_full"] += index.contains(chunk.group, keys).count(0)
                self._shared.pool.free_blocks([block for i, block in enumerate(blocks) if numbers[i] == none])
                size = self._shared.key_bytes
                keys = b"".join(keys[i * size : (i + 1) * size] for i in kept)
                slots, blocks = numbers[kept].tobytes(), [blocks[i] for i in kept]
        if not blocks:
            return chunk.near
        batch = self._batches.get((chunk.policy, epoch))
        if batch is None:
            batch = self._batches[chunk.policy, epoch] = SaveBatch(chunk.policy, epoch)
        batch.parts.append(SavePart(chunk.group, blocks, slots, keys))
        self._moving += len(blocks)
        return last_of(slots)

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
        jobs = [self._job(batch) for batch in self._batches.values()]
        self._batches = {}
        return jobs

    def _job(self, batch: SaveBatch) -> TransferJob:
        parts = batch.parts
        groups = dict.fromkeys(part.group for part in parts)
        job = self._shared.new_job("save", tuple((group, batch.slots_of(group)) for group in groups))
        job.held, job.epoch = [block for part in parts for block in part.blocks], batch.epoch
        moves = move_rows([(part.group, [b.block_id for b in part.blocks], part.slots) for part in parts])
        return TransferJob(job.job_id, "save", moves, b"".join(part.keys for part in parts), policy=batch.policy)

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
