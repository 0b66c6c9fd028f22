# SPDX-License-Identifier: Apache-2.0
"""What a process holds, and whether it has grown."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

# What must not grow while one engine runs. Anonymous memory breathes with vLLM's own batches and Python's arenas.
GROWTH = {"rss_mib": 64.0, "fds": 4, "threads": 4, "shared_mib": 1.0}
WARM_UP = 4  # checks until everything that is made once has been made


def fair_seconds(pid: int | str = "self") -> float:
    """A clock for deadlines: without the time in which the process was ready to run and the machine was not."""
    return time.monotonic() - int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


@dataclass(frozen=True)
class Sample:
    rss_mib: float  # anonymous: without pools and libraries
    fds: int
    threads: int
    shared_mib: float  # mapped memory files and /dev/shm

    @classmethod
    def now(cls) -> Sample:
        status = dict(
            row.split(":", 1) for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("Rss")
        )
        shared = 0
        for row in Path("/proc/self/maps").read_text().splitlines():
            if "/memfd:" in row or "/dev/shm/" in row:
                begin, end = row.split()[0].split("-")
                shared += int(end, 16) - int(begin, 16)
        return cls(
            int(status["RssAnon"].split()[0]) / 1024,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            shared / 2**20,
        )


class Growth:
    """Of one engine's samples, all taken when it was idle."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def add(self, sample: Sample) -> list[str]:
        """What has grown beyond bounds since the engine was warm, in words."""
        self._samples.append(sample)
        warm = self._samples[WARM_UP : 2 * WARM_UP]
        late = self._samples[-WARM_UP:]  # all of them: one high sample is no leak
        if len(self._samples) < 3 * WARM_UP:
            return []
        grown = []
        for name, bound in GROWTH.items():
            before = max(getattr(s, name) for s in warm)
            after = min(getattr(s, name) for s in late)
            if after > before + bound:
                grown.append(f"{name} grew from {before:.0f} to {after:.0f}")
        return grown
