# SPDX-License-Identifier: Apache-2.0
"""The engine's side of its agent: a thread starts it, waits for its end and starts the next; the engine never waits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from vllm_pega_connector.guard import log_limited, logger
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.protocol import Ended, Failed, FromAgent, ProtocolError, Pull, Ready, Spec, Stop

FIRST_RESTART_S, LAST_RESTART_S = 0.5, 30.0
STEADY_S = 60.0  # an agent that lived this long is not failing at start
MAX_UNSENT_BYTES = 32 << 20  # pulls that the agent has not taken yet


class Gone(msgspec.Struct, frozen=True):
    """The agent's process has ended: nothing it was told will be answered, and nothing of it can write any more."""


class _Running:
    """One agent process and our end of its standard input. Made by the thread, then used by the engine alone."""

    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self.process = process
        self.link = link
        self.unpacker = protocol.Unpacker(protocol.from_agent_decoder)
        self.unsent = bytearray()
        self.lost = False  # the link is useless; the process may live on for a moment
        self.ended = threading.Event()


Event = Ended | Gone


def _environment() -> dict[str, str]:
    """Ours, and the package where this process found it: its path may be known to this process alone."""
    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


class AgentClient:
    """One agent after the other, for one engine. Everything public is for the engine's thread.

    `spec` is called in the thread, and may wait; `descriptors` are what the agent inherits, the spec's pools.
    """

    def __init__(self, spec: Callable[[], Spec], descriptors: Sequence[int]) -> None:
        self._spec = spec
        self._descriptors = tuple(descriptors)
        self._started: deque[_Running] = deque()
        self._now: _Running | None = None
        self._closed = threading.Event()
        self._last_said = ""
        self._over = False  # the first agent has been ready, or failed
        self.port = 0  # once known, kept over restarts
        self.ready = False
        self.starts = 0
        self.failure = ""  # why it cannot start, in its own words
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="pega-agent-watch")
        self._watcher.start()

    @property
    def pid(self) -> int | None:
        return self._now.process.pid if self._now is not None else None

    @property
    def starting(self) -> bool:
        """The first agent is not there yet, and nothing is known against it. For a later one nobody waits."""
        return not self.ready and self.starts <= 1 and not self._over

    # --- the thread ---

    def _watch(self) -> None:
        pause_s = FIRST_RESTART_S
        while not self._closed.is_set():
            started = time.monotonic()
            try:
                running = self._start()
            except Exception as error:  # no process, no memory, no descriptor: it may pass
                self.failure = f"cannot start the agent: {error}"
                status: int | str = "none"
            else:
                self._started.append(running)
                status = running.process.wait()
                running.ended.set()
            if self._closed.is_set():
                return
            pause_s = FIRST_RESTART_S if time.monotonic() - started > STEADY_S else min(2 * pause_s, LAST_RESTART_S)
            log_limited(
                "agent",
                "PegaConnector: the migration agent ended (exit status %s); serving goes on, the next starts in %.0f s",
                status,
                pause_s,
            )
            self._closed.wait(pause_s)

    def _start(self) -> _Running:
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_pega_connector.migration.agent"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=_environment(),
                pass_fds=self._descriptors,
                start_new_session=True,  # a Ctrl-C is for the engine
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.starts += 1
        running = _Running(process, ours)
        try:
            spec = self._spec()  # while the process imports
            ours.sendall(protocol.pack(msgspec.structs.replace(spec, listen_port=self.port or spec.listen_port)))
        except OSError:
            pass  # it has ended already; its exit status tells
        except BaseException:
            process.kill()
            process.wait()
            ours.close()
            raise
        ours.setblocking(False)
        return running

    # --- the engine ---

    def post(self, pull: Pull) -> bool:
        """False if there is no agent now, or it is far behind: then nothing was taken."""
        if not self.ready or self._now is None or len(self._now.unsent) > MAX_UNSENT_BYTES:
            return False
        try:
            self._now.unsent += protocol.pack(pull)
        except ProtocolError:
            return False
        self._send(self._now)
        return True

    def poll(self) -> list[Event]:
        """What has happened since the last call. Costs one system call when nothing has."""
        events: list[Event] = []
        if self._now is None:
            if not self._started:
                return events
            self._now = self._started.popleft()
        over = self._now.ended.is_set()  # before reading: what it said last comes first
        self._send(self._now)
        for message in self._receive(self._now):
            if isinstance(message, Ended):
                events.append(message)
            elif isinstance(message, Ready):
                self.ready, self.port, self.failure, self._over = not over, message.port, "", True
                logger.info("PegaConnector: the migration agent listens on port %d", message.port)
            elif isinstance(message, Failed):
                self.failure, self._over = message.reason, True
                if self.failure != self._last_said:
                    self._last_said = self.failure
                    logger.warning("PegaConnector: no migration: %s", self.failure)
        if over:
            self._now.link.close()
            self._now, self.ready = None, False
            events.append(Gone())
        return events

    def _send(self, running: _Running) -> None:
        while running.unsent and not running.lost:
            try:
                sent = running.link.send(memoryview(running.unsent)[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self._lose(running)
                return
            del running.unsent[:sent]

    def _receive(self, running: _Running) -> list[FromAgent]:
        messages: list[FromAgent] = []
        while not running.lost:
            try:
                data = running.link.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._lose(running)
                break
            try:
                messages += running.unpacker.feed(data)
            except ProtocolError as error:
                logger.error("PegaConnector: the migration agent speaks nonsense: %s", error)
                self._lose(running)
        return messages

    def _lose(self, running: _Running) -> None:
        running.lost, self.ready = True, False
        running.process.kill()

    def stop(self) -> None:
        """Lets the agent end by itself, after those who are reading from it; another one follows."""
        if self.ready and self._now is not None:
            self._now.unsent += protocol.pack(Stop())
            self._send(self._now)
            self.ready = False

    def kill(self) -> None:
        """Ends the agent at once; another one follows."""
        if self._now is not None:
            self._now.process.kill()

    def close(self) -> None:
        """Ends the agent for good."""
        self._closed.set()
        for running in [*self._started, *([self._now] if self._now is not None else [])]:
            running.lost = True
            running.process.kill()  # it only reads and writes memory that is about to go
            running.link.close()
        self._watcher.join(5.0)
        self._now, self.ready = None, False
        self._started.clear()
