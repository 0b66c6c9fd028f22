# SPDX-License-Identifier: Apache-2.0
"""The arithmetic behind the serving benchmarks' tables."""

from __future__ import annotations

import math

import pytest

from benchmarks.serving_report import excess, markdown, percentiles, rate, thread_times


def test_percentiles_of_known_values() -> None:
    found = percentiles(list(range(1, 1002)))
    assert (found["p50"], found["p99"], found["max"], found["samples"]) == (501, 991, 1001, 1001)
    assert found["p99.9"] == pytest.approx(1000)
    assert percentiles([]) == {}


def test_excess_counts_only_what_lies_above_the_threshold_and_only_what_exceeds_the_median() -> None:
    gaps = [5.0] * 97 + [9.0, 25.0, 35.0]
    assert excess(gaps, 10) == pytest.approx(20 + 30)
    assert excess(gaps, 40) == 0
    assert excess([], 10) == 0
    assert excess([20.0, 30.0, 40.0], 10) == pytest.approx(10)  # a gap below the median gives nothing back


def test_rate_is_bytes_over_transfer_seconds_of_one_direction() -> None:
    moved = [("load", 2**30, 0.05), ("save", 2**30, 10.0), ("load", 2**30, 0.15)]
    assert rate(moved, "load") == pytest.approx(10)
    assert rate(moved, "save") == pytest.approx(0.1)
    assert rate([("save", 1, 1.0)], "load") is None


def test_thread_times_are_sums_per_step_and_p50_is_of_the_active_ones() -> None:
    steps = [{"a": 1e-6}] * 98 + [{"a": 100e-6, "b": 50e-6}, {"a": 300e-6}]
    found = thread_times(steps, [False] * 98 + [True, True])
    assert found["all methods"]["max"] == pytest.approx(300)
    assert found["all methods"]["p50 active"] == pytest.approx((150 + 300) / 2)
    assert found["all methods"]["p50"] == pytest.approx(1)
    assert found["b"]["p50 active"] == pytest.approx(25)
    assert found["b"]["p50"] == 0
    assert thread_times([{}], [False]) == {}


def test_a_void_phase_says_so_in_the_table_and_a_failed_connector_below_it() -> None:
    values = percentiles([5.0, 6.0])
    phase = {"itl": values, "alone": values, "alone_p99_each": [6.0, 7.0], "excess_ms": 0.0, "excess_ms_each": [0.0],
             "side_ms": values, "hit_rate": 0.0, "void": "no token came from the connector"}  # fmt: skip
    document = {"vllm": "0", "device": "cpu", "options": {"model": "m"},
                "connectors": {"ours": {"load1": phase}, "theirs": {"error": "ended with code 1"}}}  # fmt: skip
    text = markdown(document)
    assert "VOID: no token came from the connector" in text
    assert "theirs: ended with code 1" in text
    assert not math.isnan(values["p99"])
    phase["void"] = ""
    assert "VOID" not in markdown(document)
