# SPDX-License-Identifier: Apache-2.0
"""The agent's process: its standard input is a socket that brings a Spec, then Pulls; it ends when that closes.

It shares nothing with its engine but the pools' memory and that socket, so neither can hold up the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from typing import Any

import zmq

from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.data import DataPlane, DataPlaneError
from vllm_pega_connector.migration.peer import Peers
from vllm_pega_connector.migration.pools import Pools
from vllm_pega_connector.migration.protocol import Ended, Failed, ProtocolError, Pull, Ready, Spec, Stop
from vllm_pega_connector.migration.pull import Puller
from vllm_pega_connector.migration.same_host import Host
from vllm_pega_connector.migration.security import AllowedSources, Keys
from vllm_pega_connector.migration.serve import Server, bind

logger = logging.getLogger("vllm.pega")

MAX_PULLS = 256  # under way; the engine gets "busy" for more
STOP_GRACE_S = 1.0  # for peers that are reading from us


class Engine:
    """The engine's end of our standard input."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._unpacker = protocol.Unpacker(protocol.to_agent_decoder)

    @classmethod
    async def connect(cls, descriptor: int) -> Engine:
        return cls(*await asyncio.open_unix_connection(sock=socket.socket(fileno=descriptor)))

    async def receive(self) -> list[protocol.ToAgent]:
        """The next messages. Raises EOFError when the engine has gone."""
        while True:
            data = await self._reader.read(1 << 18)
            if not data:
                raise EOFError
            if messages := self._unpacker.feed(data):
                return messages

    def send(self, message: protocol.FromAgent) -> None:
        self._writer.write(protocol.pack(message))

    async def flush(self) -> None:
        await self._writer.drain()


class Agent:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pulls: set[asyncio.Task[None]] = set()
        self._receiving: asyncio.Task[None] | None = None  # visitors of this machine

    async def run(self) -> int:
        """Until the engine goes; the exit status."""
        spec, *rest = await self._engine.receive()
        assert isinstance(spec, Spec), "the first frame is the Spec"
        context: zmq.Context[Any] = zmq.Context()
        try:
            keys = Keys.derive(spec.token) if spec.token is not None else None
            pools = Pools(spec)
            memory = [(pool.address, pool.nbytes) for pool in pools.pools]
            listener, port = bind(context, spec.listen_host, spec.listen_port, keys)
            data = DataPlane(spec.data_host, spec.transport, spec.timeout_s, memory)
        except (DataPlaneError, OSError, RuntimeError, ValueError) as error:
            self._engine.send(Failed(str(error)))
            await self._engine.flush()
            return 1
        host = _host(pools) if spec.same_host else None
        server = Server(pools, spec.fingerprint, data.port, host.door if host is not None else None)
        peers = Peers(context, keys)
        allowed = AllowedSources(spec.allow_sources)
        puller = Puller(pools, data, peers, allowed, spec.fingerprint, spec.verify, spec.same_host)
        threading.Thread(target=_serve, args=(server, listener, context), daemon=True, name="serve").start()
        if host is not None:
            self._receiving = asyncio.create_task(host.run())
        self._engine.send(Ready(port, data.port))
        while True:
            for message in rest:
                if isinstance(message, Pull):
                    self._start(puller, message)
                elif isinstance(message, Stop):
                    server.stopping = True
                    await asyncio.sleep(STOP_GRACE_S)
                    return 0
            try:
                rest = await self._engine.receive()
            except EOFError:
                return 0

    def _start(self, puller: Puller, pull: Pull) -> None:
        if len(self._pulls) >= MAX_PULLS:
            nothing = bytes(len(pull.slots) // 4)
            reason = f"busy: {MAX_PULLS} pulls are under way already"
            self._engine.send(Ended(pull.id, "", nothing, nothing, reason, 0, {}))
            return
        task = asyncio.create_task(self._pull(puller, pull))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _pull(self, puller: Puller, pull: Pull) -> None:
        self._engine.send(await puller.pull(pull))


def _serve(server: Server, listener: zmq.Socket[bytes], context: zmq.Context[Any]) -> None:
    """An agent that no longer serves must not look alive: its engine starts another."""
    try:
        server.run(listener, context)
    except BaseException:
        logger.exception("migration: the agent stops serving")
        os._exit(1)


def _host(pools: Pools) -> Host | None:
    try:
        return Host(pools)
    except OSError as error:
        logger.warning("migration: agents of this machine cannot read from here directly: %s", error)
        return None


def main() -> int:
    logging.basicConfig(format="%(levelname)s pega agent: %(message)s", stream=sys.stderr)
    descriptor = os.dup(0)

    async def run() -> int:
        return await Agent(await Engine.connect(descriptor)).run()

    try:
        status = asyncio.run(run())
    except (EOFError, ConnectionError, ProtocolError) as error:
        logger.error("the engine's end of standard input: %s", error or "closed before it said what to do")
        status = 1
    # Mooncake's threads may be in the middle of a read; nothing of ours is left to tidy up.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
