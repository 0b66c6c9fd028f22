# SPDX-License-Identifier: Apache-2.0
"""The data plane: Mooncake's transfer engine reading remote pools, one process, in threads that hold no GIL."""

from __future__ import annotations

import ctypes
import glob
import itertools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

# Mooncake over TCP refuses beyond 1,024 queued descriptors a peer (0.3.13). A batch is small, so that work is handed
# over every few milliseconds and little is in doubt after a failure.
BATCH_DESCRIPTORS = 256
BATCH_BYTES = 16 << 20
BATCHES_IN_FLIGHT = 4
# A descriptor takes one of four lanes, at 60 to 85 us and 1 to 2 GB/s each over loopback: best at 256 KiB to 1 MiB.
DESCRIPTOR_BYTES = 1 << 20
MOONCAKE_TIMEOUT_FLOOR_S = 5  # Mooncake takes no less


class DataPlaneError(RuntimeError):
    """Mooncake cannot be used here; says how to mend it."""


@dataclass(frozen=True)
class Descriptors:
    """What is to be read, one column each (int64): from where, to where, how much, and which of the slots, counted
    within the pull, each covers: from `first` on, up to `last`."""

    remote: np.ndarray
    local: np.ndarray
    nbytes: np.ndarray
    first: np.ndarray
    last: np.ndarray

    def __len__(self) -> int:
        return len(self.nbytes)

    @classmethod
    def runs(
        cls, remote_base: int, local_base: int, remote_slots: np.ndarray, local_slots: np.ndarray, slot_bytes: int
    ) -> Descriptors:
        """One for each run of slots that are neighbours on both sides, cut at slot boundaries so that none is above
        DESCRIPTOR_BYTES, unless one slot is."""
        remote_slots, local_slots = remote_slots.astype(np.int64), local_slots.astype(np.int64)
        count = len(remote_slots)
        at = np.arange(count)
        broken = np.ones(count, bool)
        broken[1:] = (np.diff(remote_slots) != 1) | (np.diff(local_slots) != 1)
        run_start = np.maximum.accumulate(np.where(broken, at, 0))
        first = np.flatnonzero((at - run_start) % max(1, DESCRIPTOR_BYTES // slot_bytes) == 0)
        last = np.append(first[1:], count) if count else first
        return cls(
            remote_base + remote_slots[first] * slot_bytes,
            local_base + local_slots[first] * slot_bytes,
            (last - first) * slot_bytes,
            first,
            last,
        )

    @classmethod
    def joined(cls, parts: Sequence[Descriptors]) -> Descriptors:
        columns = (f.name for f in fields(cls))
        return cls(*(np.concatenate([getattr(part, column) for part in parts]) for column in columns))

    def slots(self, begin: int, end: int, count: int) -> np.ndarray:
        """Which of `count` slots the descriptors from `begin` up to `end` cover, as a mask."""
        edges = np.zeros(count + 1, np.int64)
        np.add.at(edges, self.first[begin:end], 1)
        np.add.at(edges, self.last[begin:end], -1)
        covered: np.ndarray = np.cumsum(edges)[:count] > 0
        return covered


@dataclass(frozen=True)
class Reading:
    """What came of a read. What lies between `landed` and `started`, both counted in descriptors from the first, may
    still be written at any time, for as long as this process lives."""

    landed: int
    started: int
    handed: tuple[float, ...]  # time.monotonic() at which each batch was handed to Mooncake

    @property
    def gap_s(self) -> float:
        """The longest time between two batches handed over."""
        return max((b - a for a, b in itertools.pairwise(self.handed)), default=0.0)


def batches(nbytes: np.ndarray) -> Iterator[tuple[int, int]]:
    """(begin, end) of batches of descriptors, in order; each within BATCH_DESCRIPTORS, and within BATCH_BYTES unless
    one descriptor is larger."""
    until = np.cumsum(nbytes)
    begin = 0
    while begin < len(nbytes):
        before = until[begin] - nbytes[begin]
        fitting = int(np.searchsorted(until, before + BATCH_BYTES, side="right"))
        end = min(max(fitting, begin + 1), begin + BATCH_DESCRIPTORS, len(nbytes))
        yield begin, end
        begin = end


def _environment(transport: str, timeout_s: float, host: str) -> dict[str, str]:
    """Mooncake is set up by environment variables, read when it is imported or initialised."""
    env = {
        "MC_TRANSFER_TIMEOUT": str(max(MOONCAKE_TIMEOUT_FLOOR_S, math.ceil(timeout_s))),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(MOONCAKE_TIMEOUT_FLOOR_S),
        "MC_TCP_BIND_ADDRESS": host,  # releases that do not know it listen on every interface
        "MC_LOG_LEVEL": "ERROR",
    }
    if transport == "tcp":
        env["MC_FORCE_TCP"] = "1"
    if transport == "nvlink":
        env["MC_FORCE_MNNVL"] = "1"
    if ":" in host:
        env["MC_USE_IPV6"] = "1"
    return env


def _import_engine() -> Any:
    """Mooncake's class. The wheels for CUDA need libcudart in the process, which PyTorch's wheels bring along."""
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError:
        raise DataPlaneError(
            "Mooncake is not installed: pip install mooncake-transfer-engine-cuda13 (CUDA 13), "
            "mooncake-transfer-engine (CUDA 12) or mooncake-transfer-engine-non-cuda"
        ) from None
    except ImportError as first:
        for library in (found for folder in sys.path for found in glob.glob(f"{folder}/nvidia/*/lib/libcudart.so.*")):
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        try:
            from mooncake.engine import TransferEngine
        except ImportError:
            raise DataPlaneError(
                f"Mooncake cannot be loaded: {first}; `pega doctor` says which package brings it"
            ) from None
    return TransferEngine


class DataPlane:
    """One Mooncake engine over the pools of this instance. `read` blocks its thread; everything else is brief."""

    def __init__(self, host: str, transport: str, timeout_s: float, memory: Iterable[tuple[int, int]]) -> None:
        """`memory`: (address, bytes) of each pool. Raises DataPlaneError."""
        for name, value in _environment(transport, timeout_s, host).items():
            os.environ.setdefault(name, value)
        self._engine = _import_engine()()
        protocol = "rdma" if transport == "auto" else transport
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise DataPlaneError(
                f"Mooncake did not start on {host}: it needs two free ports from MC_MIN_RPC_PORT (15000) to "
                f"MC_MAX_RPC_PORT (17000), and a device for transport {transport!r}"
            )
        self.port: int = self._engine.get_rpc_port()
        for address, nbytes in memory:
            status = self._engine.register_memory(address, nbytes)
            if status != 0:
                raise DataPlaneError(
                    f"Mooncake cannot register {nbytes / 2**30:.1f} GiB of the pool (error {status}); for RDMA raise "
                    "`ulimit -l`, or set migration.transport to tcp"
                )

    def read(self, peer: str, descriptors: Descriptors) -> Reading:
        """Reads all of it from the engine at `peer` ("host:port")."""
        left = batches(descriptors.nbytes)
        remote, local, sizes = (c.tolist() for c in (descriptors.remote, descriptors.local, descriptors.nbytes))
        handed: list[float] = []
        flying: deque[tuple[int, int]] = deque()  # (Mooncake's batch id, descriptors)
        landed = started = 0
        good = True
        while True:
            while good and len(flying) < BATCHES_IN_FLIGHT and (batch := next(left, None)) is not None:
                begin, end = batch
                ticket = self._engine.batch_transfer_async_read(
                    peer, local[begin:end], remote[begin:end], sizes[begin:end]
                )
                if ticket == 0:  # nothing was begun; asking for its status would end the process
                    good = False
                    break
                handed.append(time.monotonic())
                started = end
                flying.append((ticket, end - begin))
            if not flying:
                return Reading(landed, started, tuple(handed))
            ticket, count = flying.popleft()
            if self._engine.get_batch_transfer_status([ticket]) != 0:  # exactly once a ticket: it is freed by this
                good = False
            elif good:
                landed += count
