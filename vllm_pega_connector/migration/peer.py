# SPDX-License-Identifier: Apache-2.0
"""A source as the pulling agent sees it: one control connection, one reading thread, and how long to leave it alone."""

from __future__ import annotations

import asyncio
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
import zmq.asyncio

from vllm_pega_connector.address import HostPort
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.protocol import ProtocolError, Refused, Reply, Request
from vllm_pega_connector.migration.security import Keys

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0  # an agent answers within milliseconds, a loaded one within tens of them
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 30.0


class PeerError(Exception):
    """No (good) answer. `reason`: a word for the counter."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Peer:
    """`address` is numeric and allowed: nothing here asks again."""

    def __init__(self, context: zmq.asyncio.Context, name: HostPort, address: HostPort, keys: Keys | None) -> None:
        self._context = context
        self.name = name
        self.address = address
        self._keys = keys
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._listener: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._quiet_until = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self.used = time.monotonic()
        self.pulls = 0  # under way
        # One thread a peer: a frozen one holds up nobody else, and its queue keeps Mooncake's bound.
        self.reader = ThreadPoolExecutor(1, thread_name_prefix=f"read {name}")

    async def ask(self, message_type: Any, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """The reply to `message_type(id, *args)`. Raises PeerError: refused, unreachable, or no answer in time."""
        if time.monotonic() < self._quiet_until:
            raise PeerError(
                "backoff",
                f"{self.name} failed lately; it is asked again in {self._quiet_until - time.monotonic():.0f} s",
            )
        try:
            reply = await asyncio.wait_for(self._ask(message_type, args, kwargs), min(timeout_s, REPLY_TIMEOUT_S))
        except asyncio.TimeoutError:
            self.disconnect()
            self._leave_alone()
            token = "" if self._keys is None else ", and has it the same token"
            raise PeerError(
                "no_answer", f"{self.name} did not answer; is it an agent of this version{token}?"
            ) from None
        except PeerError:
            self.disconnect()
            self._leave_alone()
            raise
        except OSError as error:
            self._leave_alone()
            raise PeerError("unreachable", f"{self.name} cannot be reached: {error.strerror or error}") from None
        if isinstance(reply, Refused):
            raise PeerError(f"refused_{reply.field}", f"{self.name} refuses: {reply.reason}")
        self._quiet_until, self._backoff_s = 0.0, FIRST_BACKOFF_S
        return reply

    async def _ask(self, message_type: Any, args: Any, kwargs: Any) -> Reply:
        await self._connect()
        assert self._socket is not None
        message: Request = message_type(next(self._ids), *args, **kwargs)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        try:
            await self._socket.send_multipart(protocol.frames(message))
            return await future
        finally:
            self._waiting.pop(message.id, None)

    async def _connect(self) -> None:
        """ZMQ retries in silence, so try the port by hand first: a closed one is known at once. Raises OSError."""
        async with self._connecting:
            if self._socket is not None:
                return
            try:
                _, writer = await asyncio.wait_for(
                    asyncio.open_connection(self.address.host, self.address.port), CONNECT_TIMEOUT_S
                )
            except asyncio.TimeoutError:
                raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
            writer.close()
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a peer that is not there
            socket.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
            if self._keys is not None:
                self._keys.present(socket)
            socket.connect(f"tcp://{self.address}")
            self._socket = socket
            self._listener = asyncio.create_task(self._listen(socket))

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart()
            try:
                reply: Reply = protocol.parse(parts, protocol.reply_decoder)
            except ProtocolError as error:
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(PeerError("bad_answer", f"{self.name} answered with {error}"))
                continue
            if reply.id == 0:  # it could not even read our id: whoever waits is meant
                waiting = list(self._waiting.values())
            else:
                waiting = [w for w in (self._waiting.get(reply.id),) if w is not None]
            for future in waiting:
                if not future.done():
                    future.set_result(reply)

    def _leave_alone(self) -> None:
        self._quiet_until = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def failed_to_read(self) -> None:
        """A read from it failed: not at once again."""
        self.disconnect()
        self._leave_alone()

    def disconnect(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
        if self._socket is not None:
            self._socket.close()
        self._listener = self._socket = None

    def close(self) -> None:
        self.disconnect()
        self.reader.shutdown(wait=False, cancel_futures=True)


class Peers:
    """At most MAX of them: ports of allowed hosts are for clients to choose."""

    MAX = 64

    def __init__(self, context: zmq.asyncio.Context, keys: Keys | None) -> None:
        self._context = context
        self._keys = keys
        self._peers: dict[HostPort, Peer] = {}

    def get(self, name: HostPort, address: HostPort) -> Peer:
        """Raises PeerError if there are too many, all busy."""
        peer = self._peers.get(name)
        if peer is not None and peer.address != address and not peer.pulls:  # its name means another host now
            self._peers.pop(name).close()
            peer = None
        if peer is None:
            if len(self._peers) >= self.MAX:
                idle = min((p for p in self._peers.values() if not p.pulls), key=lambda p: p.used, default=None)
                if idle is None:
                    raise PeerError("too_many_sources", f"pulls from {self.MAX} sources are under way already")
                self._peers.pop(idle.name).close()
            peer = self._peers[name] = Peer(self._context, name, address, self._keys)
        peer.used = time.monotonic()
        return peer

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
