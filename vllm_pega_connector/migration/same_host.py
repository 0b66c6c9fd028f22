# SPDX-License-Identifier: Apache-2.0
"""Pools of one machine: an agent hands the descriptors of its pools to its neighbours, which then read them directly.

A lookup's answer names a socket of the source and a secret. Whoever runs under the same user and brings the secret
back gets the descriptors, opened for reading only, and the connection stays open for as long as either side uses them.
The secret travels as the answer does: with a token, encrypted, and only to those who have the token.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import secrets
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_pega_connector.migration.protocol import Door

if TYPE_CHECKING:
    from vllm_pega_connector._native import HostPool, PeerPool
    from vllm_pega_connector.migration.pools import Pools

MEET_TIMEOUT_S = 2.0  # both are on this machine: milliseconds, unless one is frozen
MAX_VISITORS = 64  # descriptors handed out and not given back
# Two threads come close to what one socket's memory gives; more would only take it from the engine.
COPY_THREADS = min(4, max(1, len(os.sched_getaffinity(0)) // 2))
_NAME = re.compile(r"pega-[0-9a-f]{32}")  # nothing else is connected to, whatever a source says
_PLACE = struct.Struct("<QQ")  # of a rank's slot class: offset in the file, slots


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


class Host:
    """The source's side."""

    def __init__(self, pools: Pools) -> None:
        """Raises OSError if this machine does not let us."""
        self.door = Door(f"pega-{secrets.token_hex(16)}", secrets.token_bytes(32))
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self.door.name}")
        self._listener.listen()
        # A descriptor of its own, which cannot be used to write.
        self._files = [os.open(f"/proc/self/fd/{pool.data_fd}", os.O_RDONLY | os.O_CLOEXEC) for pool in pools.pools]
        self._places = b"".join(
            _PLACE.pack(base - pool.address, pools.slots) for base, pool in zip(pools.bases, pools.pools, strict=True)
        )
        self._visits: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:  # out of descriptors, say
                await asyncio.sleep(1.0)
                continue
            if len(self._visits) >= MAX_VISITORS:
                connection.close()
                continue
            visit = asyncio.create_task(self._receive(connection))
            self._visits.add(visit)
            visit.add_done_callback(self._visits.discard)

    async def _receive(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection:
            connection.setblocking(False)
            try:
                if not _same_user(connection):
                    return
                ticket = await asyncio.wait_for(loop.sock_recv(connection, 64), MEET_TIMEOUT_S)
                if not hmac.compare_digest(ticket, self.door.ticket):
                    return
                socket.send_fds(connection, [self._places], self._files)
                await loop.sock_recv(connection, 1)  # until the visitor goes
            except (OSError, asyncio.TimeoutError):
                pass


class Neighbour:
    """The target's side: what it was handed by one source. `connection` can be read once the source has ended."""

    def __init__(self, door: Door, ranks: int, slot_bytes: int) -> None:
        """Takes a moment. Raises OSError or ValueError if there is nobody behind the door, or nobody to trust."""
        from vllm_pega_connector._native import PeerPool

        if _NAME.fullmatch(door.name) is None:
            raise ValueError(f"{door.name!r:.80} is no name of an agent's socket")
        files: list[int] = []
        self.watched = False
        self.connection = socket.socket(socket.AF_UNIX)
        try:
            self.connection.settimeout(MEET_TIMEOUT_S)
            self.connection.connect(f"\0{door.name}")
            if not _same_user(self.connection):
                raise OSError("it runs under another user")
            self.connection.sendall(door.ticket)
            places, files, _, _ = socket.recv_fds(self.connection, ranks * _PLACE.size + 1, ranks)
            if len(files) != ranks or len(places) != ranks * _PLACE.size:
                raise ValueError(f"it handed over {len(files)} descriptors for {ranks} ranks")
            self._pools: list[PeerPool] = [
                PeerPool(file, offset, slot_bytes, slots)
                for file, (offset, slots) in zip(files, _PLACE.iter_unpack(places), strict=True)
            ]
        except BaseException:
            self.connection.close()
            raise
        finally:
            for file in files:
                os.close(file)

    def read(self, theirs: bytes, to: Sequence[HostPool], slot_class: int, ours: bytes) -> bool:
        """Copies slots of all ranks; False if not all could be read. Afterwards nothing writes any more."""
        return all(
            pool.read(theirs, own, slot_class, ours, COPY_THREADS) for pool, own in zip(self._pools, to, strict=True)
        )
