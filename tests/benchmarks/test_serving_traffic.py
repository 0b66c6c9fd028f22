# SPDX-License-Identifier: Apache-2.0
"""How the traffic benchmark sees a connector from outside: its time, its hits, its transfers."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # its scripts import one another by name

from serving_traffic import SETUPS, kv_transfer
from serving_traffic_engine import Watch, transfers

from vllm_pega_connector.config import PegaConfig


class Connector:
    """Two methods that take 2 ms each, one of which calls the other."""

    def __init__(self, metadata: Any = None) -> None:
        self.metadata = metadata

    def get_finished(self) -> None:
        time.sleep(0.002)

    def build_connector_meta(self, output: Any) -> Any:
        self.get_finished()
        time.sleep(0.002)
        return self.metadata

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return


def watched(metadata: Any = None) -> tuple[Watch, Connector]:
    watch, connector = Watch(), Connector(metadata)
    watch.wrap(connector)
    return watch, connector


def test_time_is_counted_once_and_by_the_step_in_which_it_was_spent() -> None:
    watch, connector = watched()
    connector.build_connector_meta(None)
    watch.end_step()
    connector.get_finished()
    first, second = watch.steps
    assert set(first) == {"build_connector_meta"} and 0.004 <= first["build_connector_meta"] < 0.1
    assert set(second) == {"get_finished"} and 0.002 <= second["get_finished"] < 0.1


def test_what_other_threads_do_is_not_the_engine_threads_time() -> None:
    watch, connector = watched()
    thread = threading.Thread(target=connector.get_finished)
    thread.start()
    thread.join()
    assert not watch.steps[0]
    connector.get_finished()
    assert watch.steps[0]


def test_hit_tokens_are_counted_however_they_are_passed() -> None:
    watch, connector = watched()
    connector.update_state_after_alloc("r", None, 32)
    connector.update_state_after_alloc("r", None, num_external_tokens=16)
    assert watch.external_tokens == 48
    watch.clear()
    assert watch.external_tokens == 0


@pytest.mark.parametrize(
    ("metadata", "active"),
    [
        (SimpleNamespace(jobs=[]), set()),
        (SimpleNamespace(jobs=[1]), {0}),
        (SimpleNamespace(load_jobs={1: 2}, store_jobs={}), {0}),
        (SimpleNamespace(load_jobs={}, store_jobs={1: 2}), {1}),
    ],
)
def test_steps_that_hand_transfers_over_are_marked(metadata: Any, active: set[int]) -> None:
    watch, connector = watched(metadata)
    connector.build_connector_meta(None)
    assert watch.active == active


def test_transfers_of_our_statistics_and_of_offloadings() -> None:
    metrics = pytest.importorskip("vllm_pega_connector.metrics")
    ours = metrics.PegaStats.empty()
    for status in ("done", "failed"):
        result = SimpleNamespace(direction="load", backend="staged", status=status, bytes=4096, ranges=1, queue_s=9.0)
        result.transfer_s = 0.5
        ours.add_transfer(result)
    assert transfers(ours.data) == [("load", 4096, 0.5)]
    theirs = {"data": {"vllm:kv_offload_store_bytes": {(): 8192}, "vllm:kv_offload_store_time": {(): 0.25}}}
    assert transfers(theirs) == [("save", 8192, 0.25)]
    assert transfers({}) == []


def test_every_setup_is_a_configuration_that_we_accept_with_the_same_host_memory() -> None:
    ours = 0
    for setup in SETUPS.values():
        transfer = kv_transfer(setup, 2**31)
        if setup.connector == "PegaConnector":
            assert transfer is not None
            assert PegaConfig.from_extra_config(transfer["kv_connector_extra_config"], {}).host_pool_gib == 2
            ours += 1
        elif setup.connector is not None:
            assert transfer is not None and transfer["kv_connector_extra_config"]["cpu_bytes_to_use"] == 2**31
        else:
            assert transfer is None
    assert ours >= 4
