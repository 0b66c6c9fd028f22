# SPDX-License-Identifier: Apache-2.0
"""KV whose right content is known token by token, and a transfer engine that moves it when a seed says so.

The KV of a position is a number that depends on every token up to it (and on salt, adapter and weights), as real KV
does. So whoever reads a slot can tell at once whether it holds what it should.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

VOCAB = 24  # small, so that a stop token comes up within a few tokens
POISON = -(1 << 40)  # minus the step that allocated the block
_MASK = (1 << 56) - 1


class Violation(BaseException):
    """KV was read or written that should not have been. No Exception: nothing on the way to the test may answer it."""


def mix(prefix: int, token: int) -> int:
    """The KV at a position, from the KV before it and its token (Knuth's MMIX multiplier)."""
    return (prefix * 6364136223846793005 + token + 1442695040888963407) & _MASK


class TokenSequence:
    """A prompt and all that greedy decoding would ever append to it: sampled tokens follow from the KV alone."""

    def __init__(self, prompt: Sequence[int], origin: int) -> None:
        self.tokens = list(prompt)
        self._origin = origin
        self._kv: list[int] = []

    def kv(self, start: int, end: int) -> list[int]:
        """The right content of positions [start, end)."""
        while len(self._kv) < end:
            at = len(self._kv)
            self._kv.append(mix(self._kv[-1] if at else self._origin, self.token(at)))
        return self._kv[start:end]

    def token(self, position: int) -> int:
        while len(self.tokens) <= position:
            at = len(self.tokens)
            self.tokens.append((self.kv(at - 1, at)[0] >> 20) % VOCAB)
        return self.tokens[position]

    def new_weights(self, known: int, origin: int) -> None:
        """The first `known` tokens stay; their KV, and what follows, is another."""
        del self.tokens[known:]
        self._kv.clear()
        self._origin = origin


@dataclass
class RankMemory:
    """One rank's GPU blocks and host slots. `mark` tells ranks apart: no rank may ever see another's KV."""

    gpu: np.ndarray  # int64 [blocks, block size]
    host: np.ndarray  # int64 [slots, block size]
    keys: dict[int, bytes]  # slot -> the key of a save that completed
    mark: int

    @classmethod
    def make(cls, blocks: int, slots: int, block_size: int, rank: int) -> RankMemory:
        gpu = np.full((blocks, block_size), POISON, np.int64)
        return cls(gpu, np.full((slots, block_size), POISON, np.int64), {}, rank << 56)

    def poison(self, blocks: Sequence[int], step: int) -> None:
        if blocks:
            self.gpu[blocks] = POISON - step


@dataclass
class Faults:
    """How often things go wrong, as probabilities."""

    refuse: float = 0.0  # queue full
    no_event: float = 0.0  # the compute stream gives no event: every job of the step is refused
    fail: float = 0.0
    timeout: float = 0.0
    report_twice: float = 0.0
    stall: float = 0.5  # a job makes no progress at an opportunity


@dataclass
class FakeResult:
    """What `TransferEngine.poll` gives, as far as the worker side reads it."""

    job_id: int
    direction: str
    status: str
    error: str = ""
    bytes: int = 4096
    ranges: int = 1
    backend: str = "memcpy"
    reason: str = ""
    queue_s: float = 0.0
    transfer_s: float = 0.001


@dataclass
class _Move:
    block: int
    slot: int
    key: bytes


@dataclass
class _Running:
    job_id: int
    direction: str
    todo: list[_Move]
    half_done: bool = False
    fails_as: str = ""  # status with which it will end, after `fails_at` moves are left
    fails_at: int = 0
    cancelled: bool = False


@dataclass
class FakeTransfers:
    """`TransferEngine` as the worker side calls it, over `RankMemory`; `run` is the copy engine's turn.

    `expected`: the right KV of a key's block, before the rank's mark.
    """

    memory: RankMemory
    rng: random.Random
    faults: Faults
    expected: Callable[[bytes], np.ndarray]
    seen: Counter[str]
    jobs: dict[int, _Running] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    results: list[FakeResult] = field(default_factory=list)
    frozen: bool = False  # for directed tests: nothing moves
    fail_next: str = ""  # for directed tests: the status with which the next job ends
    _events: set[int] = field(default_factory=set)

    # --- TransferEngine ---

    def record_event(self, stream: int = 0) -> int:
        if self.rng.random() < self.faults.no_event:
            raise RuntimeError("injected: no event")
        event = len(self.known) + 1
        self._events.add(event)
        return event

    def release_event(self, event: int) -> None:
        self._events.remove(event)

    def submit(self, job_id: int, direction: str, moves: bytes, keys: bytes = b"", event: int = 0,
               policy: object = None, objective: str = "", timeout_s: float = 30.0) -> bool:  # fmt: skip
        if job_id in self.known:
            raise Violation(f"job {job_id} was handed over twice")
        if event not in self._events:
            raise Violation(f"job {job_id} waits for event {event}, which does not exist")
        self.known.add(job_id)
        rows = np.frombuffer(moves, np.uint32).reshape(-1, 3)
        if not len(rows) or rows[:, 0].any() or not rows[:, 1].all():
            raise Violation(f"job {job_id} is empty, names another group, or the null block: {rows.tolist()}")
        if len(set(rows[:, 1])) != len(rows) or len(set(rows[:, 2])) != len(rows):
            raise Violation(f"job {job_id} names a block or slot twice: {rows.tolist()}")
        if rows[:, 1].max() >= len(self.memory.gpu) or rows[:, 2].max() >= len(self.memory.host):
            raise Violation(f"job {job_id} is out of bounds: {rows.tolist()}")
        width = len(keys) // len(rows)
        if not width or width * len(rows) != len(keys):
            raise Violation(f"job {job_id}: {len(keys)} bytes of keys for {len(rows)} rows")
        if self.rng.random() < self.faults.refuse:
            self.seen["refused"] += 1
            return False
        self._claim(job_id, direction, rows)
        todo = [_Move(int(b), int(s), keys[i * width : (i + 1) * width]) for i, (_, b, s) in enumerate(rows)]
        job = self.jobs[job_id] = _Running(job_id, direction, todo)
        draw = self.rng.random()
        if self.fail_next or draw < self.faults.fail + self.faults.timeout:
            job.fails_as = self.fail_next or ("failed" if draw < self.faults.fail else "timeout")
            job.fails_at = self.rng.randint(0, len(todo))
            self.fail_next = ""
        return True

    def cancel(self, job_id: int) -> bool:
        if job_id in self.jobs:
            self.jobs[job_id].cancelled = True
        return job_id in self.jobs

    def poll(self) -> list[FakeResult]:
        results, self.results = self.results, []
        return results

    @property
    def pending(self) -> int:
        return len(self.jobs) + len(self.results)

    # --- the copies ---

    def _claim(self, job_id: int, direction: str, rows: np.ndarray) -> None:
        """No two jobs in flight may touch the same memory unless both only read it."""
        blocks, slots = set(rows[:, 1].tolist()), set(rows[:, 2].tolist())
        for other in self.jobs.values():
            both_save, both_load = {direction, other.direction} == {"save"}, {direction, other.direction} == {"load"}
            for move in other.todo:
                if (move.block in blocks and not both_save) or (move.slot in slots and not both_load):
                    raise Violation(
                        f"{direction} job {job_id} and {other.direction} job {other.job_id}, still in flight, share "
                        f"block {move.block} or slot {move.slot}"
                    )
        if direction == "save":
            for slot in slots:
                self.memory.keys.pop(slot, None)

    def run(self, everything: bool = False) -> None:
        """Lets every job move a random number of blocks; one that is cancelled or fails stops halfway."""
        if self.frozen:
            return
        for job in list(self.jobs.values()):
            if everything or self.rng.random() >= self.faults.stall:
                self._advance(job, everything)

    def _advance(self, job: _Running, everything: bool) -> None:
        moves = len(job.todo) if everything else self.rng.randint(0, len(job.todo) + 1)
        for _ in range(moves):
            if job.cancelled or not job.todo or (job.fails_as and len(job.todo) <= job.fails_at):
                break
            self._copy(job, job.todo.pop())
        if job.todo and not job.cancelled and job.direction == "load" and not job.half_done:
            move = job.todo[-1]  # torn: one half of the next block
            half = self.memory.gpu.shape[1] // 2
            self.memory.gpu[move.block, :half] = self.memory.host[move.slot, :half]
            job.half_done = True
        if job.cancelled or not job.todo or (job.fails_as and len(job.todo) <= job.fails_at):
            status = job.fails_as or ("cancelled" if job.cancelled else "done")
            del self.jobs[job.job_id]
            self.seen[f"{job.direction} {status}"] += 1
            error = "" if status == "done" else "injected"
            self.results.append(FakeResult(job.job_id, job.direction, status, error))

    def _copy(self, job: _Running, move: _Move) -> None:
        memory = self.memory
        if job.direction == "load" and memory.keys.get(move.slot) != move.key:
            raise Violation(f"load job {job.job_id} reads slot {move.slot}, which holds another key, or none")
        expected = self.expected(move.key) + memory.mark
        source = memory.gpu[move.block] if job.direction == "save" else memory.host[move.slot]
        if not np.array_equal(source, expected):
            where = f"block {move.block}" if job.direction == "save" else f"slot {move.slot}"
            raise Violation(
                f"{job.direction} job {job.job_id} reads {where}, which is not what key {move.key.hex()[:12]} says: "
                f"{source.tolist()} instead of {expected.tolist()}"
            )
        if job.direction == "save":
            memory.host[move.slot] = source
            memory.keys[move.slot] = move.key
        else:
            memory.gpu[move.block] = source
            job.half_done = False
