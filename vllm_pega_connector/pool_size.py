# SPDX-License-Identifier: Apache-2.0
"""How large the host pool is: what was asked for, or what the machine and its cgroup allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GIB = 2**30


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the kernel's MemAvailable, cut by every cgroup limit above us."""
    meminfo = (root / "proc/meminfo").read_text()
    available = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    for limit, used in _cgroup_limits(root):
        available = min(available, max(0, limit - used))
    return available


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, used) bytes of the cgroups, v2 or v1, that this process is in and that have a limit."""
    found = []
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = base / path.lstrip("/"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder, names = base / "memory" / path.lstrip("/"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for level in [folder, *folder.parents]:
            if not level.is_relative_to(base):
                break
            try:
                limit, used = ((level / name).read_text().strip() for name in names)
            except OSError:
                continue
            if limit != "max":
                found.append((int(limit), int(used) - _reclaimable(level)))
    return found


def _reclaimable(level: Path) -> int:
    """Page cache that the kernel drops before it refuses memory; it counts as used, but is not lost to us."""
    try:
        stat = dict(line.split() for line in (level / "memory.stat").read_text().splitlines())
        return int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def pool_bytes(host_pool_gib: float | str, gpu_cache_bytes: int, parallel: Any) -> int:
    """Bytes of this rank's pool. Raises ValueError if the machine cannot hold it.

    `auto`: the smaller of twice the rank's GPU cache and a quarter of the memory left, shared by the local ranks.
    """
    ranks = max(1, parallel.tensor_parallel_size * parallel.pipeline_parallel_size // max(1, _nodes(parallel)))
    available = available_memory()
    if host_pool_gib == "auto":
        return min(2 * gpu_cache_bytes, available // 4 // ranks)
    wanted = int(float(host_pool_gib) * GIB)
    if wanted > available:
        raise ValueError(
            f"PegaConnector: host_pool_gib={host_pool_gib} asks for {wanted / GIB:.2f} GiB a rank, but only "
            f"{available / GIB:.2f} GiB are left on this machine (or in its cgroup); lower host_pool_gib to at most "
            f"{available / GIB / ranks:.2f}, or give the container more memory"
        )
    return wanted


def _nodes(parallel: Any) -> int:
    return getattr(parallel, "nnodes", 1) or 1
