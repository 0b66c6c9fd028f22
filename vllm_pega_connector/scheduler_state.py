# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side knows: a `RequestState` per live request, a `Job` per transfer in flight, and `Shared`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_pega_connector.compat import CacheGroup
from vllm_pega_connector.config import PegaConfig, RequestParams
from vllm_pega_connector.messages import Rank

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_pega_connector._native import SlotIndex
    from vllm_pega_connector.kv_events import KvEvents
    from vllm_pega_connector.migration.hook import Ask, Migration

GROUP = 0  # the one that migration knows
GroupSlots = tuple[tuple[int, bytes], ...]  # (group, uint32 slots), one entry a group


@dataclass
class Match:
    """A host hit offered to vLLM: blocks [start, start + blocks) of the request.

    pins: (group, first block, slots), pinned in the index. Full attention needs all blocks from `start` on, a sliding
    window only the last ones.
    """

    start: int
    blocks: int
    pins: list[tuple[int, int, bytes]]
    index_version: int


@dataclass
class Job:
    """A transfer that some ranks have not reported yet. Saves hold GPU blocks, loads hold pins."""

    job_id: int
    direction: str
    slots: GroupSlots
    waiting: set[Rank]
    epoch: int  # resets that came before it, or before a save's blocks were collected
    held: list[KVCacheBlock] = field(default_factory=list)
    state: RequestState | None = None
    start: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return sum(len(slots) // 4 for _, slots in self.slots)

    def slots_of(self, group: int) -> bytes:
        return b"".join(slots for g, slots in self.slots if g == group)


@dataclass
class RequestState:
    request: Request
    params: RequestParams
    block_ids: list[list[int]] = field(default_factory=list)  # by group; out-of-window ones may be stale
    saved: list[int] = field(default_factory=list)  # by group: blocks below are stored, on their way, or given up
    last_slot: list[int] = field(default_factory=list)  # by group: neighbour for the next slot
    match: Match | None = None
    load: Job | None = None
    loaded: dict[int, tuple[int, int]] = field(default_factory=dict)  # by group: blocks just loaded, their last slot
    load_limit: int | None = None  # after a failed load: never offer a block from here on again
    ask: Ask | None = None  # for blocks of another instance
    joined: bytes = b""  # block hashes joined, grown on demand
    joined_blocks: int = 0

    def restart(self, block_ids: Sequence[Sequence[int]]) -> None:
        """The request begins, or begins again after a preemption, with these blocks."""
        self.block_ids = [list(ids) for ids in block_ids]
        loaded = [self.loaded.get(group, (0, -1)) for group in range(len(block_ids))]
        self.saved, self.last_slot = [blocks for blocks, _ in loaded], [slot for _, slot in loaded]
        self.loaded = {}

    def joined_hashes(self, blocks: int, index: SlotIndex) -> bytes:
        """The first `blocks` block hashes of the request, joined; grown once, then reused."""
        if self.joined_blocks < blocks:
            self.joined += index.join(self.request.block_hashes, self.joined_blocks, blocks)
            self.joined_blocks = blocks
        return self.joined if self.joined_blocks == blocks else self.joined[: blocks * index.key_bytes]


@dataclass
class Shared:
    """What loads and saves have in common."""

    config: PegaConfig
    groups: tuple[CacheGroup, ...]
    block_size: int
    key_bytes: int
    index: Any = None  # the native SlotIndex, made when the workers' pools are known
    pool: Any = None  # vLLM's block pool
    migration: Migration | None = None
    events: KvEvents | None = None  # if vLLM wants them
    ranks: frozenset[Rank] = frozenset()
    jobs: dict[int, Job] = field(default_factory=dict)
    next_job: int = 1
    epoch: int = 0  # counts resets: what was collected before one is not given to other instances
    drops: Counter[str] = field(default_factory=Counter)
    load_failures: Counter[str] = field(default_factory=Counter)

    @property
    def ready(self) -> bool:
        return self.index is not None and self.pool is not None

    def new_job(self, direction: str, slots: GroupSlots) -> Job:
        job = Job(self.next_job, direction, slots, set(self.ranks), self.epoch)
        self.next_job += 1
        self.jobs[job.job_id] = job
        return job


def computed_tokens(request: Request) -> int:
    """Tokens whose KV is surely written, or will be before the next hand-over on the compute stream.

    Placeholders are sampled or drafted tokens that are still in flight; and once there is output, the last token's
    slot may hold the KV of a rejected draft.
    """
    tokens = request.num_computed_tokens - getattr(request, "num_output_placeholders", 0)
    return min(tokens, request.num_tokens - (1 if request.num_output_tokens else 0))


def last_of(slots: bytes) -> int:
    return int.from_bytes(slots[-4:], "little")


def move_rows(parts: Sequence[tuple[int, Sequence[int], bytes]]) -> bytes:
    """Rows of (group, block, slot), as a TransferJob has them, of parts of (group, blocks, uint32 slots)."""
    from vllm_pega_connector import _native  # once there is a transfer there is an engine

    return _native.move_rows(parts)
