# SPDX-License-Identifier: Apache-2.0
"""Instances without vLLM: a real host pool, a real agent process with a real Mooncake engine, on loopback."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_pega_connector._native import HostPool, SlotTable
from vllm_pega_connector.migration.client import AgentClient, Gone
from vllm_pega_connector.migration.protocol import Ended, Pool, Pull, Spec

SLOT_BYTES = 64 << 10
FINGERPRINT = {"model": "m", "dtype": "float32", "block_size": "32", "tensor_parallel": "1"}


def key(n: int) -> bytes:
    return hashlib.sha256(f"key {n}".encode()).digest()


def keys(numbers: range | list[int]) -> bytes:
    return b"".join(key(n) for n in numbers)


def content(n: int, rank: int = 0, size: int = SLOT_BYTES) -> bytes:
    """What is stored under key n, every byte of it made from n."""
    return random.Random(f"{n}/{rank}").randbytes(size)


def u32(slots: Any) -> bytes:
    return np.array(list(slots), np.uint32).tobytes()


class Instance:
    """A pool per rank and its agent. What the scheduler would do with slots, the test does."""

    def __init__(self, slots: int = 64, ranks: int = 1, slot_bytes: int = SLOT_BYTES, **spec: Any) -> None:
        self.slot_bytes = slot_bytes
        self.pools = [HostPool([(slot_bytes, slots)]) for _ in range(ranks)]
        self.tables = [SlotTable(pool, 0, 32) for pool in self.pools]
        shared = [Pool(p.data_fd, p.table_fd, [(slot_bytes, slots)]) for p in self.pools]
        host = spec.pop("host", "127.0.0.1")
        defaults = dict(
            pools=shared, slot_class=0, key_bytes=32, slots=slots, fingerprint=FINGERPRINT, listen_host=host,
            listen_port=0, data_host=host, allow_sources=["127.0.0.0/8", "::1"], token=None, transport="tcp",
            timeout_s=5.0, verify=False, same_host=False,
        )  # fmt: skip
        self.spec = Spec(**{**defaults, **spec})
        self.client = AgentClient(lambda: self.spec, [fd for p in shared for fd in (p.data_fd, p.table_fd)])
        self.events: list[Any] = []
        self._pull = 0

    def __enter__(self) -> Instance:
        self.wait(lambda: self.client.ready)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    @property
    def address(self) -> str:
        host = self.spec.listen_host
        return f"[{host}]:{self.client.port}" if ":" in host else f"{host}:{self.client.port}"

    def wait(self, condition: Callable[[], Any], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s; {self.client.failure}"
            self.events += self.client.poll()
            time.sleep(0.002)

    # --- memory ---

    def store(self, numbers: Any, slots: Any, contents: Callable[[int, int], bytes] | None = None) -> None:
        for n, slot in zip(numbers, slots, strict=True):
            for rank, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
                table.begin(u32([slot]))
                pool.slot_view(0, slot)[:] = contents(n, rank) if contents else content(n, rank, self.slot_bytes)
                table.end(u32([slot]), key(n), self.slot_bytes)

    def holds(self, n: int, slot: int) -> bool:
        """The slot says that it holds key n, and its bytes are those of key n, on every rank."""
        return all(
            pool.slot_state(0, slot)[1] == key(n)
            and pool.slot_state(0, slot)[0] % 2 == 0
            and bytes(pool.slot_view(0, slot)) == content(n, rank, self.slot_bytes)
            for rank, pool in enumerate(self.pools)
        )

    def says_nothing(self, slot: int) -> bool:
        """Nobody would believe what the slot holds."""
        return all(p.slot_state(0, slot)[0] % 2 == 1 or not p.slot_state(0, slot)[1] for p in self.pools)

    # --- pulls ---

    def post(self, source: str | list[str], numbers: Any, slots: Any, timeout_s: float = 5.0) -> int:
        self._pull += 1
        sources = [source] if isinstance(source, str) else source
        assert self.client.post(Pull(self._pull, sources, keys(numbers), u32(slots), timeout_s))
        return self._pull

    def ended(self, pull: int, seconds: float = 30.0) -> Ended:
        def found() -> Ended | None:
            return next((e for e in self.events if isinstance(e, Ended) and e.id == pull), None)

        self.wait(found, seconds)
        end = found()
        assert end is not None
        return end

    def pull(self, source: str | list[str], numbers: Any, slots: Any, timeout_s: float = 5.0) -> Ended:
        return self.ended(self.post(source, numbers, slots, timeout_s))

    def gone(self) -> int:
        return sum(isinstance(e, Gone) for e in self.events)
