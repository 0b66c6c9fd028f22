# SPDX-License-Identifier: Apache-2.0
"""What scheduler and workers tell each other, once a step. All of it is picklable and plain."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_pega_connector.config import PolicyConfig
from vllm_pega_connector.migration.share import PoolShare

Rank = tuple[int, int]  # (pipeline rank, tensor rank), as vLLM keys its handshake


@dataclass(frozen=True)
class TransferJob:
    """One job of one direction: every rank runs it over its own KV and reports it exactly once.

    moves: uint32 [n, 3] rows of (group, block, slot), as bytes. keys: n joined block hashes: what a save stores the
    slots under, and what a load must find there. request_id: whose load it is; "" for saves. policy: a request's own
    policy, None = the instance's.
    """

    job_id: int
    direction: str
    moves: bytes
    keys: bytes = b""
    request_id: str = ""
    policy: PolicyConfig | None = None


@dataclass
class PegaMetadata(KVConnectorMetadata):
    """Scheduler to workers: jobs to start and jobs to stop."""

    jobs: list[TransferJob] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)


@dataclass
class PegaWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: (rank, job id, error) of every job that ended; error "" = done.

    handshakes: once, where vLLM's own way of handing them over belongs to another connector.
    """

    ended: list[tuple[Rank, int, str]] = field(default_factory=list)
    handshakes: dict[Rank, "PegaHandshake"] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "PegaWorkerMetadata":
        assert isinstance(other, PegaWorkerMetadata)
        return PegaWorkerMetadata(self.ended + other.ended, self.handshakes | other.handshakes)


@dataclass(frozen=True)
class PegaHandshake(KVConnectorHandshakeMetadata):
    """A rank's host pool, told once after its KV is registered: slots and bytes of each size class.

    share, layout: for migration, the pool's descriptors and a digest of what lies where in a slot.
    """

    slots: tuple[int, ...]
    slot_bytes: tuple[int, ...]
    group_classes: tuple[int, ...]
    share: PoolShare | None = None
    layout: str = ""
