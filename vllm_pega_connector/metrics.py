# SPDX-License-Identifier: Apache-2.0
"""Statistics through vLLM's own hooks: its periodic log line, and Prometheus on its /metrics.

A fault in here would end the API server's output loop, so `observe` never raises.
"""

from __future__ import annotations

from collections import Counter as Counts
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_pega_connector.guard import guarded
from vllm_pega_connector.migration.hook import MigrationStats

# Seconds; a block of a few hundred KiB moves in tens of microseconds, a long prompt in tenths of a second.
SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30)


@dataclass
class PegaStats(KVConnectorStats):
    """What happened since the last report; plain data, so that it crosses processes.

    transfers: [direction, backend, status, bytes, queue seconds, transfer seconds] per job that ended on a rank.
    drops, failures: counts by reason. pool: slots by state, now. evictions: slots evicted.
    migrations: [result, reason, count] of pulls that ended; migration_seconds: [phase, seconds]; migration_bytes.
    """

    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> PegaStats:
        stats = cls()
        stats.reset()
        return stats

    def reset(self) -> None:
        self.data = {"transfers": [], "drops": {}, "failures": {}, "pool": {}, "evictions": 0,
                     "migrations": [], "migration_seconds": [], "migration_bytes": 0}  # fmt: skip

    def add_transfer(self, result: Any) -> None:
        self.data["transfers"].append(
            [result.direction, result.backend, result.status, result.bytes, result.queue_s, result.transfer_s]
        )

    def add_migrations(self, stats: MigrationStats) -> None:
        self.data["migrations"] += [[result, reason, n] for (result, reason), n in stats.ended.items()]
        self.data["migration_seconds"] += [[phase, seconds] for phase, seconds in stats.seconds]
        self.data["migration_bytes"] += stats.nbytes

    def aggregate(self, other: KVConnectorStats) -> PegaStats:
        if not other.is_empty():
            for kind in ("transfers", "migrations", "migration_seconds", "migration_bytes"):
                self.data[kind] += other.data[kind]
            for kind in ("drops", "failures"):
                self.data[kind] = dict(Counts(self.data[kind]) + Counts(other.data[kind]))
            self.data["pool"] = other.data["pool"] or self.data["pool"]
            self.data["evictions"] += other.data["evictions"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """A line for people: GiB and GiB/s by direction, and whatever went wrong."""
        line: dict[str, int | float] = {}
        for direction in ("load", "save"):
            done = [t for t in self.data["transfers"] if t[0] == direction and t[2] == "done"]
            if done:
                gib = sum(t[3] for t in done) / 2**30
                seconds = sum(t[5] for t in done)
                line[f"{direction}s"] = len(done)
                line[f"{direction} GiB"] = round(gib, 3)
                line[f"{direction} GiB/s"] = round(gib / seconds, 2) if seconds else 0.0
        for state in ("ready", "free"):
            if state in self.data["pool"]:
                line[f"pool slots {state}"] = self.data["pool"][state]
        for kind, reasons in (("saves dropped", self.data["drops"]), ("loads failed", self.data["failures"])):
            for reason, count in reasons.items():
                line[f"{kind} ({reason})"] = count
        for result, reason, count in self.data["migrations"]:
            name = f"pulls {result} ({reason})" if reason else f"pulls {result}"
            line[name] = line.get(name, 0) + count
        if self.data["migration_bytes"]:
            line["migrated GiB"] = round(self.data["migration_bytes"] / 2**30, 3)
        if self.data["evictions"]:
            line["evictions"] = self.data["evictions"]
        return line

    def is_empty(self) -> bool:
        return not any(self.data.values())


class PegaPromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        counter, gauge, histogram = metric_types[Counter], metric_types[Gauge], metric_types[Histogram]
        by_backend = [*labelnames, "direction", "backend"]
        self._bytes = counter("vllm:pega_transfer_bytes", "Bytes moved by transfers that ended well", by_backend)
        self._transfers = counter("vllm:pega_transfers", "Transfers that ended well", by_backend)
        self._seconds = histogram(
            "vllm:pega_transfer_seconds", "First submission to last byte, seconds", by_backend, buckets=SECONDS_BUCKETS
        )
        self._queue = histogram(
            "vllm:pega_queue_seconds", "Hand-over to first submission, seconds", by_backend, buckets=SECONDS_BUCKETS
        )
        self._drops = counter("vllm:pega_saves_dropped", "Blocks (or reports) dropped", [*labelnames, "reason"])
        self._failures = counter("vllm:pega_load_failures", "Loads that were recomputed", [*labelnames, "reason"])
        self._pool = gauge("vllm:pega_pool_slots", "Host pool slots by state", [*labelnames, "state"])
        self._migrations = counter(
            "vllm:pega_migrations", "Pulls from other instances that ended", [*labelnames, "result", "reason"]
        )
        self._migration_bytes = counter("vllm:pega_migration_bytes", "Bytes pulled from other instances", labelnames)
        self._migration_seconds = histogram(
            "vllm:pega_migration_seconds", "Pulls by phase, seconds", [*labelnames, "phase"], buckets=SECONDS_BUCKETS
        )
        self._evictions = counter("vllm:pega_evictions", "Host pool slots evicted", labelnames)

    @guarded(lambda: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self._labels[engine_idx]
        for direction, backend, status, nbytes, queue_s, transfer_s in transfer_stats_data["transfers"]:
            if status == "done":
                labels = (*engine, direction, backend)
                self._bytes.labels(*labels).inc(nbytes)
                self._transfers.labels(*labels).inc()
                self._seconds.labels(*labels).observe(transfer_s)
                self._queue.labels(*labels).observe(queue_s)
        for reason, count in transfer_stats_data["drops"].items():
            self._drops.labels(*engine, reason).inc(count)
        for reason, count in transfer_stats_data["failures"].items():
            self._failures.labels(*engine, reason).inc(count)
        for state, count in transfer_stats_data["pool"].items():
            self._pool.labels(*engine, state).set(count)
        for result, reason, count in transfer_stats_data["migrations"]:
            self._migrations.labels(*engine, result, reason).inc(count)
        for phase, seconds in transfer_stats_data["migration_seconds"]:
            self._migration_seconds.labels(*engine, phase).observe(seconds)
        if transfer_stats_data["migration_bytes"]:
            self._migration_bytes.labels(*engine).inc(transfer_stats_data["migration_bytes"])
        if transfer_stats_data["evictions"]:
            self._evictions.labels(*engine).inc(transfer_stats_data["evictions"])
