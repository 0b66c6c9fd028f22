# SPDX-License-Identifier: Apache-2.0
"""The engine's side of its agent: starts it, watches it, starts it again. Nothing in here waits for anything."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_pega_connector.guard import logger
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.protocol import Ended, Failed, FromAgent, ProtocolError, Pull, Ready, Spec, Stop

FIRST_RESTART_S, LAST_RESTART_S = 0.5, 30.0
STEADY_S = 60.0  # an agent that lived this long is not failing at start
MAX_UNSENT_BYTES = 32 << 20  # pulls that the agent has not taken yet


class Gone(msgspec.Struct, frozen=True):
    """The agent's process has ended: nothing it was told will be answered, and nothing of it can write any more."""


Event = Ended | Gone


def _environment() -> dict[str, str]:
    """Ours, and the package where this process found it: its path may be known to this process alone."""
    home = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


class AgentClient:
    """One agent after the other, for one engine. Used by the engine's thread alone."""

    def __init__(self, spec: Spec, descriptors: Sequence[int]) -> None:
        self._spec = spec
        self._descriptors = tuple(descriptors)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starter: threading.Thread | None = None
        self._unpacker = protocol.Unpacker(protocol.from_agent_decoder)
        self._unsent = bytearray()
        self._started = 0.0
        self._restart_at: float | None = time.monotonic()
        self._restart_s = FIRST_RESTART_S
        self._eof = False
        self._closed = False
        self.port = spec.listen_port  # once known, kept over restarts
        self.ready = False
        self.starts = 0
        self.failure = ""  # why it cannot start, in its own words

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def post(self, pull: Pull) -> bool:
        """False if there is no agent now, or it is far behind: then nothing was taken."""
        if not self.ready or self._eof or len(self._unsent) > MAX_UNSENT_BYTES:
            return False
        try:
            self._unsent += protocol.pack(pull)
        except ProtocolError:
            return False
        self._send()
        return True

    def poll(self) -> list[Event]:
        """What has happened since the last call. Costs one system call when nothing has."""
        events: list[Event] = []
        if self._starter is not None:
            if self._starter.is_alive():
                return events
            self._starter = None
        if self._socket is not None and not self._eof:
            self._send()
            for message in self._receive():
                if isinstance(message, Ended):
                    events.append(message)
                elif isinstance(message, Ready):
                    self.ready, self.port, self.failure = True, message.port, ""
                    logger.info("PegaConnector: migration agent listens on port %d", message.port)
                elif isinstance(message, Failed):
                    self.failure = message.reason
        if self._process is not None and self._process.poll() is not None:
            for message in self._receive():  # what it said last
                if isinstance(message, Ended):
                    events.append(message)
                elif isinstance(message, Failed):
                    self.failure = message.reason
            events.append(Gone())
            self._bury()
        elif self._process is None and self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._restart_at = None
            # fork and exec take milliseconds, more for a process that maps much: not on the engine's thread.
            self._starter = threading.Thread(target=self._start, daemon=True, name="pega-agent-start")
            self._starter.start()
        return events

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        spec = msgspec.structs.replace(self._spec, listen_port=self.port)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "vllm_pega_connector.migration.agent"],
                stdin=theirs.fileno(),
                env=_environment(),
                stdout=subprocess.DEVNULL,
                pass_fds=self._descriptors,
                start_new_session=True,  # a Ctrl-C is for the engine
            )
        except OSError as error:
            self.failure = f"cannot start {sys.executable}: {error}"
            ours.close()
            self._restart_at = time.monotonic() + LAST_RESTART_S
            return
        finally:
            theirs.close()
        self._started = time.monotonic()
        self.starts += 1
        self._unsent = bytearray(protocol.pack(spec))
        self._unpacker = protocol.Unpacker(protocol.from_agent_decoder)
        self._eof = False
        self._socket, self._process = ours, process

    def _bury(self) -> None:
        assert self._process is not None
        if self._socket is not None:
            self._socket.close()
        status, lived = self._process.returncode, time.monotonic() - self._started
        self._restart_s = FIRST_RESTART_S if lived > STEADY_S else min(2 * self._restart_s, LAST_RESTART_S)
        why = f": {self.failure}" if self.failure else f" (exit status {status})"
        if not self._closed:
            logger.warning(
                "PegaConnector: the migration agent ended%s; serving goes on, the next one starts in %.1f s",
                why,
                self._restart_s,
            )
            self._restart_at = time.monotonic() + self._restart_s
        self._process, self._socket, self.ready = None, None, False

    def _send(self) -> None:
        assert self._socket is not None
        while self._unsent:
            try:
                sent = self._socket.send(memoryview(self._unsent)[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self._lost()
                return
            del self._unsent[:sent]

    def _receive(self) -> list[FromAgent]:
        messages: list[FromAgent] = []
        while self._socket is not None and not self._eof:
            try:
                data = self._socket.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._lost()
                break
            try:
                messages += self._unpacker.feed(data)
            except ProtocolError as error:
                logger.error("PegaConnector: the migration agent speaks nonsense: %s", error)
                self.kill()
                self._lost()
        return messages

    def _lost(self) -> None:
        """The socket is useless; the process may still live, so its slots are not safe yet."""
        self._eof = True
        self.ready = False
        self.kill()

    def stop(self) -> None:
        """Lets the agent end by itself, after those who are reading from it."""
        if self.ready:
            self._unsent += protocol.pack(Stop())
            self._send()
            self.ready = False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the agent for good: with its standard input."""
        self._closed, self._restart_at = True, None
        if self._starter is not None and self._starter is not threading.current_thread():
            self._starter.join()
        if self._socket is not None:
            self._eof = True
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
