# SPDX-License-Identifier: Apache-2.0
"""What a soak does, as data: made from a seed, written down before it is done, replayed and shrunk from a file."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

POLICIES = ("auto", "memcpy", "kernel", "chunked", "staged")
LIMITS = {"chunk_bytes": 65536, "inflight_chunks": 1}
MALFORMED = (17, "gpu", {"backend": "auto", "chunk_bytes": -1}, {"bakend": "memcpy"})
MODELS = ("", "", "", "sss", "sfs")  # "" = full attention; s, f: a layer with a sliding window, a full one
MAX_PROMPT = 850  # of the model's 1,024 tokens


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Ends the engine before, if there is one, and starts another."""

    config: dict[str, Any]
    options: dict[str, Any]
    host_blocks: int


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A request. Its prompt: `stem` and `tail`, by (seed, tokens); or all of request `after` and `tail`."""

    id: int
    stem: tuple[int, int]
    tail: tuple[int, int]
    tokens: int
    after: int | None = None
    pega: dict[str, Any] = {}


class Step(msgspec.Struct, frozen=True, tag="step"):
    pass


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    id: int


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """In the middle of work, as an operator may: refused by vLLM while blocks are held."""

    connector: bool


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Finish everything, compare every token, look at what is held and at the process. Then forget: "" nothing, "gpu",
    "all"."""

    forget: str


Operation = Start | Add | Step | Abort | Reset | Check
_decoder = msgspec.json.Decoder(Operation)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 1024), k=count))


def operations(seed: str) -> Iterator[Operation]:
    """Without end. Equal seeds give equal operations."""
    rng = random.Random(seed)
    next_id = 0
    while True:
        yield start(rng)
        subjects = [rng.randrange(1 << 30) for _ in range(3)]  # come back, round after round
        for _ in range(rng.randint(12, 40)):
            yield from one_round(rng, rng.choice(subjects), next_id)
            next_id += 100


def policy(rng: random.Random) -> Any:
    backend = rng.choice(POLICIES)
    return backend if rng.random() < 0.7 else {"backend": backend, **LIMITS}


def start(rng: random.Random) -> Start:
    config = {
        "load_policy": policy(rng),
        "save_policy": policy(rng),
        "objective": rng.choice(("throughput", "balanced", "tail", "strict")),
        "save_decode": rng.random() < 0.8,
        "max_pending_save_blocks": rng.choice(("auto", 2, 32)),
    }
    options = {
        "num_gpu_blocks_override": rng.choice((48, 64, 96)),
        "max_num_batched_tokens": rng.choice((128, 256, 512)),
        "async_scheduling": rng.random() < 0.5,
    }
    return Start(config, options, host_blocks=rng.choice((40, 120, 400)))  # less than what three subjects ask


def one_round(rng: random.Random, seed: int, first_id: int) -> Iterator[Operation]:
    """Requests that arrive, share prefixes, go on from each other, are aborted; resets among them; a check."""
    stems = [(seed + i, rng.choice((31, 32, 64, 96, 200))) for i in range(4)]
    heavy = rng.random() < 0.2  # wants more blocks than there are: preemption
    left = list(range(first_id, first_id + (8 if heavy else rng.randint(8, 24))))
    added: list[int] = []
    while left:
        if rng.random() < (0.9 if heavy else 0.4):
            tail = (seed + 10 + rng.randrange(9), 300 if heavy else rng.choice((1, 31, 32, 33, 100, 180)))
            after = rng.choice(added) if added and rng.random() < 0.3 else None
            ask = Add(
                left.pop(0), rng.choice(stems), tail, 120 if heavy else rng.choice((1, 7, 33, 64)), after, params(rng)
            )
            added.append(ask.id)
            yield ask
        if added and rng.random() < 0.04:
            yield Abort(rng.choice(added))
        if rng.random() < 0.04:
            yield Reset(connector=rng.random() < 0.3)
        yield Step()
    yield Check(rng.choice(("", "gpu", "gpu", "gpu", "all")))


def params(rng: random.Random) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    if rng.random() < 0.5:
        asked |= {"load_policy": rng.choice(POLICIES), "save_policy": rng.choice(POLICIES)}
    if rng.random() < 0.05:
        asked["save"] = False
    if rng.random() < 0.05:
        asked["load_policy"] = rng.choice(MALFORMED)
    return asked


def write(path: Path, items: Iterable[Operation]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(line(item) for item in items))


def line(item: Operation) -> bytes:
    return msgspec.json.encode(item) + b"\n"


def read(path: Path) -> list[Operation]:
    return [_decoder.decode(text) for text in path.read_bytes().splitlines()]
