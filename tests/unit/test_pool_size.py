# SPDX-License-Identifier: Apache-2.0
"""How much memory is left, from trees of /proc and /sys as machines and containers show them; what the pool takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pega_connector import pool_size
from vllm_pega_connector.pool_size import GIB, available_memory, pool_bytes


def machine(root: Path, available_gib: float, cgroup: str | None = "0::/\n") -> Path:
    """A machine with this much MemAvailable; `cgroup` is /proc/self/cgroup, None if there is none."""
    (root / "proc/self").mkdir(parents=True)
    kib = int(available_gib * GIB) // 1024
    (root / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemFree: 1 kB\nMemAvailable: {kib} kB\n")
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    return root


def cgroup_v2(root: Path, path: str, limit: str | int, used: int, inactive_file: int | None = None) -> None:
    folder = root / "sys/fs/cgroup" / path.lstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    if inactive_file is not None:
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nfile 7\n")


def test_no_cgroup(tmp_path: Path) -> None:
    assert available_memory(machine(tmp_path, 8, cgroup=None)) == 8 * GIB


def test_no_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, 8, "0::/user.slice\n")
    cgroup_v2(root, "/user.slice", "max", 3 * GIB)
    assert available_memory(root) == 8 * GIB


def test_limit_of_our_own_cgroup(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, "0::/box\n")
    cgroup_v2(root, "/box", 10 * GIB, 4 * GIB)
    assert available_memory(root) == 6 * GIB


def test_a_limit_above_what_the_machine_has_does_not_matter(tmp_path: Path) -> None:
    root = machine(tmp_path, 8, "0::/box\n")
    cgroup_v2(root, "/box", 100 * GIB, GIB)
    assert available_memory(root) == 8 * GIB


def test_the_tightest_of_the_cgroups_above_us_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, "0::/pod/box\n")
    cgroup_v2(root, "/pod/box", 32 * GIB, GIB)
    cgroup_v2(root, "/pod", 20 * GIB, 15 * GIB)
    cgroup_v2(root, "/", 40 * GIB, GIB)
    assert available_memory(root) == 5 * GIB


def test_a_container_sees_its_own_cgroup_as_the_root(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, "0::/\n")
    cgroup_v2(root, "/", 12 * GIB, 2 * GIB)
    assert available_memory(root) == 10 * GIB


def test_a_path_that_is_not_mounted_here_falls_back_to_its_parents(tmp_path: Path) -> None:
    """Without a cgroup namespace a container reads the host's path, of which it sees only the mounted end."""
    root = machine(tmp_path, 64, "0::/host/only/path\n")
    cgroup_v2(root, "/", 12 * GIB, 2 * GIB)
    assert available_memory(root) == 10 * GIB


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, "0::/box\n")
    cgroup_v2(root, "/box", 10 * GIB, 9 * GIB, inactive_file=5 * GIB)
    assert available_memory(root) == 6 * GIB


def test_over_the_limit_is_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, "0::/box\n")
    cgroup_v2(root, "/box", GIB, 2 * GIB)
    assert available_memory(root) == 0


def test_cgroup_v1(tmp_path: Path) -> None:
    root = machine(tmp_path, 64, "12:cpu,cpuacct:/other\n5:memory:/box\n1:name=systemd:/\n")
    folder = root / "sys/fs/cgroup/memory/box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{10 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    assert available_memory(root) == 7 * GIB + 7
    # "No limit" is a number near 2^63 there.
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory(root) == 64 * GIB


@pytest.mark.parametrize("stat", ["", "inactive_file\n", "inactive_file lots\n"])
def test_an_unreadable_stat_reclaims_nothing(tmp_path: Path, stat: str) -> None:
    root = machine(tmp_path, 64, "0::/box\n")
    cgroup_v2(root, "/box", 10 * GIB, 4 * GIB)
    (root / "sys/fs/cgroup/box/memory.stat").write_text(stat)
    assert available_memory(root) == 6 * GIB


def test_this_machine() -> None:
    assert 0 < available_memory() < 1 << 50


# --- the pool ---


def parallel(tp: int = 1, pp: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, **more)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> int:
    """64 GiB are left."""
    monkeypatch.setattr(pool_size, "available_memory", lambda: 64 * GIB)
    return 64 * GIB


@pytest.mark.parametrize(
    ("gpu_gib", "ranks", "pool_gib"),
    [(4, parallel(), 8), (40, parallel(), 16), (40, parallel(tp=2), 8), (40, parallel(tp=2, pp=2), 4),
     (40, parallel(tp=4, nnodes=2), 8), (1, parallel(tp=4), 2)],
)  # fmt: skip
def test_auto_is_twice_the_gpu_cache_or_a_quarter_of_what_is_left(
    left: int, gpu_gib: int, ranks: SimpleNamespace, pool_gib: int
) -> None:
    assert pool_bytes("auto", gpu_gib * GIB, ranks) == pool_gib * GIB


@pytest.mark.parametrize("gib", [0.5, 1.0, 63.0])
def test_what_is_asked_for_is_given(left: int, gib: float) -> None:
    assert pool_bytes(gib, GIB, parallel()) == int(gib * GIB)


def test_more_than_there_is_says_how_much_there_is(left: int) -> None:
    with pytest.raises(ValueError, match=r"host_pool_gib=100.0 .* 64.00 GiB are left .* at most 32.00"):
        pool_bytes(100.0, GIB, parallel(tp=2))
