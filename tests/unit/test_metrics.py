# SPDX-License-Identifier: Apache-2.0
"""Statistics on their way: added up over ranks, made one line, shown under tame labels; never an exception."""

from __future__ import annotations

import json
from collections import Counter as Counts
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_pega_connector import guard
from vllm_pega_connector.decisions import MAX_KINDS, DecisionLog, startup_block
from vllm_pega_connector.metrics import PegaStats
from vllm_pega_connector.migration.hook import MigrationStats
from vllm_pega_connector.prometheus import MAX_LABEL_CHARS, MAX_LABEL_SETS, METRICS, PegaPromMetrics


def result(direction: str = "save", backend: str = "memcpy", **changes: Any) -> Any:
    given = {"status": "done", "bytes": 1 << 20, "ranges": 16, "queue_s": 0.001, "transfer_s": 0.01, "reason": "why"}
    return SimpleNamespace(direction=direction, backend=backend, **{**given, **changes})


def stats(**data: Any) -> PegaStats:
    made = PegaStats.empty()
    made.data.update(data)
    return made


class Page:
    """The metrics of two engines in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def kind(cls: Any) -> Any:
            return lambda *args, **options: cls(*args, registry=self.registry, **options)

        types = {cls: kind(cls) for cls in (Counter, Gauge, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = PegaPromMetrics(config, types, ["model_name", "engine"], {0: ['m"\n', "0"], 1: ['m"\n', "1"]})

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        text = generate_latest(self.registry).decode()
        found = [s for family in text_string_to_metric_families(text) for s in family.samples]
        return [(s.labels, s.value) for s in found if s.name == "vllm:pega_" + name]

    def value(self, name: str, **labels: str) -> float:
        (value,) = [v for have, v in self.samples(name) if labels.items() <= have.items()]
        return value


@pytest.fixture
def page() -> Page:
    return Page()


@pytest.fixture(autouse=True)
def _no_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "faults", 0)


def test_ranks_add_up() -> None:
    ranks = [PegaStats.empty(), PegaStats.empty()]
    for rank in ranks:
        rank.add_transfer(result())
        rank.data["info"] = {"profile": "host"}
    scheduler = stats(blocks={"save": 4}, drops={"pool_full": 2}, pool={"free": 3, "total": 8}, evictions=1, faults=1)
    total = ranks[0].aggregate(ranks[1]).aggregate(scheduler).aggregate(stats(drops={"pool_full": 1}))
    assert len(total.data["transfers"]) == 2  # each rank moved its own bytes
    assert (total.data["blocks"], total.data["drops"]) == ({"save": 4}, {"pool_full": 3})
    assert total.data["pool"] == {"free": 3, "total": 8} and total.data["info"] == {"profile": "host"}
    crossed = PegaStats(data=json.loads(json.dumps(total.data)))  # plain data: it crosses processes
    assert crossed.reduce() == total.reduce()


def test_nothing_is_empty() -> None:
    assert PegaStats.empty().is_empty() and PegaStats.empty().reduce() == {}
    assert not stats(faults=1).is_empty()


def test_the_line_says_who_carried_what_and_what_went_wrong() -> None:
    made = stats(blocks={"save": 16}, drops={"pool_full": 3}, failures={"timeout": 1}, pool={"free": 2, "total": 8},
                 ignored_params=2, evictions=5)  # fmt: skip
    for changes in ({"backend": "memcpy"}, {"backend": "staged"}, {"backend": "staged", "status": "failed"}):
        made.add_transfer(result(**{"bytes": 2**29, "transfer_s": 0.25, **changes}))
    pulls = MigrationStats(nbytes=Counts(network=2**30))
    pulls.ended["failed", "refused"] += 2
    made.add_migrations(pulls)
    line = made.reduce()
    assert (line["saves by memcpy"], line["saves by staged"], line["save blocks"]) == (1, 1, 16)
    assert (line["save GiB"], line["save GiB/s"], line["save longest ms"]) == (1.0, 2.0, 251.0)
    assert (line["pool used %"], line["blocks not saved (pool_full)"], line["loads failed (timeout)"]) == (75.0, 3, 1)
    assert (line["pulls failed (refused)"], line["migrated GiB (network)"]) == (2, 1.0)
    assert (line["request parameters ignored"], line["evictions"]) == (2, 5)
    assert "loads by memcpy" not in line


def test_each_engine_counts_by_itself(page: Page) -> None:
    made = stats(blocks={"load": 7}, pool={"free": 5})
    made.add_transfer(result("load", "staged"))
    made.add_transfer(result("load", "staged", status="timeout"))
    page.metrics.observe(made.data, 1)
    labels = {"direction": "load", "backend": "staged"}
    assert page.value("transfers_total", engine="1", **labels) == 1
    assert page.value("transfer_bytes_total", engine="1", **labels) == 1 << 20
    assert page.value("transfer_ranges_total", engine="1", **labels) == 16
    assert page.value("transfer_seconds_count", engine="1", **labels) == 1
    assert page.value("transfer_blocks_total", engine="1", direction="load") == 7
    assert page.value("transfers_total", engine="0", **labels) == 0  # there from the start, for rates
    assert page.samples("pool_slots") == [({"model_name": 'm"\n', "engine": "1", "state": "free"}, 5)]


def test_every_metric_is_shown_once_there_is_something(page: Page) -> None:
    made = stats(blocks={"load": 1}, drops={"pool_full": 1}, failures={"timeout": 1}, pool={"free": 1}, evictions=1,
                 ignored_params=1, faults=1, migrations=[["done", "", 1]], migration_seconds=[["network", "read", 0.1]],
                 migration_bytes={"network": 1}, info=dict.fromkeys(METRICS[-1].labels, "x"))  # fmt: skip
    made.add_transfer(result())
    page.metrics.observe(made.data, 0)
    assert guard.faults == 0
    for metric in METRICS:
        name = metric.name + ("_count" if metric.kind == "histogram" else "")
        shown = [labels for labels, value in page.samples(name) if value]
        assert len(shown) == 1, metric
        assert set(shown[0]) == {"model_name", "engine", *metric.labels}


def test_labels_are_bounded_in_length_and_number(page: Page) -> None:
    reasons = [f'"\\\n{n}' for n in range(3 * MAX_LABEL_SETS)] + ["x" * 10000]
    for reason in reasons:
        page.metrics.observe(stats(drops={reason: 1}).data, 0)
    found = page.samples("saves_dropped_total")
    told = [(labels["reason"], value) for labels, value in found if value]
    assert len(told) == MAX_LABEL_SETS + 1 and sum(value for _, value in told) == len(reasons)
    assert ("other", 2 * MAX_LABEL_SETS + 1) in told and ('"\\\n0', 1) in told
    page.metrics.observe(stats(failures={"y" * 10000: 1}).data, 0)
    assert page.value("load_failures_total", reason="y" * MAX_LABEL_CHARS) == 1


@pytest.mark.parametrize("data", [{}, {"transfers": [["load"]]}, {**PegaStats.empty().data, "pool": {"free": "many"}}])
def test_garbage_is_a_counted_fault_and_no_exception(page: Page, data: dict[str, Any]) -> None:
    page.metrics.observe(data, 0)
    page.metrics.observe(PegaStats.empty().data, 7)  # an engine that vLLM did not announce
    assert guard.faults == 2
    good = stats(evictions=3)
    page.metrics.observe(good.data, 0)
    assert page.value("evictions_total", engine="0") == 3
    assert PegaStats.empty().aggregate(PegaStats(data={"transfers": 1})).is_empty()
    assert guard.faults == 3


def test_faults_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    guard.take_faults()
    monkeypatch.setattr(guard, "faults", guard.faults + 2)
    assert (guard.take_faults(), guard.take_faults()) == (2, 0)


# --- decisions ---


def test_the_block_at_start_says_what_auto_will_do() -> None:
    from vllm_pega_connector import _native
    from vllm_pega_connector.config import PegaConfig
    from vllm_pega_connector.profile import load_profile

    profile = _native.DeviceProfile(load_profile("h200"))
    config = PegaConfig.from_extra_config(
        {"save_policy": {"backend": "chunked", "chunk_descriptors": 64}, "objective": "tail"}, env={}
    )
    text = startup_block("GPU", "16 GiB", 4000, 36 * 65536, 36, profile, config)
    lines = text.splitlines()
    assert "36 fragments of 64 KiB per block" in text and "profile  h200, objective tail" in text
    assert "vLLM's own cache has 4,000 blocks" in text and "chunked, chunk_descriptors 64" in text
    assert len(lines) == 4 + 2 * 4
    assert "36864 ranges of 64 KiB" in lines[7] and "36864 ranges of 64 KiB: chunked as configured" in lines[11]
    assert "one range per block" in startup_block("GPU", "", 1, 1 << 20, 1, profile, config)


def test_each_kind_of_decision_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    import logging

    from vllm_pega_connector import decisions

    monkeypatch.setattr(decisions, "logger", logging.getLogger("decisions-under-test"))
    caplog.set_level("INFO", "decisions-under-test")
    log = DecisionLog(True)
    for ranges in (16, 17, 31, 32):
        log.note(result("load", "staged", ranges=ranges, bytes=ranges * 4096, reason=f"{ranges} ranges"))
    log.note(result(backend="", ranges=0))  # it ended before it was planned
    assert [r.getMessage() for r in caplog.records] == [
        "PegaConnector decision: load of 16 ranges", "PegaConnector decision: load of 32 ranges",
    ]  # fmt: skip
    DecisionLog(False).note(result("load", "kernel"))
    for n in range(2 * MAX_KINDS):
        log.note(result("load", f"b{n}"))
    assert len(caplog.records) == MAX_KINDS


# --- warnings at the start ---


@pytest.mark.parametrize(
    ("role", "settings", "warned"),
    [
        ("kv_consumer", (), True),
        ("kv_consumer", (("migration", {"listen": "127.0.0.1:0"}),), False),
        ("kv_both", (), False),
        ("kv_producer", (), False),
    ],
)
def test_a_consumer_whose_pool_nothing_fills(role, settings, warned, monkeypatch, caplog) -> None:
    import logging

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from tests.support.fake_setup import Setup, make_kv_cache_config, make_vllm_config
    from vllm_pega_connector import connector

    monkeypatch.setattr(connector, "logger", logging.getLogger("connector-under-test"))
    setup = Setup(role=role, settings=settings)
    connector.PegaConnector(make_vllm_config(setup), KVConnectorRole.SCHEDULER, make_kv_cache_config(setup))
    said = [r.getMessage() for r in caplog.records if "nothing will ever fill the host pool" in r.getMessage()]
    assert bool(said) == warned
    if warned:
        assert 'set kv_role to "kv_both", or configure migration' in said[0]
