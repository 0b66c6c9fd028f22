# SPDX-License-Identifier: Apache-2.0
"""Two agents, two pools, Mooncake between them: what arrives is what was stored, and nothing else is believed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mooncake.engine")

from tests.migration.support import FINGERPRINT, Instance, content, key, keys, u32
from vllm_pega_connector.migration.data import BATCH_BYTES, BATCH_DESCRIPTORS, BATCHES_IN_FLIGHT, batches


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Instance, Instance]]:
    with Instance() as source, Instance() as target:
        yield source, target


@pytest.fixture(autouse=True)
def forget(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        for instance in request.getfixturevalue("pair"):
            instance.tables[0].end_empty(u32(range(64)))


def test_blocks_arrive_whole_and_in_their_slots(pair: tuple[Instance, Instance]) -> None:
    source, target = pair
    source.store(range(20), [*range(10, 20), *range(40, 30, -1)])
    slots = [*range(5, 15), *range(30, 40)]
    end = target.pull(source.address, range(20), slots)
    assert end.reason == "" and end.source == source.address
    assert end.published == b"\1" * 20 and end.unsafe == bytes(20)
    assert end.nbytes == 20 * source.slot_bytes and set(end.seconds) == {"post", "lookup", "queue", "read", "validate"}
    assert all(target.holds(n, slot) for n, slot in enumerate(slots))


def test_only_the_leading_run_that_the_source_has(pair: tuple[Instance, Instance]) -> None:
    source, target = pair
    source.store([0, 1, 3], [7, 8, 9])
    end = target.pull(source.address, range(4), range(4))
    assert end.published == b"\1\1\0\0" and end.reason.startswith("partly:")
    assert target.holds(0, 0) and target.holds(1, 1) and target.says_nothing(2)


def test_nothing_there(pair: tuple[Instance, Instance]) -> None:
    source, target = pair
    end = target.pull(source.address, range(100, 104), range(4))
    assert end.reason.startswith("not_found:") and not any(end.published) and not any(end.unsafe)


def test_the_source_that_has_most_is_taken(pair: tuple[Instance, Instance]) -> None:
    source, target = pair
    source.store(range(3), range(3))
    with Instance() as other:
        other.store(range(5), range(5))
        end = target.pull([source.address, other.address, "127.0.0.1:9"], range(5), range(10, 15))
    assert end.source == other.address and end.published == b"\1" * 5


def test_both_ways_at_once(pair: tuple[Instance, Instance]) -> None:
    a, b = pair
    a.store(range(10), range(10))
    b.store(range(20, 30), range(10))
    first, second = b.post(a.address, range(10), range(30, 40)), a.post(b.address, range(20, 30), range(30, 40))
    assert b.ended(first).published == a.ended(second).published == b"\1" * 10
    assert all(b.holds(n, 30 + n) and a.holds(20 + n, 30 + n) for n in range(10))


def test_every_rank_reads_from_its_own(request: pytest.FixtureRequest) -> None:
    with Instance(ranks=2) as source, Instance(ranks=2) as target:
        source.store(range(6), range(6))
        # A key that one rank does not hold is not there.
        source.tables[1].end_empty(u32([4]))
        end = target.pull(source.address, range(6), range(20, 26))
        assert end.published == b"\1\1\1\1\0\0"
        assert all(target.holds(n, 20 + n) for n in range(4))
        assert content(0, 0) != content(0, 1)


def test_checksums(pair: tuple[Instance, Instance]) -> None:
    source, _ = pair
    source.store(range(8), range(8))
    with Instance(verify=True) as target:
        end = target.pull(source.address, range(8), range(8))
        assert end.published == b"\1" * 8 and all(target.holds(n, n) for n in range(8))


def test_batches_keep_order_and_both_bounds() -> None:
    small = np.full(2 * BATCH_DESCRIPTORS + 1, 4096)
    n = BATCH_DESCRIPTORS
    assert list(batches(small)) == [(0, n), (n, 2 * n), (2 * n, 2 * n + 1)]
    large = np.array([BATCH_BYTES + 1, BATCH_BYTES // 2, BATCH_BYTES // 2, 1])
    assert list(batches(large)) == [(0, 1), (1, 3), (3, 4)]
    assert list(batches(np.array([], np.int64))) == []
    assert BATCH_DESCRIPTORS * BATCHES_IN_FLIGHT <= 1024  # what Mooncake takes of a peer


def test_blocks_larger_than_a_descriptor() -> None:
    with (
        Instance(slots=8, slot_bytes=(5 << 20) + 4096) as source,
        Instance(slots=8, slot_bytes=(5 << 20) + 4096) as target,
    ):
        source.store(range(3), [2, 4, 6])
        end = target.pull(source.address, range(3), [7, 1, 0])
        assert end.published == b"\1" * 3
        assert all(target.holds(n, slot) for n, slot in enumerate([7, 1, 0]))
        end = target.pull(source.address, range(3), [2, 3, 4])
        assert end.published == b"\1" * 3 and end.gap_s == 0.0  # one batch


def test_more_blocks_than_mooncake_takes_at_once() -> None:
    size = 4096
    with Instance(slots=6000, slot_bytes=size) as source, Instance(slots=6000, slot_bytes=size) as target:
        order = np.random.default_rng(0).permutation(6000).tolist()
        source.store(range(3000), order[:3000])
        end = target.pull(source.address, range(3000), order[3000:], timeout_s=20)
        assert end.published == b"\1" * 3000, end.reason
        assert all(target.holds(n, order[3000 + n]) for n in range(3000))
        assert 0 < end.gap_s < end.seconds["read"]


def test_ipv6() -> None:
    with Instance(host="::1") as source, Instance(host="::1") as target:
        source.store(range(4), range(4))
        assert source.address.startswith("[::1]:")
        end = target.pull(source.address, range(4), range(4))
        assert end.published == b"\1" * 4, end.reason
        assert target.holds(3, 3)


def test_same_token_and_an_encrypted_control_port() -> None:
    with Instance(token=b"a long secret") as source, Instance(token=b"a long secret") as target:
        source.store(range(4), range(4))
        assert target.pull(source.address, range(4), range(4)).published == b"\1" * 4


@pytest.mark.parametrize("token", [None, b"another"])
def test_without_the_token_nothing(token: bytes | None) -> None:
    with Instance(token=b"a long secret") as source, Instance(token=token) as target:
        source.store(range(4), range(4))
        end = target.pull(source.address, range(4), range(4))
        assert end.reason.startswith("no_answer:") and not any(end.published)


def test_a_token_is_not_answered_by_a_source_without_one() -> None:
    with Instance() as source, Instance(token=b"a long secret") as target:
        source.store(range(4), range(4))
        end = target.pull(source.address, range(4), range(4))
        assert end.reason.startswith("no_answer:") and "token" in end.reason


@pytest.mark.parametrize("field", list(FINGERPRINT))
def test_a_difference_is_refused_by_name(pair: tuple[Instance, Instance], field: str) -> None:
    source, _ = pair
    source.store(range(4), range(4))
    with Instance(fingerprint={**FINGERPRINT, field: "other"}) as target:
        end = target.pull(source.address, range(4), range(4))
        assert end.reason.startswith(f"refused_{field}:") and f"{field} is" in end.reason
        assert not any(end.published)


def test_what_was_forgotten_is_not_given_away(pair: tuple[Instance, Instance]) -> None:
    source, target = pair
    table = source.tables[0]
    source.store(range(3), range(3))
    table.begin(u32([3]))
    table.distrust(u32([4]))
    table.forget_all()
    table.distrust(u32([4]))
    table.end(u32([3]), key(3), source.slot_bytes)  # it was being written when all was forgotten
    source.store([4], [4])
    for n in range(5):
        assert target.pull(source.address, [n], [n]).reason.startswith("not_found:")
    table.forget(u32([4]))
    source.store([4, 5], [4, 5])
    assert target.pull(source.address, [4, 5], [4, 5]).published == b"\1\1"


def test_leases_keep_slots_from_eviction(pair: tuple[Instance, Instance]) -> None:
    from vllm_pega_connector._native import SlotIndex

    source, _ = pair
    index = SlotIndex([4], [0])
    index.honour_leases(0, source.pools[0])
    slots = index.reserve(0, keys(range(4)))
    index.publish(0, slots)
    source.tables[0].lease(slots[:8], 30.0)
    got = np.frombuffer(index.reserve(0, keys(range(10, 14))), np.uint32)
    assert (got != 0xFFFFFFFF).sum() == 2
    assert index.contains(0, keys(range(4))) == b"\2\2\0\0"
    source.tables[0].lease(slots[:8], 0)
    assert (np.frombuffer(index.reserve(0, keys(range(20, 22))), np.uint32) != 0xFFFFFFFF).all()
