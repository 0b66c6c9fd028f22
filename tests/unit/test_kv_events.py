# SPDX-License-Identifier: Apache-2.0
"""KV cache events out of changes of the index: how they are cut, and what they say when little is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from tests.support.fake_engine import FakeEngine
from tests.support.fake_setup import Setup, make_kv_cache_config
from vllm_pega_connector import kv_events
from vllm_pega_connector._native import SlotIndex
from vllm_pega_connector.kv_events import KvEvents

SIZE = 4


@pytest.fixture(autouse=True)
def whole_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def joined(*keys: int) -> bytes:
    return b"".join(key(k) for k in keys)


def request(*keys: int, lora: str = "") -> Any:
    return SimpleNamespace(
        block_hashes=[key(k) for k in keys],
        all_token_ids=[10 * k + i for k in keys for i in range(SIZE)],
        lora_request=SimpleNamespace(adapter_id=7, name=lora) if lora else None,
    )


def tokens(*keys: int) -> list[int]:
    return [10 * k + i for k in keys for i in range(SIZE)]


def made(slots: int = 8) -> tuple[KvEvents, SlotIndex]:
    events = KvEvents(make_kv_cache_config(Setup()), SIZE, 32)
    index = SlotIndex([slots], [0])
    events.watch(index)
    return events, index


def store(index: SlotIndex, *keys: int) -> None:
    index.publish(0, index.reserve(0, joined(*keys)))


def stored(event: Any) -> tuple[list[bytes], bytes | None, list[int], int, str | None]:
    assert isinstance(event, BlockStored)
    assert event.medium == "CPU"
    return event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event.lora_name


def test_one_event_for_each_stretch_of_a_prompt() -> None:
    events, index = made()
    events.note(request(1, 2, 3), 0, 0, joined(1, 2, 3))
    events.note(request(1, 2, 4, 5, 6), 0, 1, joined(5, 6))
    store(index, 1, 2, 3, 5, 6)
    first, second = events.take()
    assert stored(first) == ([key(1), key(2), key(3)], None, tokens(1, 2, 3), SIZE, None)
    assert stored(second) == ([key(5), key(6)], key(4), tokens(5, 6), SIZE, None)
    assert first.kv_cache_spec_kind == "full_attention" and first.group_idx == 0
    assert events.take() == []


def test_adapters_are_told_apart() -> None:
    events, index = made()
    events.note(request(1), 0, 0, key(1))
    events.note(request(1, 2, lora="french"), 0, 1, key(2))
    store(index, 1, 2)
    assert [stored(e)[4] for e in events.take()] == [None, "french"]


def test_what_no_request_offered_is_announced_by_its_hash() -> None:
    events, index = made()
    events.note(request(1), 0, 0, key(1))
    store(index, 8, 9, 1)
    pulled, saved = events.take()
    assert stored(pulled) == ([key(8), key(9)], None, [], 0, None)
    assert stored(saved)[2] == tokens(1)


def test_evictions_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    events, index = made(slots=2)
    store(index, 1, 2)
    store(index, 3)
    _, removed, _ = events.take()
    assert isinstance(removed, BlockRemoved) and (removed.block_hashes, removed.medium) == ([key(2)], "CPU")
    index.reset()
    assert events.take() == [AllBlocksCleared()]
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    store(index, 5)
    assert stored(events.take()[0])[0] == [5]
    events.watch(SlotIndex([2], [0]))  # the workers' pools were made anew
    assert events.take() == [AllBlocksCleared()]


def test_notes_of_saves_that_were_dropped_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_NOTES", 3)
    events, index = made()
    events.note(request(1, 2, 3, 4), 0, 0, joined(1, 2, 3, 4))
    store(index, 1, 2, 3, 4)
    forgotten, known = events.take()
    assert stored(forgotten) == ([key(1)], None, [], 0, None)
    assert stored(known) == ([key(2), key(3), key(4)], key(1), tokens(2, 3, 4), SIZE, None)


def test_nothing_is_kept_unless_vllm_wants_events() -> None:
    engine = FakeEngine(Setup())
    engine.add([5] * 64, 1)
    engine.run()
    assert engine.pega.counts()["ready"] > 0
    assert engine.connector.take_events() == []
    assert engine.pega._shared.index.take_changes() == []
