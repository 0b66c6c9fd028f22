# SPDX-License-Identifier: Apache-2.0
"""The synthetic traces: as their seed says, and near the figures of the published traces that they stand for."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.mooncake_trace import BLOCK, PROFILES, generate, hit_rate, scaled


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("seed", range(4))
def test_a_trace_is_near_its_published_figures(name: str, seed: int) -> None:
    profile = PROFILES[name]
    entries = generate(profile, 1000, seed)
    assert hit_rate(entries) == pytest.approx(profile.hit_rate, abs=0.05)
    assert statistics.fmean(e["input_length"] for e in entries) == pytest.approx(profile.mean_input, rel=0.2)
    assert statistics.fmean(e["output_length"] for e in entries) == pytest.approx(profile.mean_output, rel=0.15)
    seconds = entries[-1]["timestamp"] / 1e3
    assert len(entries) / seconds == pytest.approx(profile.requests_per_s, rel=0.15)


def test_every_line_is_well_formed_and_an_id_stands_for_one_prefix() -> None:
    entries = generate(PROFILES["conversation"], 500, 1)
    before: dict[int, tuple[int, ...]] = {}
    for entry, later in itertools.pairwise(entries):
        assert entry["timestamp"] <= later["timestamp"]
    for entry in entries:
        ids = entry["hash_ids"]
        assert len(ids) == -(-entry["input_length"] // BLOCK)
        assert entry["output_length"] >= 1
        for i, block in enumerate(ids):
            assert before.setdefault(block, tuple(ids[:i])) == tuple(ids[:i])
    assert hit_rate(entries) > 0


def test_a_seed_gives_the_same_trace_and_another_seed_another() -> None:
    profile = PROFILES["synthetic"]
    assert generate(profile, 50, 3) == generate(profile, 50, 3) != generate(profile, 50, 4)


def test_hit_rate_of_a_known_trace() -> None:
    assert hit_rate([{"hash_ids": [1, 2, 3]}, {"hash_ids": [1, 2, 4]}, {"hash_ids": [1, 2]}]) == pytest.approx(0.5)


def test_scaling_keeps_the_tree_and_leaves_out_what_is_too_long() -> None:
    entries = generate(PROFILES["conversation"], 300, 0)
    small = scaled(entries, 32, 2.0, 1900)
    assert 0 < len(small) < len(entries)
    assert max(e["input_length"] for e in small) <= 1900
    assert all(len(e["hash_ids"]) == -(-e["input_length"] // 32) for e in small)
    assert small[-1]["timestamp"] > entries[-1]["timestamp"] * 1.5
    assert hit_rate(small) > 0.1
