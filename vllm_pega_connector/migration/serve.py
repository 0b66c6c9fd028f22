# SPDX-License-Identifier: Apache-2.0
"""Answers peers from shared memory alone: no scheduler, no engine and no GIL but the agent's own is involved."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import zmq

from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.fingerprint import difference
from vllm_pega_connector.migration.pools import Pools
from vllm_pega_connector.migration.protocol import (
    Door,
    Found,
    Lookup,
    Ping,
    Pong,
    ProtocolError,
    Refused,
    Reply,
    Request,
    Validate,
    Validated,
)
from vllm_pega_connector.migration.security import Keys, authenticate

MAX_LEASE_S = 60.0  # a peer that died while reading holds its slots for no longer
HANDSHAKE_MS = 3000  # a connection that says nothing is closed after this
HEARTBEAT_MS = 5000
MAX_SUMS = 64  # checksums asked for and not answered yet
_SUMMED = "inproc://summed"  # answers that took a while


def bind(context: zmq.Context[Any], host: str, port: int, keys: Keys | None) -> tuple[zmq.Socket[bytes], int]:
    """The socket that peers connect to, and its port. Raises OSError saying what to change."""
    server = context.socket(zmq.ROUTER)
    server.setsockopt(zmq.IPV6, 1)
    server.setsockopt(zmq.LINGER, 0)
    server.setsockopt(zmq.MAXMSGSIZE, protocol.MAX_MESSAGE_BYTES)
    server.setsockopt(zmq.RCVHWM, 64)  # messages a peer may have waiting
    server.setsockopt(zmq.SNDHWM, 64)
    server.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    server.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    server.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
    if keys is not None:
        zap = context.socket(zmq.REP)
        zap.bind("inproc://zeromq.zap.01")
        Thread(target=authenticate, args=(zap, keys.client[0]), daemon=True, name="authenticate").start()
        keys.guard(server)
    shown = f"[{host}]" if ":" in host else host
    try:
        server.bind(f"tcp://{shown}:{port or '*'}")
    except zmq.ZMQError as error:
        server.close()
        mend = "name an address of this machine" if error.errno == errno.EADDRNOTAVAIL else "choose a free port, or 0"
        # libzmq's words, without the address that it appends
        raise OSError(
            f"migration.listen: cannot listen on {shown}:{port}: {zmq.strerror(error.errno or 0)}; {mend}"
        ) from None
    endpoint: str = server.getsockopt_string(zmq.LAST_ENDPOINT)
    return server, int(endpoint.rpartition(":")[2])


class Server:
    """`stopping`: lookups are refused, what was found before may still be read and validated."""

    def __init__(self, pools: Pools, fingerprint: dict[str, str], data_port: int, door: Door | None) -> None:
        self._pools = pools
        self._fingerprint = fingerprint
        self._data_port = data_port
        self._door = door
        self._summing = ThreadPoolExecutor(2, thread_name_prefix="checksums")
        self._sums = 0
        self.stopping = False

    def run(self, server: zmq.Socket[bytes], context: zmq.Context[Any]) -> None:
        """Never returns. A thread of its own that blocks: a peer's question wakes nothing else."""
        summed = context.socket(zmq.PULL)
        summed.bind(_SUMMED)
        poller = zmq.Poller()
        poller.register(server, zmq.POLLIN)
        poller.register(summed, zmq.POLLIN)
        while True:
            for socket, _ in poller.poll():
                if socket is summed:
                    self._sums -= 1
                    server.send_multipart(summed.recv_multipart())
                else:
                    self._take(server, context)

    def _take(self, server: zmq.Socket[bytes], context: zmq.Context[Any]) -> None:
        peer, *parts = server.recv_multipart()
        try:
            request: Request = protocol.parse(parts, protocol.request_decoder)
        except ProtocolError as error:
            server.send_multipart([peer, *protocol.frames(Refused(0, "message", str(error)))])
            return
        if isinstance(request, Validate) and request.checksum:  # takes a while: beside this thread
            if self._sums == MAX_SUMS:
                busy = Refused(request.id, "busy", f"{MAX_SUMS} checksums are being made already")
                server.send_multipart([peer, *protocol.frames(busy)])
                return
            self._sums += 1
            self._summing.submit(self._sum, context, peer, request)
        else:
            server.send_multipart([peer, *protocol.frames(self.answer(request))])

    def _sum(self, context: zmq.Context[Any], peer: bytes, request: Validate) -> None:
        with context.socket(zmq.PUSH) as push:
            push.connect(_SUMMED)
            push.send_multipart([peer, *protocol.frames(self.answer(request))])

    def answer(self, request: Request) -> Reply:
        """Never raises: a peer's mistake is answered in words."""
        try:
            if isinstance(request, Ping):
                return Pong(request.id, self._fingerprint, self._pools.slots, self._pools.slot_bytes)
            if isinstance(request, Lookup):
                return self._lookup(request)
            return self._validate(request)
        except ValueError as error:
            return Refused(request.id, "message", str(error))

    def _lookup(self, request: Lookup) -> Reply:
        if self.stopping:
            return Refused(request.id, "busy", "this agent is about to restart")
        if (differs := difference(self._fingerprint, request.fingerprint)) is not None:
            return Refused(request.id, *differs)
        if len(request.keys) > protocol.MAX_KEYS * self._pools.key_bytes:
            raise ValueError(f"more than {protocol.MAX_KEYS} keys in one lookup")
        if not 0 <= request.lease_s <= MAX_LEASE_S:
            raise ValueError(f"lease_s is {request.lease_s}; allowed: 0 to {MAX_LEASE_S:g} s")
        slots, generations = self._pools.find(request.keys)
        self._pools.lease(slots, request.lease_s)
        return Found(
            request.id, slots, generations, self._pools.bases, self._pools.slot_bytes, self._data_port, self._door
        )

    def _validate(self, request: Validate) -> Reply:
        checksums = self._pools.checksums(request.slots) if request.checksum else b""
        valid = self._pools.still(request.slots, request.generations)
        self._pools.lease(request.slots, 0)
        return Validated(request.id, valid, checksums)
