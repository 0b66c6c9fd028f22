# SPDX-License-Identifier: Apache-2.0
"""Statistics through vLLM's own hooks: what crosses from engine to API server, and the periodic log line.

`prometheus.py` makes /metrics of it. A fault in here would end a loop of vLLM's, so nothing raises.
"""

from __future__ import annotations

from collections import Counter as Counts
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from vllm_pega_connector.guard import guarded
from vllm_pega_connector.migration.hook import MigrationStats

DIRECTIONS = ("load", "save")
# Kinds of data, by how two reports of them become one.
_LISTS = ("transfers", "migrations", "migration_seconds")
_COUNTS = ("drops", "failures", "blocks", "migration_bytes")
_SUMS = ("evictions", "ignored_params", "faults")
_LATEST = ("pool", "info")


@dataclass
class PegaStats(KVConnectorStats):
    """What happened since the last report; plain data, so that it crosses processes.

    transfers: [direction, backend, status, bytes, ranges, queue seconds, transfer seconds] per job that ended on a
    rank. blocks: by direction, once whatever the number of ranks. drops (blocks), failures (loads): by reason.
    pool: slots by state, now. evictions: slots. ignored_params: keys of requests. faults: exceptions answered.
    migrations: [result, reason, count] of pulls that ended; migration_seconds: [path, phase, seconds];
    migration_bytes: by path.
    info: what the worker decides by; told once.
    """

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> PegaStats:
        stats = cls()
        stats.reset()
        return stats

    def reset(self) -> None:
        self.data = (
            {kind: [] for kind in _LISTS} | {kind: {} for kind in (*_COUNTS, *_LATEST)} | dict.fromkeys(_SUMS, 0)
        )

    def add_transfer(self, result: Any) -> None:
        self.data["transfers"].append(
            [result.direction, result.backend, result.status, result.bytes, result.ranges, result.queue_s,
             result.transfer_s]
        )  # fmt: skip

    def add_migrations(self, stats: MigrationStats) -> None:
        self.data["migrations"] += [[result, reason, n] for (result, reason), n in stats.ended.items()]
        self.data["migration_seconds"] += [list(entry) for entry in stats.seconds]
        self.data["migration_bytes"] = dict(Counts(self.data["migration_bytes"]) + stats.nbytes)

    def aggregate(self, other: KVConnectorStats) -> PegaStats:
        self._add(other)
        return self

    @guarded(lambda: None)
    def _add(self, other: KVConnectorStats) -> None:
        if other.is_empty():
            return
        for kind in (*_LISTS, *_SUMS):
            self.data[kind] += other.data[kind]
        for kind in _COUNTS:
            self.data[kind] = dict(Counts(self.data[kind]) + Counts(other.data[kind]))
        for kind in _LATEST:
            self.data[kind] = other.data[kind] or self.data[kind]

    @guarded(dict)
    def reduce(self) -> dict[str, int | float]:
        """A line for people: what each backend carried and how fast, and whatever went wrong."""
        line: dict[str, int | float] = {}
        for direction in DIRECTIONS:
            done = [t for t in self.data["transfers"] if t[0] == direction and t[2] == "done"]
            if not done:
                continue
            gib, seconds = sum(t[3] for t in done) / 2**30, sum(t[6] for t in done)
            for backend, count in sorted(Counts(t[1] for t in done).items()):
                line[f"{direction}s by {backend}"] = count
            line[f"{direction} blocks"] = self.data["blocks"].get(direction, 0)
            line[f"{direction} GiB"] = round(gib, 3)
            line[f"{direction} GiB/s"] = round(gib / seconds, 2) if seconds else 0.0
            line[f"{direction} longest ms"] = round(max(t[5] + t[6] for t in done) * 1e3, 1)
        pool = self.data["pool"]
        if pool.get("total"):
            line["pool used %"] = round(100 * (1 - pool.get("free", 0) / pool["total"]), 1)
        for kind, reasons in (("blocks not saved", self.data["drops"]), ("loads failed", self.data["failures"])):
            for reason, count in reasons.items():
                line[f"{kind} ({reason})"] = count
        for result, reason, count in self.data["migrations"]:
            name = f"pulls {result} ({reason})" if reason else f"pulls {result}"
            line[name] = line.get(name, 0) + count
        for path, nbytes in self.data["migration_bytes"].items():
            line[f"migrated GiB ({path})"] = round(nbytes / 2**30, 3)
        for kind, words in (("evictions", "evictions"), ("ignored_params", "request parameters ignored"),
                            ("faults", "internal faults")):  # fmt: skip
            if self.data[kind]:
                line[words] = self.data[kind]
        return line

    def is_empty(self) -> bool:
        return not any(self.data.values())
