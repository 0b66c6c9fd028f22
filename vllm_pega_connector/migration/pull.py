# SPDX-License-Identifier: Apache-2.0
"""One pull: ask, read, ask again whether what was read still holds, publish what does."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

import numpy as np

from vllm_pega_connector.address import HostPort
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.data import DataPlane, Reading, Run, runs
from vllm_pega_connector.migration.peer import Peer, PeerError, Peers
from vllm_pega_connector.migration.pools import Pools
from vllm_pega_connector.migration.protocol import Ended, Found, Lookup, Pull, Validate, Validated
from vllm_pega_connector.migration.security import AllowedSources
from vllm_pega_connector.migration.serve import MAX_LEASE_S

logger = logging.getLogger("vllm.pega")


@dataclass
class Progress:
    """What a pull has come to. Per slot: `published` it holds its key, `unsafe` it may be written later."""

    count: int
    source: str = ""
    reason: str = ""
    nbytes: int = 0
    gap_s: float = 0.0
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
    ) -> None:
        self._pools = pools
        self._data = data
        self._peers = peers
        self._allowed = allowed
        self._fingerprint = fingerprint
        self._verify = verify

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
        peer.pulls += 1
        try:
            landed = await self._read(request, progress, peer, found, count, deadline)
            await self._publish(request, progress, peer, found, landed, deadline)
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
        left = deadline - time.monotonic()
        if left <= 0:
            raise PeerError("deadline", "the deadline passed before the source was asked")
        lease_s = min(left, MAX_LEASE_S)
        keys = request.keys[: protocol.MAX_KEYS * self._pools.key_bytes]
        return peer, await peer.ask(Lookup, self._fingerprint, keys, lease_s, timeout_s=left)

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

    # --- read ---

    async def _read(
        self, request: Pull, progress: Progress, peer: Peer, found: Found, count: int, deadline: float
    ) -> np.ndarray:
        """Reads `count` blocks; which of them have landed on all ranks. The slots stay odd."""
        start = time.monotonic()
        remote, local = np.frombuffer(found.slots, np.uint32).astype(np.int64), np.frombuffer(request.slots, np.uint32)
        local = local[:count].astype(np.int64)
        descriptors: list[Run] = []
        covers: list[range] = []
        for remote_base, local_base in zip(found.bases, self._pools.bases, strict=True):
            more, slots = runs(remote_base, local_base, remote, local, self._pools.slot_bytes)
            descriptors += more
            covers += slots
        segment = str(HostPort(peer.address.host, found.data_port))

        def read() -> Reading:
            if time.monotonic() > deadline:
                return Reading(0, 0, ())  # it waited too long for the reads before it
            self._pools.begin(request.slots[: 4 * count])
            return self._data.read(segment, descriptors)

        done = await asyncio.get_running_loop().run_in_executor(peer.reader, read)
        landed, started = done.landed, done.started
        arrived = np.ones(count, bool)
        for covered in covers[landed:]:
            arrived[covered.start : covered.stop] = False
        for covered in covers[landed:started]:
            progress.unsafe[covered.start : covered.stop] = True
        progress.nbytes = sum(n for _, _, n in descriptors[:landed])
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
                peer.failed_to_read()
        return arrived

    # --- publish ---

    async def _publish(
        self, request: Pull, progress: Progress, peer: Peer, found: Found, arrived: np.ndarray, deadline: float
    ) -> None:
        """Ends the writing of every slot that nothing can write any more: with its key if the source confirms it."""
        start = time.monotonic()
        count = len(arrived)
        valid = np.zeros(count, bool)
        try:
            if arrived.any():
                valid = arrived & await self._validated(request, peer, found, count)
                if not valid[arrived].all():
                    progress.reason = (
                        f"changed: {int((arrived & ~valid).sum())} blocks were overwritten on {peer.name} meanwhile"
                    )
        except PeerError as error:
            progress.reason = f"{error.reason}: {error}"
        finally:
            slots = np.frombuffer(request.slots, np.uint32)[:count]
            keys = np.frombuffer(request.keys, np.uint8).reshape(-1, self._pools.key_bytes)[:count]
            self._pools.end(slots[valid].tobytes(), keys[valid].tobytes())
            self._pools.end_empty(slots[~valid & ~progress.unsafe[:count]].tobytes())
            progress.published[:count] = valid
            progress.seconds["validate"] = time.monotonic() - start

    async def _validated(self, request: Pull, peer: Peer, found: Found, count: int) -> np.ndarray:
        """The read is over, so this answer is worth waiting for, whatever the deadline says. Raises PeerError."""
        reply = await peer.ask(Validate, found.slots, found.generations, checksum=self._verify, timeout_s=30.0)
        if not isinstance(reply, Validated) or len(reply.valid) != count:
            raise PeerError("bad_answer", f"{peer.name} gave no answer to the question whether its blocks hold")
        valid = np.frombuffer(reply.valid, bool).copy()
        if self._verify:
            ours = await asyncio.to_thread(self._pools.checksums, request.slots[: 4 * count])
            if len(reply.checksums) != len(ours):
                raise PeerError("bad_answer", f"{peer.name} sent no checksums")
            same = np.frombuffer(ours, np.uint32) == np.frombuffer(reply.checksums, np.uint32)
            valid &= same.reshape(-1, count).all(axis=0)
        return valid
