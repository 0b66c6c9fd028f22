# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side alone, with an agent and a clock that the test plays: every slot has one owner at all times."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.migration.support import key, u32
from vllm_pega_connector._native import HostPool, SlotIndex, SlotTable
from vllm_pega_connector.migration.client import Gone
from vllm_pega_connector.migration.hook import OVERDUE_S, QUARANTINE_S, Ask, Migration
from vllm_pega_connector.migration.protocol import Ended, Pull

SLOTS = 32
TIMEOUT_S = 5.0
SOURCE = ["10.0.0.1:7100"]


class PlayedAgent:
    """What AgentClient is to Migration. Pulls that were posted wait in `pulls`."""

    def __init__(self) -> None:
        self.pulls: dict[int, Pull] = {}
        self.events: list[Any] = []
        self.ready, self.starting, self.failure, self.port = True, False, "", 7100
        self.stopped = self.killed = 0

    def post(self, pull: Pull) -> bool:
        if self.ready:
            self.pulls[pull.id] = pull
        return self.ready

    def poll(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def end(self, pull: Pull, published: list[bool], unsafe: list[bool], reason: str = "") -> None:
        del self.pulls[pull.id]
        self.events.append(
            Ended(pull.id, SOURCE[0], np.array(published).tobytes(), np.array(unsafe).tobytes(), reason, 0, {})
        )

    def die(self) -> None:
        self.pulls.clear()
        self.events.append(Gone())

    def stop(self) -> None:
        self.stopped += 1

    def kill(self) -> None:
        self.killed += 1


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.pool = HostPool([(64, SLOTS)])
        self.table = SlotTable(self.pool, 0, 32)
        self.index = SlotIndex([SLOTS], [0])
        self.agent = PlayedAgent()
        client: Any = self.agent
        self.migration = Migration(self.index, 0, [self.table], SLOTS, client, (), TIMEOUT_S, lambda: self.now)

    def ask(self, numbers: Any) -> tuple[Ask, bool]:
        ask = self.migration.ask()
        return ask, self.waits(ask, numbers)

    def waits(self, ask: Ask, numbers: Any) -> bool:
        return self.migration.not_yet(ask, SOURCE, lambda: [key(n) for n in numbers])

    def presence(self, numbers: Any) -> bytes:
        return self.index.contains(0, b"".join(key(n) for n in numbers))


@pytest.fixture
def world() -> World:
    return World()


def test_what_arrives_is_ready_and_the_rest_is_free(world: World) -> None:
    ask, waits = world.ask(range(4))
    assert waits and world.presence(range(4)) == b"\1" * 4
    (pull,) = world.agent.pulls.values()
    assert pull.sources == SOURCE and pull.keys == b"".join(key(n) for n in range(4))
    world.agent.end(pull, [True, True, False, False], [False] * 4, "partly: some")
    world.migration.poll()
    assert not world.waits(ask, range(4)) and ask.over
    assert world.presence(range(4)) == b"\2\2\0\0"
    assert world.index.counts(0)["reserved"] == 0 and world.index.counts(0)["free"] == SLOTS - 2
    assert world.migration.take_stats().ended == {("partial", "partly"): 1}


def test_a_second_request_joins(world: World) -> None:
    first, _ = world.ask(range(4))
    second, waits = world.ask(range(6))
    assert waits and len(world.agent.pulls) == 2  # the second for blocks 4 and 5 alone
    pulls = list(world.agent.pulls.values())
    assert len(pulls[1].slots) == 2 * 4
    world.agent.end(pulls[1], [True] * 2, [False] * 2)
    world.migration.poll()
    assert world.waits(second, range(6)) and world.waits(first, range(4))
    world.agent.end(pulls[0], [True] * 4, [False] * 4)
    world.migration.poll()
    assert not world.waits(second, range(6)) and not world.waits(first, range(4))


def test_the_deadline_gives_keys_back_but_not_slots(world: World) -> None:
    ask, _ = world.ask(range(4))
    (pull,) = world.agent.pulls.values()
    world.now += TIMEOUT_S
    world.migration.poll()
    assert not world.waits(ask, range(4))
    assert world.presence(range(4)) == bytes(4)  # its own save may store them
    assert world.index.counts(0)["reserved"] == 4
    saved = world.index.reserve(0, b"".join(key(n) for n in range(4)))
    assert not set(np.frombuffer(saved, np.uint32)) & set(np.frombuffer(pull.slots, np.uint32))
    world.index.publish(0, saved)
    world.agent.end(pull, [True] * 4, [False] * 4)  # late, and of no use
    world.migration.poll()
    assert world.index.counts(0)["reserved"] == 0 and world.presence(range(4)) == b"\2" * 4


def test_slots_of_a_failed_read_are_held_until_the_agent_has_ended(world: World) -> None:
    world.ask(range(3))
    (pull,) = world.agent.pulls.values()
    unsafe = set(np.frombuffer(pull.slots, np.uint32)[1:].tolist())
    world.agent.end(pull, [True, False, False], [False, True, True], "read_failed: frozen")
    world.migration.poll()
    assert world.migration.counts() == {"pulls": 0, "quarantined": 2}
    assert world.presence(range(3)) == b"\2\0\0"
    everything = world.index.reserve(0, b"".join(key(n) for n in range(100, 100 + SLOTS)))
    granted = {s for s in np.frombuffer(everything, np.uint32).tolist() if s != 0xFFFFFFFF}
    assert len(granted) == SLOTS - 2 and not granted & unsafe
    assert world.agent.stopped == 0
    world.now += QUARANTINE_S + 1
    world.migration.poll()
    assert world.agent.stopped == 1
    world.agent.die()
    world.migration.poll()
    assert world.migration.counts()["quarantined"] == 0 and world.index.counts(0)["free"] == 2


def test_at_the_cap_the_agent_is_ended_at_once(world: World) -> None:
    for n in range(2):
        world.ask(range(10 * n, 10 * n + 3))
        (pull,) = world.agent.pulls.values()
        world.agent.end(pull, [False] * 3, [True] * 3, "read_failed: frozen")
        world.migration.poll()
        assert world.agent.stopped == n  # more than 4 of 32


def test_a_pull_that_is_never_answered_costs_the_agent_its_life(world: World) -> None:
    world.ask(range(3))
    world.now += TIMEOUT_S + OVERDUE_S
    world.migration.poll()
    assert world.agent.killed == 1 and world.index.counts(0)["reserved"] == 3


def test_a_full_pool_takes_what_fits_from_the_front(world: World) -> None:
    taken = world.index.reserve(0, b"".join(key(n) for n in range(100, 100 + SLOTS - 2)))
    world.ask(range(5))
    (pull,) = world.agent.pulls.values()
    assert pull.keys == key(0) + key(1) and len(pull.slots) == 8
    world.agent.end(pull, [True] * 2, [False] * 2)
    world.migration.poll()
    world.index.abandon(0, taken)
    assert world.index.counts(0)["free"] == SLOTS - 2


def test_a_reset_during_a_pull(world: World) -> None:
    world.ask(range(2))
    (pull,) = world.agent.pulls.values()
    world.index.reset()
    world.migration.reset(b"")
    world.table.begin(pull.slots)
    world.table.end(pull.slots, pull.keys, 64)  # the agent, which does not know
    assert world.table.find(pull.keys) == (b"", b"")
    world.agent.end(pull, [True] * 2, [False] * 2)
    world.migration.poll()
    assert world.table.find(pull.keys) == (b"", b"") and world.presence(range(2)) == bytes(2)
    assert world.index.counts(0)["free"] == SLOTS
    world.table.begin(u32([5]))
    world.table.end(u32([5]), key(7), 64)
    assert world.table.find(key(7))[0] == u32([5])


@pytest.mark.parametrize("seed", range(40))
def test_no_slot_is_lost_or_shared_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    saves: list[bytes] = []
    succeeded = 0
    for _ in range(300):
        world.now += rng.random()
        what = rng.randrange(8)
        numbers = range(start := rng.randrange(60), start + rng.randrange(1, 12))
        if what <= 1:
            world.ask(numbers)
        elif what == 2:
            slots = world.index.reserve(0, b"".join(key(n) for n in numbers))
            got = b"".join(slots[i : i + 4] for i in range(0, len(slots), 4) if slots[i : i + 4] != b"\xff" * 4)
            if got:
                saves.append(got)
        elif what == 3 and saves:
            (world.index.publish if rng.random() < 0.8 else world.index.abandon)(0, saves.pop(0))
        elif what <= 5 and world.agent.pulls:
            pull = rng.choice(list(world.agent.pulls.values()))
            states = [rng.choice("pppuf") for _ in range(len(pull.slots) // 4)]
            succeeded += states.count("p")
            world.agent.end(
                pull, [s == "p" for s in states], [s == "u" for s in states], "x: y" if "f" in states else ""
            )
        elif what == 6 and (rng.random() < 0.2 or world.agent.stopped):
            world.agent.stopped = 0
            world.agent.die()
        elif what == 7 and rng.random() < 0.1:
            world.index.reset()
            world.migration.reset(b"".join(saves))
        world.migration.poll()
        # One owner each: a save, a pull, the quarantine; the index counts the same slots as reserved.
        owned = [s for slots in saves for s in np.frombuffer(slots, np.uint32).tolist()]
        owned += [s for p in world.migration._pulls.values() for s in np.frombuffer(p.slots, np.uint32).tolist()]
        owned += np.frombuffer(world.migration._quarantine, np.uint32).tolist()
        assert len(owned) == len(set(owned))
        assert world.index.counts(0)["reserved"] == len(owned)
    for save in saves:
        world.index.abandon(0, save)
    world.agent.die()
    world.migration.poll()
    counts = world.index.counts(0)
    assert counts["reserved"] == 0 and counts["free"] + counts["ready"] == SLOTS
    assert succeeded > 0 and world.migration._by_key == {}
