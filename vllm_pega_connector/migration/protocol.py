# SPDX-License-Identifier: Apache-2.0
"""The messages of agents, to each other and to their engines.

Between agents: ZMQ, two frames, a header that names the version and a msgpack struct. Between an engine and its
agent: one stream socket, frames of msgpack behind a length of four bytes. Everything is bounded in size, and what
cannot be read is refused in words.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import msgspec

HEADER = b"pega-migration/2"
# A lookup of 32,768 keys of 32 bytes is 1 MiB; its answer is smaller. Longer prompts are asked for in parts.
MAX_MESSAGE_BYTES = 2 << 20
MAX_KEYS = 32_768
MAX_FRAME_BYTES = 8 << 20  # engine to agent: keys, slots, sources of one pull


class ProtocolError(ValueError):
    """What came cannot be read; says what is wrong with it."""


# --- agent to agent -------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=False, forbid_unknown_fields=True):
    id: int


class Ping(_Message, frozen=True):
    """Who is there? Answered with a Pong."""


class Pong(_Message, frozen=True):
    fingerprint: dict[str, str]
    slots: int
    slot_bytes: int


class Lookup(_Message, frozen=True):
    """Which of these keys, from the first on, are there? What is found is leased for `lease_s`."""

    fingerprint: dict[str, str]
    keys: bytes  # joined
    lease_s: float


class Door(msgspec.Struct, frozen=True):
    """Where an agent hands its pools' descriptors to agents of its machine: an abstract Unix socket, and a secret."""

    name: str
    ticket: bytes


class Found(_Message, frozen=True):
    """The longest run: n slots (uint32) and, rank by rank, n generations each (uint64).

    bases: address of the pool of each rank in the agent's process. data_port: of the Mooncake engine. door: for agents
    of the same machine.
    """

    slots: bytes
    generations: bytes
    bases: list[int]
    slot_bytes: int
    data_port: int
    door: Door | None = None


class Validate(_Message, frozen=True):
    """Do these slots still hold what they held? Ends their lease. checksum: also tell a sum of each rank's bytes."""

    slots: bytes
    generations: bytes
    checksum: bool = False


class Validated(_Message, frozen=True):
    """valid: one byte a slot. checksums: rank by rank, n CRC-32 (uint32) each, taken before `valid`."""

    valid: bytes
    checksums: bytes = b""


class Refused(_Message, frozen=True):
    """No; `field` is the field of the fingerprint that differs, or what is wrong with the message."""

    field: str
    reason: str


Request = Ping | Lookup | Validate
Reply = Pong | Found | Validated | Refused

# --- engine to agent ------------------------------------------------------------------------------------------


class Pool(msgspec.Struct, frozen=True):
    """A rank's host pool, by the descriptors that the agent inherits."""

    data_fd: int
    table_fd: int
    slot_classes: list[tuple[int, int]]


class Spec(msgspec.Struct, frozen=True, tag=True):
    """What an agent is to do; the first frame it gets. Hosts and ports as in the configuration."""

    pools: list[Pool]
    slot_class: int
    key_bytes: int
    slots: int  # of the class, that every rank has
    fingerprint: dict[str, str]
    listen_host: str
    listen_port: int
    data_host: str
    allow_sources: list[str]
    token: bytes | None
    transport: str
    timeout_s: float
    verify: bool
    same_host: bool  # hand pools to agents of this machine, and take theirs


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Fetch these keys into these slots (uint32) from whichever source has most of them."""

    id: int
    sources: list[str]
    keys: bytes
    slots: bytes
    timeout_s: float
    posted: float = msgspec.field(default_factory=time.monotonic)  # one clock for all processes of a machine


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End soon: serve what is leased, take nothing new."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    port: int
    data_port: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A pull is over.

    published: one byte a slot, 1 = it holds its key now. unsafe: one byte a slot, 1 = a failed read may still
    write it, for as long as this agent lives. reason: "" or why less than all came, a word and then words for
    people. seconds by phase: post (until the agent took it up), lookup, queue (until the first descriptors were
    handed to Mooncake), read, validate. gap_s: the longest time between two batches handed to Mooncake. path: "network"
    or "same_host", by which the bytes came; "" if none did.
    """

    id: int
    source: str
    published: bytes
    unsafe: bytes
    reason: str
    nbytes: int
    seconds: dict[str, float]
    gap_s: float = 0.0
    path: str = ""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The agent cannot start; the reason says how to mend it."""

    reason: str


ToAgent = Spec | Pull | Stop
FromAgent = Ready | Ended | Failed

# --- bytes ----------------------------------------------------------------------------------------------------

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(Request)
reply_decoder = msgspec.msgpack.Decoder(Reply)
to_agent_decoder = msgspec.msgpack.Decoder(ToAgent)
from_agent_decoder = msgspec.msgpack.Decoder(FromAgent)


def frames(message: Request | Reply) -> list[bytes]:
    """A message to a peer. Raises ProtocolError if it is too large to be taken."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message of {len(body)} bytes; allowed: {MAX_MESSAGE_BYTES}")
    return [HEADER, body]


def parse(parts: list[bytes], decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Raises ProtocolError for anything but a message of our version."""
    if len(parts) != 2:
        raise ProtocolError(f"a message of {len(parts)} frames; allowed: 2, {HEADER.decode()} and a body")
    header, body = parts
    if header != HEADER:
        raise ProtocolError(f"version {header[:32]!r}; this agent speaks {HEADER.decode()}")
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a body of {len(body)} bytes; allowed: {MAX_MESSAGE_BYTES}")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"an unreadable body: {error}") from None


def pack(message: Any) -> bytes:
    """A frame between engine and agent. Raises ProtocolError if it is too large."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes; allowed: {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "little") + body


class Unpacker:
    """Frames out of a stream of bytes."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages that are complete now. Raises ProtocolError."""
        self._pending += data
        messages = []
        while len(self._pending) >= 4:
            length = int.from_bytes(self._pending[:4], "little")
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; allowed: {MAX_FRAME_BYTES}")
            if len(self._pending) < 4 + length:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._pending[4 : 4 + length])))
            except msgspec.DecodeError as error:
                raise ProtocolError(f"an unreadable frame: {error}") from None
            del self._pending[: 4 + length]
        return messages
