# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of migration: which blocks to pull for a request, how long it waits, whose the slots are.

A pull belongs to its keys, not to the request that asked: other requests join it, and an abort only stops waiting.
Its slots stay reserved until the agent has accounted for every one of them, or has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_pega_connector.address import HostPort
from vllm_pega_connector.guard import log_limited
from vllm_pega_connector.migration.client import AgentClient, Gone
from vllm_pega_connector.migration.protocol import MAX_KEYS, Ended, Pull

# The agent answers within its deadline and Mooncake's (a silent data port: 61 s). One that does not is ended.
OVERDUE_S = 120.0
# Of the slots, how many failed reads may hold before the agent is ended to get them back, and for how long few may.
QUARANTINE_SHARE = 8
QUARANTINE_S = 60.0


@dataclass
class PullState:
    id: int
    keys: list[bytes]
    slots: bytes
    deadline: float
    disowned: bool = False  # nobody waits any more: its keys may be computed and saved elsewhere
    stale: bool = False  # the cache was reset meanwhile


@dataclass
class Ask:
    """What one request waits for."""

    start_by: float  # how long it waits for an agent that is just starting
    pulls: list[PullState] | None = None  # None: not asked for yet
    over: bool = False  # it waits no more


@dataclass
class MigrationStats:
    """Since the last report: pulls by (result, reason), bytes by path, and seconds as (path, phase, seconds)."""

    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    seconds: list[tuple[str, str, float]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ended or self.nbytes or self.seconds)


class Migration:
    """`tables`: the slot tables of all ranks, mapped here to make other processes forget (pega's _native.SlotTable)."""

    def __init__(
        self,
        index: Any,
        group: int,
        tables: Sequence[Any],
        slots: int,
        client: AgentClient,
        peers: Sequence[HostPort],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._group = group
        self._tables = tables
        self._slots = slots
        self._client = client
        self._peers = [str(p) for p in peers]
        self._timeout_s = timeout_s
        self._clock = clock
        self._pulls: dict[int, PullState] = {}
        self._by_key: dict[bytes, PullState] = {}
        self._next_pull = 1
        self._quarantine = b""
        self._quarantined_at = 0.0
        self.stats = MigrationStats()

    # --- requests ---

    def sources(self, source: HostPort | None) -> list[str]:
        return [str(source)] if source is not None else self._peers

    def ask(self) -> Ask:
        return Ask(start_by=self._clock() + self._timeout_s)

    def not_yet(self, ask: Ask, sources: list[str], hashes: Callable[[], Sequence[bytes]]) -> bool:
        """True while the request should wait. `hashes` gives the keys of the blocks that it lacks on the GPU.

        Pulls those that are not in the pool either, or joins the pulls that bring them; later calls only look.
        """
        now = self._clock()
        if ask.pulls is None:
            if self._client.starting and now < ask.start_by:
                return True  # the agent is just starting
            ask.pulls = self._post(sources, hashes()) if self._client.ready else []
        waits = any(p.id in self._pulls and now < p.deadline for p in ask.pulls)
        ask.over = not waits
        return waits

    def _post(self, sources: list[str], hashes: Sequence[bytes]) -> list[PullState]:
        present = self._index.contains(self._group, b"".join(hashes))
        wanted: list[bytes] = []
        joins: dict[int, PullState] = {}
        for key, state in zip(hashes, present, strict=True):
            if state == 0:
                wanted.append(key)
            elif state == 1 and (other := self._by_key.get(key)) is not None:
                joins[other.id] = other
        pulls = list(joins.values())
        for first in range(0, len(wanted), MAX_KEYS):
            pull = self._pull(sources, wanted[first : first + MAX_KEYS])
            if pull is None:
                break
            pulls.append(pull)
        return pulls

    def _pull(self, sources: list[str], keys: list[bytes]) -> PullState | None:
        slots = np.frombuffer(self._index.reserve(self._group, b"".join(keys)), np.uint32)
        # Blocks behind a gap are of no use.
        full = np.flatnonzero(slots == self._index.NO_SLOT)
        count = int(full[0]) if len(full) else len(slots)
        if len(full):
            rest = slots[count:]
            self._index.abandon(self._group, rest[rest != self._index.NO_SLOT].tobytes())
            if count == 0:
                self.stats.ended["dropped", "pool_full"] += 1
                return None
        pull = PullState(self._next_pull, keys[:count], slots[:count].tobytes(), self._clock() + self._timeout_s)
        self._next_pull += 1
        if not self._client.post(Pull(pull.id, sources, b"".join(pull.keys), pull.slots, self._timeout_s)):
            self._index.abandon(self._group, pull.slots)
            self.stats.ended["dropped", "no_agent"] += 1
            return None
        self._pulls[pull.id] = pull
        self._by_key.update(dict.fromkeys(pull.keys, pull))
        return pull

    # --- every step ---

    def poll(self) -> None:
        """Takes what the agent says; between steps, and while a request waits."""
        for event in self._client.poll():
            if isinstance(event, Ended):
                self._end(event)
            elif isinstance(event, Gone):
                self._agent_gone()
        if not self._pulls and not self._quarantine:
            return
        now = self._clock()
        for pull in self._pulls.values():
            if now >= pull.deadline and not pull.disowned:
                pull.disowned = True
                self._index.disown(self._group, pull.slots)
                self._forget_keys(pull)
            if now >= pull.deadline + OVERDUE_S:
                self._client.kill()
        held = len(self._quarantine) // 4
        if held * QUARANTINE_SHARE > self._slots or (held and now - self._quarantined_at > QUARANTINE_S):
            self._client.stop()

    def _forget_keys(self, pull: PullState) -> None:
        for key in pull.keys:
            if self._by_key.get(key) is pull:
                del self._by_key[key]

    def _end(self, event: Ended) -> None:
        pull = self._pulls.pop(event.id, None)
        if pull is None:
            log_limited("pull", "PegaConnector: the migration agent reported pull %d twice; ignored", event.id)
            return
        self._forget_keys(pull)
        slots = np.frombuffer(pull.slots, np.uint32)
        published = np.frombuffer(event.published, bool)
        unsafe = np.frombuffer(event.unsafe, bool)
        if pull.stale:
            self._forget(pull.slots)
        self._index.publish(self._group, slots[published].tobytes())
        self._index.abandon(self._group, slots[~published & ~unsafe].tobytes())
        self._hold(slots[unsafe].tobytes())
        result = "done" if published.all() else "partial" if published.any() else "failed"
        self.stats.ended[result, event.reason.split(":", 1)[0]] += 1
        if event.path:
            self.stats.nbytes[event.path] += event.nbytes
        self.stats.seconds += [(event.path or "none", phase, seconds) for phase, seconds in event.seconds.items()]
        if event.reason and not event.reason.startswith(("not_found", "partly")):
            log_limited("pull", "PegaConnector: blocks are computed instead of migrated: %s", event.reason)

    def _hold(self, slots: bytes) -> None:
        """Keeps slots that a failed read may still write until the agent that read them has ended."""
        if slots:
            self._index.disown(self._group, slots)
            self._quarantine += slots
            self._quarantined_at = self._clock()

    def _agent_gone(self) -> None:
        for pull in self._pulls.values():
            self._forget_keys(pull)
            if pull.stale:
                self._forget(pull.slots)
            self._index.abandon(self._group, pull.slots)
            self.stats.ended["failed", "agent_ended"] += 1
        self._pulls.clear()
        if self._quarantine:
            self._index.abandon(self._group, self._quarantine)
            self._quarantine = b""

    # --- the cache is reset ---

    def reset(self, saving: bytes) -> None:
        """Nothing stored before is given to other instances any more, nor what is being stored: `saving` are the slots
        of saves under way, which must be named to `saved` once each has ended."""
        under_way = saving
        for pull in self._pulls.values():
            pull.stale = True
            under_way += pull.slots
        for table in self._tables:
            table.forget_all()
            table.distrust(under_way)

    def saved(self, slots: bytes) -> None:
        self._forget(slots)

    def _forget(self, slots: bytes) -> None:
        for table in self._tables:
            table.forget(slots)

    # --- questions ---

    @property
    def port(self) -> int:
        """0 until the agent has told it."""
        return self._client.port

    @property
    def failure(self) -> str:
        """Why there is no agent, in its own words; "" if there is one, or will be."""
        return self._client.failure

    def counts(self) -> dict[str, int]:
        return {"pulls": len(self._pulls), "quarantined": len(self._quarantine) // 4}

    def take_stats(self) -> MigrationStats:
        stats, self.stats = self.stats, MigrationStats()
        return stats

    def close(self) -> None:
        self._client.close()
