# SPDX-License-Identifier: Apache-2.0
"""How a worker's pool reaches the agent: by process and descriptor, opened once by the engine, inherited from there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def machine() -> str:
    """This kernel and process namespace: whose processes can open each other's descriptors."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + os.readlink("/proc/self/ns/pid")


@dataclass(frozen=True)
class PoolShare:
    """A pool's two memory files as descriptors of process `pid`, and what they are, lest the numbers mean others."""

    machine: str
    pid: int
    descriptors: tuple[int, int]  # data, table
    inodes: tuple[int, int]

    @classmethod
    def of(cls, data_fd: int, table_fd: int) -> PoolShare:
        return cls(machine(), os.getpid(), (data_fd, table_fd), (os.fstat(data_fd).st_ino, os.fstat(table_fd).st_ino))

    def open(self) -> tuple[int, int]:
        """Descriptors of our own, to be closed by the caller. Raises OSError saying why not."""
        if self.machine != machine():
            raise OSError("the worker ranks are on several machines or in several process namespaces")
        opened: list[int] = []
        try:
            for descriptor, inode in zip(self.descriptors, self.inodes, strict=True):
                # O_RDWR: a new open file of the same memory.
                opened.append(os.open(f"/proc/{self.pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC))
                if os.fstat(opened[-1]).st_ino != inode:
                    raise OSError(f"descriptor {descriptor} of process {self.pid} is not the pool")
        except OSError:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened[0], opened[1]
