# SPDX-License-Identifier: Apache-2.0
"""One pull: ask, read, ask again whether what was read still holds, publish what does."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from vllm_pega_connector.address import HostPort
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.data import DataPlane, Descriptors
from vllm_pega_connector.migration.peer import Peer, PeerError, Peers
from vllm_pega_connector.migration.pools import Pools
from vllm_pega_connector.migration.protocol import Ended, Found, Lookup, Pull, Validate, Validated
from vllm_pega_connector.migration.same_host import Neighbour
from vllm_pega_connector.migration.security import AllowedSources
from vllm_pega_connector.migration.serve import MAX_LEASE_S

logger = logging.getLogger("vllm.pega")
T = TypeVar("T")


@dataclass
class Progress:
    """What a pull has come to. Per slot: `published` it holds its key, `unsafe` it may be written later."""

    count: int
    source: str = ""
    reason: str = ""
    nbytes: int = 0
    gap_s: float = 0.0
    path: str = ""
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.published = np.zeros(self.count, bool)
        self.unsafe = np.zeros(self.count, bool)


class Puller:
    def __init__(
        self,
        pools: Pools,
        data: DataPlane,
        peers: Peers,
        allowed: AllowedSources,
        fingerprint: dict[str, str],
        verify: bool,
        same_host: bool,
    ) -> None:
        """To be made in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._pools = pools
        self._data = data
        self._peers = peers
        self._allowed = allowed
        self._fingerprint = fingerprint
        self._verify = verify
        self._same_host = same_host

    async def pull(self, request: Pull) -> Ended:
        """Never raises; every slot is accounted for in the answer."""
        progress = Progress(len(request.slots) // 4)
        deadline = time.monotonic() + request.timeout_s
        try:
            await self._pull(request, progress, deadline)
        except PeerError as error:
            progress.reason = f"{error.reason}: {error}"
        except Exception as error:  # a fault of ours ends this pull alone
            logger.exception("migration: a pull failed")
            progress.reason = f"internal: {type(error).__name__}: {error}"
        return Ended(
            request.id,
            progress.source,
            progress.published.tobytes(),
            progress.unsafe.tobytes(),
            progress.reason,
            progress.nbytes,
            progress.seconds,
            progress.gap_s,
            progress.path,
        )

    async def _pull(self, request: Pull, progress: Progress, deadline: float) -> None:
        start = time.monotonic()
        progress.seconds["post"] = max(0.0, start - request.posted)
        peer, found = await self._best(request, deadline)
        progress.source = str(peer.name)
        progress.seconds["lookup"] = time.monotonic() - start
        count = self._check(found, progress.count)
        if count == 0:
            progress.reason = f"not_found: {peer.name} has none of these blocks"
            return
        if count < progress.count:
            progress.reason = f"partly: {peer.name} has {count} of {progress.count} blocks"
        # One job of the reading thread, to the end: nothing has to be woken between reading and asking again.
        fetch = functools.partial(self._fetch, request, progress, peer, found, count, deadline)
        await self._in(peer.reader, peer, fetch)

    async def _in(self, thread: Executor, peer: Peer, job: Callable[[], T]) -> T:
        peer.pulls += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, job)
        finally:
            peer.pulls -= 1

    # --- ask ---

    async def _best(self, request: Pull, deadline: float) -> tuple[Peer, Found]:
        """The source with the longest run. Raises the last PeerError if none answers."""
        answers = await asyncio.gather(
            *(self._look_up(source, request, deadline) for source in request.sources), return_exceptions=True
        )
        best = max((a for a in answers if isinstance(a, tuple)), key=lambda a: len(a[1].slots), default=None)
        if best is not None:
            return best
        raise next(a for a in answers if isinstance(a, BaseException))

    async def _look_up(self, source: str, request: Pull, deadline: float) -> tuple[Peer, Found]:
        name = HostPort.parse(source)
        try:
            address = await self._allowed.resolve(name)
        except OSError as error:
            raise PeerError("unresolved", f"{name} has no address: {error}") from None
        if address is None:
            raise PeerError("not_allowed", f"{name} is not in migration.allow_sources")
        peer = self._peers.get(name, address)
        keys = request.keys[: protocol.MAX_KEYS * self._pools.key_bytes]

        def ask() -> Any:
            left = deadline - time.monotonic()
            if left <= 0:
                raise PeerError("deadline", "the deadline passed before the source was asked")
            return peer.ask(Lookup, self._fingerprint, keys, min(left, MAX_LEASE_S), timeout_s=left)

        return peer, await self._in(peer.asker, peer, ask)

    def _check(self, found: Found, wanted: int) -> int:
        """Number of blocks found. Raises PeerError for an answer that does not fit our pools."""
        if not isinstance(found, Found):
            raise PeerError("bad_answer", f"the source answered a lookup with {type(found).__name__}")
        count, ranks = len(found.slots) // 4, len(self._pools.bases)
        good = (
            len(found.slots) == 4 * count <= 4 * wanted
            and len(found.generations) == 8 * count * ranks
            and len(found.bases) == ranks
            and all(0 < base < 1 << 63 for base in found.bases)
            and found.slot_bytes == self._pools.slot_bytes
            and 0 < found.data_port < 65536
        )
        if not good:
            raise PeerError("bad_answer", "the source's answer does not fit the pools here; is it the same version?")
        return count

    # --- read; all of it in the peer's reading thread ---

    def _fetch(self, request: Pull, progress: Progress, peer: Peer, found: Found, count: int, deadline: float) -> None:
        start = time.monotonic()
        if start > deadline:  # it waited too long for the reads before it
            progress.reason = f"deadline: {peer.name} was too slow"
            return
        arrived = self._read_same_host(request, progress, peer, found, count)
        if arrived is None:
            arrived = self._read_network(request, progress, peer, found, count, deadline)
        if arrived.any():
            self._publish(request, progress, peer, found, arrived)
        else:
            self._end(request, progress, np.zeros(count, bool))

    def _read_same_host(
        self, request: Pull, progress: Progress, peer: Peer, found: Found, count: int
    ) -> np.ndarray | None:
        """All blocks, if the source is on this machine; None if it is not, or its pool cannot be read."""
        if found.door is None or not self._same_host:
            return None
        start = time.monotonic()
        neighbour = peer.meet(found.door, len(self._pools.bases), self._pools.slot_bytes)
        if neighbour is None:
            return None
        if not neighbour.watched:
            neighbour.watched = True
            self._loop.call_soon_threadsafe(_until_it_ends, self._loop, peer, neighbour)
        slots = request.slots[: 4 * count]
        self._pools.begin(slots)
        handed = time.monotonic()
        try:
            whole = neighbour.read(found.slots, self._pools.pools, self._pools.slot_class, slots)
        except ValueError as error:  # slots that its pool does not have
            raise PeerError("bad_answer", f"{peer.name}: {error}") from None
        if not whole:
            logger.warning("migration: the pool of %s can no longer be read directly", peer.name)
            peer.part(neighbour)
            return None
        progress.path, progress.nbytes = "same_host", count * self._pools.slot_bytes * len(self._pools.bases)
        progress.seconds["queue"] = handed - start
        progress.seconds["read"] = time.monotonic() - handed
        return np.ones(count, bool)

    def _read_network(
        self, request: Pull, progress: Progress, peer: Peer, found: Found, count: int, deadline: float
    ) -> np.ndarray:
        """Which of `count` blocks have landed on all ranks. The slots stay odd."""
        start = time.monotonic()
        remote, local = np.frombuffer(found.slots, np.uint32), np.frombuffer(request.slots, np.uint32)[:count]
        descriptors = Descriptors.joined(
            [
                Descriptors.runs(theirs, ours, remote, local, self._pools.slot_bytes)
                for theirs, ours in zip(found.bases, self._pools.bases, strict=True)
            ]
        )
        self._pools.begin(request.slots[: 4 * count])
        progress.unsafe[:count] = True  # until the read has said how far it came
        done = self._data.read(str(HostPort(peer.address.host, found.data_port)), descriptors)
        landed, started = done.landed, done.started
        arrived = ~descriptors.slots(landed, len(descriptors), count)
        progress.unsafe[:count] = descriptors.slots(landed, started, count)
        progress.path, progress.nbytes = "network", int(descriptors.nbytes[:landed].sum())
        handed = done.handed[0] if done.handed else time.monotonic()
        progress.seconds["queue"] = handed - start
        progress.seconds["read"] = time.monotonic() - handed
        progress.gap_s = done.gap_s
        if landed < len(descriptors):
            waited = time.monotonic() > deadline
            progress.reason = (
                f"deadline: {peer.name} was too slow" if waited else f"read_failed: a read from {peer.name} failed"
            )
            if started:
                peer.failed()
        return arrived

    # --- publish ---

    def _publish(self, request: Pull, progress: Progress, peer: Peer, found: Found, arrived: np.ndarray) -> None:
        start = time.monotonic()
        valid = np.zeros(len(arrived), bool)
        try:
            valid = arrived & self._validated(request, peer, found, len(arrived))
            if not valid[arrived].all():
                progress.reason = (
                    f"changed: {int((arrived & ~valid).sum())} blocks were overwritten on {peer.name} meanwhile"
                )
        except PeerError as error:
            progress.reason = f"{error.reason}: {error}"
        finally:
            self._end(request, progress, valid)
            progress.seconds["validate"] = time.monotonic() - start

    def _end(self, request: Pull, progress: Progress, valid: np.ndarray) -> None:
        """Ends the writing of every slot that nothing can write any more: with its key if that is valid."""
        count = len(valid)
        slots = np.frombuffer(request.slots, np.uint32)[:count]
        keys = np.frombuffer(request.keys, np.uint8).reshape(-1, self._pools.key_bytes)[:count]
        self._pools.end(slots[valid].tobytes(), keys[valid].tobytes())
        self._pools.end_empty(slots[~valid & ~progress.unsafe[:count]].tobytes())
        progress.published[:count] = valid

    def _validated(self, request: Pull, peer: Peer, found: Found, count: int) -> np.ndarray:
        """The read is over, so this answer is worth waiting for, whatever the deadline says. Raises PeerError."""
        reply = peer.ask(Validate, found.slots, found.generations, checksum=self._verify, timeout_s=30.0)
        if not isinstance(reply, Validated) or len(reply.valid) != count:
            raise PeerError("bad_answer", f"{peer.name} gave no answer to the question whether its blocks hold")
        valid = np.frombuffer(reply.valid, bool).copy()
        if self._verify:
            ours = self._pools.checksums(request.slots[: 4 * count])
            if len(reply.checksums) != len(ours):
                raise PeerError("bad_answer", f"{peer.name} sent no checksums")
            same = np.frombuffer(ours, np.uint32) == np.frombuffer(reply.checksums, np.uint32)
            valid &= same.reshape(-1, count).all(axis=0)
        return valid


def _until_it_ends(loop: asyncio.AbstractEventLoop, peer: Peer, neighbour: Neighbour) -> None:
    """Gives up a neighbour's memory once its agent has ended: else an idle target would hold a dead pool."""

    def ended() -> None:
        loop.remove_reader(neighbour.connection)
        peer.part(neighbour)
        neighbour.connection.close()

    loop.add_reader(neighbour.connection, ended)
