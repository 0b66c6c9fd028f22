# SPDX-License-Identifier: Apache-2.0
"""Saves: which GPU blocks are stored when, and which of them are held meanwhile."""

from __future__ import annotations

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
class SaveBatch:
    """The blocks of this step that are saved under one policy; becomes one job."""

    policy: PolicyConfig | None
    epoch: int
    blocks: list[KVCacheBlock] = field(default_factory=list)
    slots: list[bytes] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)


class Saves:
    def __init__(self, shared: Shared, enabled: bool, gpu_blocks: int) -> None:
        self._shared = shared
        self._enabled = enabled
        self._max_held = max_held_blocks(shared.config, gpu_blocks)
        self._batches: dict[tuple[PolicyConfig | None, int], SaveBatch] = {}  # by policy and epoch
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    @property
    def collected_slots(self) -> list[bytes]:
        """Of what waits for the next metadata."""
        return [slot for batch in self._batches.values() for slot in batch.slots]

    def take_jobs(self) -> list[TransferJob]:
        jobs = [self._job(batch) for batch in self._batches.values() if batch.blocks]
        self._batches = {}
        return jobs

    def collect(self, state: RequestState, last_chance: bool) -> None:
        """Adds the request's full, computed and not yet stored blocks to this step's saves.

        Over the bound on held blocks the rest waits for a later step, while the request itself holds its blocks;
        at the last chance it is dropped.
        """
        if not (self._enabled and self._shared.ready and state.params.save):
            return
        request = state.request
        tokens = computed_tokens(request)
        if not self._shared.config.save_decode:
            tokens = min(tokens, request.num_prompt_tokens)
        first = state.saved
        end = min(tokens // self._shared.block_size, len(request.block_hashes), len(state.block_ids))
        if end <= first:
            return
        hashes = request.block_hashes
        present = self._shared.index.contains(GROUP, b"".join(hashes[first:end]))
        pool_blocks = self._shared.pool.blocks
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
                    self._shared.drops["too_many_pending"] += sum(not p for p in present[i - first :])
                else:
                    state.saved = i
                break
            wanted.append(i)
        if wanted:
            self._reserve(state, wanted)

    def _reserve(self, state: RequestState, wanted: list[int]) -> None:
        hashes = state.request.block_hashes
        slots = self._shared.index.reserve(GROUP, b"".join([hashes[i] for i in wanted]), state.last_slot)
        policy = state.params.save_policy
        batch = self._batches.setdefault((policy, self._shared.epoch), SaveBatch(policy, self._shared.epoch))
        held = []
        for i, slot in zip(wanted, np.frombuffer(slots, np.uint32).tolist(), strict=True):
            if slot == NO_SLOT:
                self._shared.drops["pool_full"] += 1
                continue
            held.append(self._shared.pool.blocks[state.block_ids[i]])
            batch.slots.append(slot.to_bytes(4, "little"))
            batch.keys.append(hashes[i])
            state.last_slot = slot
        self._shared.pool.touch(held)
        self._held += len(held)
        batch.blocks += held

    def _job(self, batch: SaveBatch) -> TransferJob:
        slots = b"".join(batch.slots)
        job = self._shared.new_job("save", slots)
        job.held, job.epoch = batch.blocks, batch.epoch
        moves = move_rows([b.block_id for b in batch.blocks], slots)
        return TransferJob(job.job_id, "save", moves, b"".join(batch.keys), policy=batch.policy)

    def end(self, job: Job) -> None:
        # First, and whatever the index says: GPU blocks that are held for ever cost the engine more than a slot.
        self._held -= len(job.held)
        self._shared.pool.free_blocks(reversed(job.held))  # the tail of a prefix goes first
        if self._shared.migration is not None and job.epoch != self._shared.epoch:
            self._shared.migration.saved(job.slots)
        if job.errors:
            self._shared.index.abandon(GROUP, job.slots)
            self._shared.drops["save_failed"] += len(job.slots) // 4
            log_limited("save", "PegaConnector: a save failed and is dropped: %s", job.errors[0])
        else:
            self._shared.index.publish(GROUP, job.slots)


def max_held_blocks(config: PegaConfig, gpu_blocks: int) -> int:
    if config.max_pending_save_blocks != "auto":
        return config.max_pending_save_blocks
    return max(1, gpu_blocks // 20, min(SMALL_CACHE_HELD_BLOCKS, gpu_blocks // 4))
