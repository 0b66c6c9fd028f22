# SPDX-License-Identifier: Apache-2.0
"""Our metrics on vLLM's /metrics. `METRICS` is all of them: the documentation is held to it by a test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from vllm_pega_connector.guard import guarded
from vllm_pega_connector.metrics import DIRECTIONS

# Seconds; a block of a few hundred KiB moves in tens of microseconds, a long prompt in tenths of a second.
SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10, 30)
BACKENDS = ("memcpy", "kernel", "chunked", "staged")
# Reasons are words of ours, but pass through the agents of other instances. Longer ones are cut, and beyond so many
# different ones a metric counts "other": a label's values cost memory in every Prometheus for ever.
MAX_LABEL_CHARS = 48
MAX_LABEL_SETS = 64


@dataclass(frozen=True)
class Metric:
    """`name` as in queries: without vllm:pega_, a counter's with its _total."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    labels: tuple[str, ...]
    says: str
    known: tuple[tuple[str, ...], ...] = ()  # label sets shown as 0 from the start: a rate needs a first value


_BY_BACKEND = ("direction", "backend")
_EACH = tuple((d, b) for d in DIRECTIONS for b in BACKENDS)
_DROPS = (("pool_full",), ("too_many_pending",), ("save_failed",))
_INFO = ("device", "profile", "objective", "load_policy", "save_policy")
METRICS = (
    Metric("counter", "transfer_bytes_total", _BY_BACKEND, "Bytes of transfers that ended well, on every rank", _EACH),
    Metric("counter", "transfers_total", _BY_BACKEND, "Transfers that ended well, on every rank", _EACH),
    Metric("counter", "transfer_ranges_total", _BY_BACKEND, "Contiguous ranges that they merged into", _EACH),
    Metric("counter", "transfer_blocks_total", ("direction",), "KV blocks moved, once for all ranks",
           tuple((d,) for d in DIRECTIONS)),
    Metric("histogram", "transfer_seconds", _BY_BACKEND, "First submission to last byte, seconds"),
    Metric("histogram", "queue_seconds", _BY_BACKEND, "Hand-over to first submission, seconds"),
    Metric("counter", "saves_dropped_total", ("reason",), "Blocks that were not saved", _DROPS),
    Metric("counter", "load_failures_total", ("reason",), "Loads that failed; their tokens were computed",
           (("failed",), ("timeout",))),
    Metric("gauge", "pool_slots", ("state",), "Host pool slots by state"),
    Metric("counter", "evictions_total", (), "Host pool slots evicted", ((),)),
    Metric("counter", "ignored_request_params_total", (), "Wrong keys of kv_transfer_params, ignored", ((),)),
    Metric("counter", "faults_total", (), "Exceptions of the connector that serving was shielded from: bugs", ((),)),
    Metric("counter", "migrations_total", ("result", "reason"), "Pulls from other instances that ended"),
    Metric("counter", "migration_bytes_total", ("path",), "Bytes pulled from other instances",
           (("network",), ("same_host",))),
    Metric("histogram", "migration_seconds", ("path", "phase"), "Pulls by phase, seconds"),
    Metric("gauge", "info", _INFO, "1; what transfers are decided by"),
)  # fmt: skip


class PegaPromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._labels = per_engine_labelvalues
        self._metrics: dict[str, Any] = {}
        self._seen: dict[str, set[tuple[str, ...]]] = {}
        for metric in METRICS:
            # prometheus_client adds _total itself.
            name = "vllm:pega_" + metric.name.removesuffix("_total")
            arguments: Any = (name, metric.says, [*labelnames, *metric.labels])
            if metric.kind == "counter":
                made = metric_types[Counter](*arguments)
            elif metric.kind == "histogram":
                made = metric_types[Histogram](*arguments, buckets=SECONDS_BUCKETS)
            else:  # with several API servers each hears a share of the reports
                made = metric_types[Gauge](*arguments, multiprocess_mode="mostrecent")
            self._metrics[metric.name] = made
            self._seen[metric.name] = set()
            for engine in per_engine_labelvalues.values():
                for labels in metric.known:
                    made.labels(*engine, *labels)

    def _of(self, name: str, engine: list[object], *labels: object) -> Any:
        """The child of a metric for these labels, tamed as MAX_LABEL_CHARS says."""
        values = tuple(str(label)[:MAX_LABEL_CHARS] for label in labels)
        seen = self._seen[name]
        if values not in seen:
            if len(seen) >= MAX_LABEL_SETS:
                values = ("other",) * len(values)
            else:
                seen.add(values)
        return self._metrics[name].labels(*engine, *values)

    @guarded(lambda: None)
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, engine = transfer_stats_data, self._labels[engine_idx]
        for direction, backend, status, nbytes, ranges, queue_s, transfer_s in data["transfers"]:
            if status == "done":
                self._of("transfer_bytes_total", engine, direction, backend).inc(nbytes)
                self._of("transfers_total", engine, direction, backend).inc()
                self._of("transfer_ranges_total", engine, direction, backend).inc(ranges)
                self._of("transfer_seconds", engine, direction, backend).observe(transfer_s)
                self._of("queue_seconds", engine, direction, backend).observe(queue_s)
        for kind, name in (("blocks", "transfer_blocks_total"), ("drops", "saves_dropped_total"),
                           ("failures", "load_failures_total"),
                           ("migration_bytes", "migration_bytes_total")):  # fmt: skip
            for label, count in data[kind].items():
                self._of(name, engine, label).inc(count)
        for state, count in data["pool"].items():
            self._of("pool_slots", engine, state).set(count)
        for result, reason, count in data["migrations"]:
            self._of("migrations_total", engine, result, reason).inc(count)
        for path, phase, seconds in data["migration_seconds"]:
            self._of("migration_seconds", engine, path, phase).observe(seconds)
        for kind in ("evictions", "ignored_params", "faults"):
            if data[kind]:
                name = "ignored_request_params_total" if kind == "ignored_params" else f"{kind}_total"
                self._of(name, engine).inc(data[kind])
        if data["info"]:
            self._of("info", engine, *(data["info"][label] for label in _INFO)).set(1)
