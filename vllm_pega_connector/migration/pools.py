# SPDX-License-Identifier: Apache-2.0
"""The host pools of an instance, one a rank, as its agent sees them. A slot means the same block on every rank."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from vllm_pega_connector.migration.protocol import Spec

if TYPE_CHECKING:
    from vllm_pega_connector._native import HostPool, SlotTable


class Pools:
    def __init__(self, spec: Spec) -> None:
        """Maps what the spec names. Raises ValueError if descriptors and sizes disagree."""
        from vllm_pega_connector._native import HostPool, SlotTable

        self.slot_class = spec.slot_class
        self.slots = spec.slots
        self.key_bytes = spec.key_bytes
        self.pools: list[HostPool] = [HostPool.attach(p.data_fd, p.table_fd, p.slot_classes) for p in spec.pools]
        self.tables: list[SlotTable] = [SlotTable(p, spec.slot_class, spec.key_bytes) for p in self.pools]
        self.slot_bytes: int = spec.pools[0].slot_classes[spec.slot_class][0]
        # Of the slot class, not of the pool: slot n lies at base + n * slot_bytes.
        self.bases: list[int] = [p.slot_address(spec.slot_class, 0) for p in self.pools]

    def find(self, keys: bytes) -> tuple[bytes, bytes]:
        """(slots, generations rank by rank) of the longest run of keys that is complete on all ranks."""
        slots, first = self.tables[0].find(keys)
        generations = [np.frombuffer(first, np.uint64)]
        known = keys[: len(slots) // 4 * self.key_bytes]
        generations += [np.frombuffer(table.holding(slots, known), np.uint64) for table in self.tables[1:]]
        missing = np.flatnonzero(np.any(np.stack(generations) == 0, axis=0))
        count = int(missing[0]) if len(missing) else len(generations[0])
        return slots[: 4 * count], b"".join(g[:count].tobytes() for g in generations)

    def still(self, slots: bytes, generations: bytes) -> bytes:
        """One byte a slot: 1 if every rank's bytes are what they were. Raises ValueError if counts differ."""
        per_rank = len(slots) // 4 * 8
        if len(generations) != per_rank * len(self.tables):
            raise ValueError(
                f"{len(generations)} bytes of generations for {len(slots) // 4} slots on {len(self.tables)} ranks"
            )
        valid = np.ones(len(slots) // 4, bool)
        for r, table in enumerate(self.tables):
            valid &= np.frombuffer(table.still(slots, generations[r * per_rank : (r + 1) * per_rank]), bool)
        return valid.tobytes()

    def lease(self, slots: bytes, seconds: float) -> None:
        for table in self.tables:
            table.lease(slots, seconds)

    def begin(self, slots: bytes) -> None:
        for table in self.tables:
            table.begin(slots)

    def end(self, slots: bytes, keys: bytes) -> None:
        """From the last rank to the first: lookups begin at the first."""
        for table in reversed(self.tables):
            table.end(slots, keys, self.slot_bytes)

    def end_empty(self, slots: bytes) -> None:
        for table in self.tables:
            table.end_empty(slots)

    def checksums(self, slots: bytes) -> bytes:
        """CRC-32 of each slot, rank by rank, as uint32. zlib gives up the GIL meanwhile."""
        ids = np.frombuffer(slots, np.uint32).tolist()
        sums = [zlib.crc32(pool.slot_view(self.slot_class, slot)) for pool in self.pools for slot in ids]
        return np.array(sums, np.uint32).tobytes()
