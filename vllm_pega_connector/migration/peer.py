# SPDX-License-Identifier: Apache-2.0
"""A source as the pulling agent sees it: its connections, two threads, and how long to leave it alone."""

from __future__ import annotations

import itertools
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import zmq

from vllm_pega_connector.address import HostPort
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.protocol import Door, ProtocolError, Refused, Reply, Request
from vllm_pega_connector.migration.same_host import Neighbour
from vllm_pega_connector.migration.security import Keys

logger = logging.getLogger("vllm.pega")

CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 2.0  # an agent answers within milliseconds, a loaded one within tens of them
FIRST_BACKOFF_S, LAST_BACKOFF_S = 1.0, 30.0


class PeerError(Exception):
    """No (good) answer. `reason`: a word for the counter."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Peer:
    """`address` is numeric and allowed: nothing here asks again. `ask` blocks, and is for the two threads; the rest is
    for the event loop.

    Two threads a peer, so that a frozen one holds up nobody else: while one reads, the other asks for the next pull.
    They block instead of awaiting: an answer takes half as long when nothing but one thread has to be woken for it.
    """

    def __init__(self, context: zmq.Context[Any], name: HostPort, address: HostPort, keys: Keys | None) -> None:
        self._context = context
        self.name = name
        self.address = address
        self._keys = keys
        self._ids = itertools.count(1)
        self._idle: list[zmq.Socket[bytes]] = []  # connected, with nothing outstanding
        self._closed = False
        self._quiet_until = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self.used = time.monotonic()
        self.pulls = 0  # under way
        self.asker = ThreadPoolExecutor(1, thread_name_prefix=f"ask {name}")
        self.reader = ThreadPoolExecutor(1, thread_name_prefix=f"read {name}")  # one: it keeps Mooncake's bound
        self._door: Door | None = None  # the last that was tried
        self._neighbour: Neighbour | None = None  # what was found behind it

    # --- the threads ---

    def ask(self, message_type: Any, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """The reply to `message_type(id, *args)`. Raises PeerError: refused, unreachable, or no answer in time."""
        if time.monotonic() < self._quiet_until:
            raise PeerError(
                "backoff",
                f"{self.name} failed lately; it is asked again in {self._quiet_until - time.monotonic():.0f} s",
            )
        message: Request = message_type(next(self._ids), *args, **kwargs)
        try:
            reply = self._ask(message, min(timeout_s, REPLY_TIMEOUT_S))
        except (OSError, PeerError, zmq.ZMQError) as error:
            self.failed()
            if isinstance(error, PeerError):
                raise
            token = "" if self._keys is None else ", and has it the same token"
            if isinstance(error, zmq.ZMQError):
                raise PeerError(
                    "no_answer", f"{self.name} did not answer; is it an agent of this version{token}?"
                ) from None
            raise PeerError("unreachable", f"{self.name} cannot be reached: {error.strerror or error}") from None
        if isinstance(reply, Refused):
            raise PeerError(f"refused_{reply.field}", f"{self.name} refuses: {reply.reason}")
        self._quiet_until, self._backoff_s = 0.0, FIRST_BACKOFF_S
        return reply

    def _ask(self, message: Request, timeout_s: float) -> Reply:
        """Raises PeerError, OSError, or zmq.Again when nothing came in time."""
        try:
            dealer = self._idle.pop()
        except IndexError:
            dealer = self._connect()
        try:
            dealer.sndtimeo = dealer.rcvtimeo = max(1, int(timeout_s * 1e3))
            dealer.send_multipart(protocol.frames(message))
            reply: Reply = protocol.parse(dealer.recv_multipart(), protocol.reply_decoder)
            if reply.id not in (message.id, 0):  # 0: it could not even read our id
                raise ProtocolError(f"a reply to message {reply.id} instead of {message.id}")
        except ProtocolError as error:
            dealer.close()
            raise PeerError("bad_answer", f"{self.name} answered with {error}") from None
        except BaseException:
            dealer.close()
            raise
        self._idle.append(dealer)
        if self._closed:
            self._disconnect()
        return reply

    def _connect(self) -> zmq.Socket[bytes]:
        """ZMQ retries in silence, so try the port by hand first: a closed one is known at once. Raises OSError."""
        try:
            socket.create_connection((self.address.host, self.address.port), CONNECT_TIMEOUT_S).close()
        except TimeoutError:
            raise OSError(f"no connection within {CONNECT_TIMEOUT_S:g} s") from None
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues for a peer that is not there
        dealer.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
        if self._keys is not None:
            self._keys.present(dealer)
        dealer.connect(f"tcp://{self.address}")
        return dealer

    def _disconnect(self) -> None:
        while self._idle:
            try:
                self._idle.pop().close()
            except IndexError:  # the other thread took it
                return

    def failed(self) -> None:
        """It did not answer, or a read from it failed: not at once again."""
        self._disconnect()
        self._quiet_until = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    # --- the same machine ---

    def meet(self, door: Door, ranks: int, slot_bytes: int) -> Neighbour | None:
        """What is behind a source's door, if it is on this machine; each door is tried once. For the reader."""
        if door != self._door:
            self._door, self._neighbour = door, None
            try:
                self._neighbour = Neighbour(door, ranks, slot_bytes)
            except ConnectionRefusedError:  # another machine, or another network namespace
                pass
            except (OSError, ValueError) as error:
                logger.warning("migration: %s is on this machine, but its pool cannot be read: %s", self.name, error)
        return self._neighbour

    def part(self, neighbour: Neighbour) -> None:
        """Gives up what it was handed; a read that is under way ends first. Wakes whoever watches the connection."""
        if self._neighbour is neighbour:
            self._neighbour = None
        with suppress(OSError):  # it has gone already
            neighbour.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._disconnect()
        if self._neighbour is not None:
            self.part(self._neighbour)
        self.asker.shutdown(wait=False, cancel_futures=True)
        self.reader.shutdown(wait=False, cancel_futures=True)


class Peers:
    """At most MAX of them: ports of allowed hosts are for clients to choose."""

    MAX = 64

    def __init__(self, context: zmq.Context[Any], keys: Keys | None) -> None:
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
