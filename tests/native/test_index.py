# SPDX-License-Identifier: Apache-2.0
"""The slot index against a plain-Python model, and what it promises about neighbours, age and errors."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_pega_connector import _native as native

NO_SLOT = 0xFFFFFFFF
SLOTS = (9, 70)  # the second one needs more than one word of its bitmap
GROUP_CLASSES = (0, 0, 1)


def key(i: int) -> bytes:
    """The first bytes say nothing: an index that hashed them alone would still have to be right."""
    return b"\0" * 28 + i.to_bytes(4, "little")


def joined(ids) -> bytes:
    return b"".join(key(i) for i in ids)


def ids(raw: bytes) -> list[int]:
    return np.frombuffer(raw, dtype=np.uint32).tolist()


def raw(slots) -> bytes:
    return np.array(slots, dtype=np.uint32).tobytes()


class Model(RuleBasedStateMachine):
    """`where`: (group, key) -> slot; `state`: (class, slot) -> [state, pins]; `age`: unpinned and ready, oldest first.

    `owner` is the reverse of `where`, but also keeps what is forgotten while somebody holds it.
    """

    def __init__(self):
        super().__init__()
        self.index = native.SlotIndex(SLOTS, GROUP_CLASSES)
        self.where: dict[tuple[int, int], int] = {}
        self.owner: dict[tuple[int, int], tuple[int, int]] = {}
        self.state: dict[tuple[int, int], list] = {}
        self.age: dict[int, list[int]] = {c: [] for c in range(len(SLOTS))}
        self.evictions = 0
        self.index.record_changes(1 << 16)
        self.told: set[tuple[int, int]] = set()  # what somebody believes who knows the changes alone

    groups = st.integers(0, len(GROUP_CLASSES) - 1)
    keys = st.lists(st.integers(0, 25), max_size=8)

    def ready(self, group, k) -> bool:
        slot = self.where.get((group, k))
        return slot is not None and self.state[GROUP_CLASSES[group], slot][0] == "ready"

    def free(self, c) -> set[int]:
        return {s for s in range(SLOTS[c]) if (c, s) not in self.state}

    def slots_in(self, group, *states) -> list[int]:
        c = GROUP_CLASSES[group]
        return [s for (d, s), v in self.state.items() if d == c and v[0] in states and self.owner[d, s][0] == group]

    def forget(self, c, slot):
        """Out of the map; free at once unless pinned or being written."""
        self.where.pop(self.owner[c, slot], None)
        state = self.state[c, slot]
        if state[0] == "ready" and state[1] == 0:
            self.age[c].remove(slot)
            del self.state[c, slot], self.owner[c, slot]
        else:
            state[0] = "forgotten " + state[0]

    def pin_model(self, group, ks):
        c = GROUP_CLASSES[group]
        for k in ks:
            slot = self.where[group, k]
            self.state[c, slot][1] += 1
            if self.state[c, slot][1] == 1:
                self.age[c].remove(slot)

    @rule(group=groups, ks=keys, start=st.integers(0, 8))
    def match_and_pin(self, group, ks, start):
        start = min(start, len(ks))
        run = []
        for k in ks[start:]:
            if not self.ready(group, k):
                break
            run.append(k)
        assert self.index.match(group, joined(ks), start) == len(run)
        assert ids(self.index.match_and_pin(group, joined(ks), start)) == [self.where[group, k] for k in run]
        self.pin_model(group, run)

    @rule(group=groups, ks=keys)
    def pin(self, group, ks):
        if all(self.ready(group, k) for k in ks):
            assert ids(self.index.pin(group, joined(ks))) == [self.where[group, k] for k in ks]
            self.pin_model(group, ks)
        else:
            with pytest.raises(ValueError, match="not ready"):
                self.index.pin(group, joined(ks))

    @rule(group=groups, data=st.data())
    def unpin(self, group, data):
        c = GROUP_CLASSES[group]
        pins = [s for s in self.slots_in(group, "ready", "forgotten ready") for _ in range(self.state[c, s][1])]
        if not pins:
            return
        chosen = [pins[i] for i in data.draw(st.lists(st.sampled_from(range(len(pins))), unique=True))]
        self.index.unpin(group, raw(chosen))
        for slot in reversed(chosen):
            self.state[c, slot][1] -= 1
        for slot in dict.fromkeys(reversed(chosen)):
            if self.state[c, slot][1] != 0:
                continue
            if self.state[c, slot][0] == "ready":
                self.age[c].append(slot)
            else:
                del self.state[c, slot], self.owner[c, slot]

    @rule(group=groups, data=st.data())
    def unpin_too_much(self, group, data):
        c = GROUP_CLASSES[group]
        held = self.slots_in(group, "ready", "forgotten ready")
        if held:
            slot = data.draw(st.sampled_from(held))
            with pytest.raises(ValueError, match="not pinned"):
                self.index.unpin(group, raw([slot] * (self.state[c, slot][1] + 1)))

    @rule(group=groups, ks=keys, near=st.integers(-1, min(SLOTS) - 1))
    def reserve(self, group, ks, near):
        c = GROUP_CLASSES[group]
        absent = [k for k in ks if (group, k) not in self.where]
        present = {self.where[group, k] for k in ks if (group, k) in self.where}
        free = self.free(c)
        victims = [s for s in self.age[c] if s not in present][: max(0, len(absent) - len(free))]
        for slot in victims:
            self.forget(c, slot)
        self.evictions += len(victims)
        room = free | set(victims)
        got = ids(self.index.reserve(group, joined(ks), near))
        taken = [s for s in got if s != NO_SLOT]
        assert len(set(taken)) == len(taken) and set(taken) <= room
        assert len(taken) == min(len(set(absent)), len(room))
        for k, slot in zip(ks, got, strict=True):
            if slot != NO_SLOT:
                assert (group, k) not in self.where
                self.where[group, k] = slot
                self.owner[c, slot] = (group, k)
                self.state[c, slot] = ["reserved", 0]

    @rule(group=groups, data=st.data())
    def publish(self, group, data):
        c = GROUP_CLASSES[group]
        pool = self.slots_in(group, "reserved", "forgotten reserved")
        chosen = data.draw(st.lists(st.sampled_from(pool), unique=True)) if pool else []
        before = self.index.version
        self.index.publish(group, raw(chosen))
        assert (self.index.version != before) == bool(chosen)
        for slot in reversed(chosen):
            if self.state[c, slot][0] == "reserved":
                self.state[c, slot][0] = "ready"
                self.age[c].append(slot)
            else:
                del self.state[c, slot], self.owner[c, slot]

    @rule(group=groups, data=st.data())
    def abandon(self, group, data):
        c = GROUP_CLASSES[group]
        pool = self.slots_in(group, "reserved", "forgotten reserved", "ready")
        chosen = data.draw(st.lists(st.sampled_from(pool), unique=True, max_size=3)) if pool else []
        self.index.abandon(group, raw(chosen))
        for slot in chosen:
            if self.state[c, slot][0] == "ready":
                self.forget(c, slot)
            else:
                self.where.pop(self.owner[c, slot], None) if self.state[c, slot][0] == "reserved" else None
                del self.state[c, slot], self.owner[c, slot]

    @rule(group=groups, slot=st.integers(0, 80), call=st.sampled_from(["publish", "abandon", "unpin"]))
    def refuse_what_is_not_held(self, group, slot, call):
        state = self.state.get((GROUP_CLASSES[group], slot), ["free", 0])
        owned = state[0] != "free" and self.owner[GROUP_CLASSES[group], slot][0] == group
        legal = {
            "publish": state[0].endswith("reserved"),
            "abandon": state[0] in ("reserved", "forgotten reserved", "ready"),
            "unpin": state[1] > 0,
        }[call]
        if not (owned and legal):
            before = self.index.version
            with pytest.raises(ValueError, match="slot"):
                getattr(self.index, call)(group, raw([slot]))
            assert self.index.version == before

    @rule(chance=st.integers(0, 9))
    def reset(self, chance):
        if chance != 0:  # rarely: it empties the model
            return
        quiet = all(v[0] == "ready" and v[1] == 0 for v in self.state.values())
        assert self.index.reset() == quiet
        for c, slot in list(self.state):
            if not self.state[c, slot][0].startswith("forgotten"):
                self.forget(c, slot)

    @invariant()
    def agree(self):
        for c, total in enumerate(SLOTS):
            states = [v for (d, _), v in self.state.items() if d == c]
            assert self.index.counts(c) == {
                "free": total - len(states),
                "reserved": sum(v[0].endswith("reserved") for v in states),
                "ready": sum(v[0].endswith("ready") for v in states),
                "pinned": sum(v[1] > 0 for v in states),
                "total": total,
            }
        for group in range(len(GROUP_CLASSES)):
            expected = [2 if self.ready(group, k) else int((group, k) in self.where) for k in range(26)]
            assert list(self.index.contains(group, joined(range(26)))) == expected
        assert self.index.evictions == self.evictions
        follow(self.told, self.index)
        assert self.told == {(group, k) for group, k in self.where if self.ready(group, k)}


def follow(told: set[tuple[int, int]], index: native.SlotIndex) -> None:
    """Applies what has changed to `told`; each change must be one."""
    for kind, group, keys in index.take_changes():
        named = [(group, int.from_bytes(keys[i + 28 : i + 32], "little")) for i in range(0, len(keys), 32)]
        if kind == "stored":
            assert told.isdisjoint(named)
            told.update(named)
        elif kind == "removed":
            assert told.issuperset(named)
            told.difference_update(named)
        else:
            told.clear()


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def filled(slots: int, keys: int, group: int = 0) -> native.SlotIndex:
    index = native.SlotIndex([slots], [0, 0])
    index.publish(group, index.reserve(group, joined(range(keys))))
    return index


def test_neighbouring_keys_get_neighbouring_slots():
    index = native.SlotIndex([200], [0])
    assert ids(index.reserve(0, joined(range(20)))) == list(range(20))
    assert ids(index.reserve(0, joined(range(100, 110)), near=99)) == list(range(100, 110))
    assert ids(index.reserve(0, joined(range(110, 115)), near=109)) == list(range(110, 115))
    # 16..19 freed: a run of six does not fit there, so it goes elsewhere in one piece.
    index.abandon(0, raw(range(16, 20)))
    run = ids(index.reserve(0, joined(range(300, 306))))
    assert run == list(range(run[0], run[0] + 6))


def test_splinters_are_used_up_in_the_longest_runs_there_are():
    index = native.SlotIndex([64], [0])
    index.reserve(0, joined(range(64)))
    index.abandon(0, raw([1, 2, 3, 4, 10, 11, 20, 30]))
    got = ids(index.reserve(0, joined(range(100, 108)), near=40))
    assert got[:4] == [1, 2, 3, 4] and sorted(got) == [1, 2, 3, 4, 10, 11, 20, 30]


def test_the_tail_of_a_run_is_evicted_before_its_head():
    index = filled(8, 8)
    slots = index.match_and_pin(0, joined(range(8)))
    index.unpin(0, slots)
    index.reserve(0, joined([50, 51, 52]))
    assert index.match(0, joined(range(8))) == 5
    assert index.evictions == 3


def test_eviction_spares_the_pinned_and_the_keys_of_the_same_call():
    index = filled(4, 4)
    index.match_and_pin(0, joined([0]))
    got = ids(index.reserve(0, joined([1, 2, 60, 61])))
    assert got[:2] == [NO_SLOT, NO_SLOT]
    assert got[2] == 3 and got[3] == NO_SLOT  # key 3 alone could go
    assert list(index.contains(0, joined([0, 1, 2, 3]))) == [2, 2, 2, 0]


def test_a_pinned_slot_that_eviction_met_is_the_most_recent_once_unpinned():
    index = filled(4, 4)
    pinned = index.match_and_pin(0, joined([3]))  # the oldest: of one run the tail goes first
    assert ids(index.reserve(0, joined([60])))[0] != NO_SLOT  # eviction steps over it
    index.unpin(0, pinned)
    index.reserve(0, joined([61, 62]))
    assert list(index.contains(0, joined(range(4)))) == [0, 0, 0, 2]


def test_join():
    index = native.SlotIndex([8], [0], key_bytes=3)
    keys = [bytes([i, i + 1, i + 2]) for i in range(100)]
    for begin, end in ((0, 100), (0, 1), (7, 63), (99, 100), (5, 5), (6, 2), (90, 1000), (200, 300)):
        assert index.join(keys, begin, end) == b"".join(keys[begin:end])
        assert index.join(tuple(keys), begin, end) == b"".join(keys[begin:end])
    for bad in ("abc", 7, b"ab", b"abcd", None):
        with pytest.raises(ValueError, match="key 50 is not 3 bytes"):
            index.join([*keys[:50], bad, *keys[51:]], 0, 100)
    with pytest.raises(TypeError, match="sequence of bytes"):
        index.join(7, 0, 1)


def test_groups_never_meet():
    index = filled(8, 4, group=1)
    assert index.match(1, joined(range(4))) == 4
    assert index.match(0, joined(range(4))) == 0
    with pytest.raises(ValueError, match="belongs to group 1"):
        index.abandon(0, raw([0]))


def test_short_keys():
    index = native.SlotIndex([8], [0], key_bytes=3)
    index.publish(0, index.reserve(0, b"abcdef"))
    assert index.match(0, b"abcdefghi") == 2
    with pytest.raises(ValueError, match="3 bytes each"):
        index.match(0, b"abcd")


def test_changes_are_told_in_order_and_only_when_asked_for():
    index = filled(4, 4)
    assert index.take_changes() == []
    index.record_changes(100)
    index.publish(1, index.reserve(1, joined([7, 8])))
    assert index.take_changes() == [("removed", 0, joined([3, 2])), ("stored", 1, joined([7, 8]))]
    assert index.take_changes() == []
    index.reset()
    assert index.take_changes() == [("cleared", 0, b"")]
    index.record_changes(0)
    index.publish(0, index.reserve(0, joined([9])))
    assert index.take_changes() == []


def test_changes_that_nobody_takes_are_bounded():
    index = native.SlotIndex([64], [0])
    index.record_changes(10)
    for first in range(0, 60, 12):
        index.publish(0, index.reserve(0, joined(range(first, first + 12))))
    cleared, *rest = index.take_changes()
    assert cleared == ("cleared", 0, b"")
    assert [kind for kind, _, _ in rest] == ["stored"]
    assert 0 < len(rest[0][2]) <= 10 * 32
    assert index.match(0, rest[0][2]) == len(rest[0][2]) // 32  # too little, but nothing wrong


@pytest.mark.parametrize(
    "arguments", [([], [0]), ([0], [0]), ([4], []), ([4], [1]), ([4], [0], 0), ([4], [0], 33), ([1 << 31], [0])]
)
def test_impossible_indexes(arguments):
    with pytest.raises(ValueError):
        native.SlotIndex(*arguments)


def test_arguments_are_checked():
    index = filled(4, 4)
    for call in (index.match, index.match_and_pin, index.contains, index.pin, index.reserve):
        with pytest.raises(ValueError, match="group 2"):
            call(2, key(0))
    with pytest.raises(ValueError, match="near is 4"):
        index.reserve(0, key(9), near=4)
    with pytest.raises(ValueError, match="start is 2"):
        index.match(0, key(0), 2)
    with pytest.raises(ValueError, match="uint32"):
        index.unpin(0, b"abc")
    with pytest.raises(ValueError, match="slot class 1"):
        index.counts(1)
    assert index.counts()["ready"] == 4
