# SPDX-License-Identifier: Apache-2.0
"""The checks of `pega doctor`.

vLLM is never imported, and Mooncake and CuPy only in a process of their own: what breaks there breaks alone.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from . import machine
from .address import HostPort
from .gpu import Driver
from .pool_size import GIB, available_memory
from .profile import match_gpu

Status = Literal["ok", "warn", "fail"]
VLLM_RANGE = ((0, 26), (0, 33))  # the versions that the connector is tested with
# Mooncake's engine picks its ports here unless MC_MIN_RPC_PORT and MC_MAX_RPC_PORT say otherwise.
MOONCAKE_PORTS = range(15000, 17001)
# Distribution -> (CUDA major version or 0, its shared libraries and the Debian packages that bring them).
MOONCAKE = {
    "mooncake-transfer-engine-non-cuda": 0,
    "mooncake-transfer-engine": 12,
    "mooncake-transfer-engine-cuda13": 13,
}
MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
MOONCAKE_CUDA_LIBRARIES = {"libmlx5.so.1": "ibverbs-providers"}


@dataclass(frozen=True)
class Check:
    name: str
    status: Status
    found: str
    means: str = ""
    mend: str = ""


def check_vllm() -> Check:
    if importlib.util.find_spec("vllm") is None:
        return Check(
            "vLLM", "fail", "not installed in this environment", "the connector is a plugin of vLLM",
            f"install it beside vLLM; this is {sys.executable}",
        )  # fmt: skip
    names = importlib.metadata.packages_distributions().get("vllm", ["vllm"])
    version = importlib.metadata.version(names[0])
    found = f"{names[0]} {version}, Python {platform.python_version()}"
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    low, high = VLLM_RANGE
    if not low <= numbers <= high:
        tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
        return Check("vLLM", "warn", found, f"the connector is tested with vLLM {tested}", f"install one of {tested}")
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(plugin.value.startswith("vllm_pega_connector.") for plugin in plugins):
        return Check(
            "vLLM", "warn", found + "; our entry point is not registered", "the name PegaConnector alone is not found",
            'pip install vllm-pega-connector, or set "kv_connector_module_path": "vllm_pega_connector"',
        )  # fmt: skip
    if numbers < (0, 32) and not os.environ.get("PYTHONHASHSEED"):
        return Check(
            "vLLM", "warn", found + "; PYTHONHASHSEED is not set",
            "this vLLM draws its hash seed at random, so that instances cannot recognise each other's blocks",
            "for migration, set PYTHONHASHSEED to the same number on all instances",
        )  # fmt: skip
    return Check("vLLM", "ok", found)


def check_native() -> Check:
    try:
        from . import _native
    except ImportError as error:
        return Check("native module", "fail", str(error), "nothing can be moved", "reinstall vllm-pega-connector")
    return Check("native module", "ok", str(getattr(_native, "__file__", "built in")))


def check_gpu(driver: Driver) -> Check:
    if not driver.gpus:
        devices = machine.nvidia_gpus()
        if devices:
            return Check(
                "GPU", "fail", f"{driver.problem}; but the machine has {devices}",
                "the GPU is there and this process cannot use it",
                "install NVIDIA's driver (nvidia-smi must work); in a container, start it with --gpus all",
            )  # fmt: skip
        return Check(
            "GPU", "warn", f"{driver.problem}; no NVIDIA device on this machine",
            "the connector serves vLLM on CPU only, by its host device",
            "for a GPU, install NVIDIA's driver (nvidia-smi must work); in a container, start it with --gpus all",
        )  # fmt: skip
    kinds = ", ".join(f"{driver.gpus.count(name)} x {name}" for name in dict.fromkeys(driver.gpus))
    profiles = {match_gpu(name) for name in driver.gpus}
    found = f"{kinds}; driver for CUDA {_cuda(driver.version)}; device profile {', '.join(sorted(profiles))}"
    if "generic" in profiles:
        return Check(
            "GPU", "warn", found, "there is no profile of this GPU, so Auto decides conservatively",
            "run pega calibrate, and give a profile measured on this GPU as device_profile",
        )  # fmt: skip
    return Check("GPU", "ok", found)


def _several(check: str, have: Sequence[str], means: str, mend: str) -> Check:
    """More than one distribution of what should be one; `mend` installs the right one."""
    mend = f"pip uninstall {' '.join(name.split()[0] for name in have)}, then {mend}"
    return Check(check, "fail", ", ".join(have), means, mend)


def check_kernels(driver: Driver) -> Check:
    """CuPy, whose NVRTC compiles the copy kernels; needed only where there is a GPU."""
    have = machine.installed("cupy-cuda12x", "cupy-cuda13x", "cupy")
    major = driver.version // 1000
    if not driver.gpus:
        return Check("copy kernels", "ok", f"not needed without a GPU ({', '.join(have) or 'no CuPy'})")
    mend = f"pip install 'vllm-pega-connector[cuda{min(max(major, 12), 13)}]'"
    if not have:
        return Check("copy kernels", "fail", "no CuPy", "the copy kernels cannot be compiled", mend)
    if len(have) > 1:
        return _several("copy kernels", have, "CuPy's packages overwrite each other", mend)
    built_for = re.search(r"cuda(\d+)x", have[0])
    if built_for and int(built_for[1]) > major:
        return Check(
            "copy kernels", "fail", f"{have[0]}, but the driver is for CUDA {_cuda(driver.version)}",
            f"what CuPy's NVRTC compiles for CUDA {built_for[1]}, this driver does not load",
            f"pip uninstall -y {have[0].split()[0]}, then {mend}; or install a driver for CUDA {built_for[1]}",
        )  # fmt: skip
    status, said = machine.run_python("from cupy.cuda import nvrtc; print('NVRTC %d.%d' % nvrtc.getVersion())")
    if status:
        return Check("copy kernels", "fail", f"{have[0]}: {said}", "the copy kernels cannot be compiled", mend)
    return Check("copy kernels", "ok", f"{have[0]}, {said}")


def check_memory() -> Check:
    """What `host_pool_gib: auto` may take, and whether a memfd, which holds the pool, can be made."""
    available = available_memory()
    os.close(os.memfd_create("pega-doctor", os.MFD_CLOEXEC))
    found = f"{available / GIB:.1f} GiB left, of the machine and the cgroup's limit"
    if available < 4 * GIB:
        return Check(
            "memory", "warn", found, "a pool smaller than the GPU's KV cache only churns",
            "give the container more memory, or lower host_pool_gib knowingly",
        )  # fmt: skip
    return Check("memory", "ok", f"{found}; host_pool_gib auto takes at most {available / 4 / GIB:.1f} of it")


def check_memlock(driver: Driver) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("pinned memory", "ok", "memlock is unlimited")
    found = f"memlock is limited to {limit / 2**20:.4g} MiB"
    if not driver.gpus and not machine.rdma_devices():
        return Check("pinned memory", "ok", f"{found}; nothing is pinned without a GPU or an RDMA device")
    if machine.may_lock_anyway():
        return Check("pinned memory", "ok", f"{found}, which the capability IPC_LOCK lifts")
    return Check(
        "pinned memory", "warn", found,
        "RDMA cannot register a larger pool, and some drivers refuse to pin one for the GPU",
        "ulimit -l unlimited; in a container --ulimit memlock=-1; under systemd LimitMEMLOCK=infinity",
    )  # fmt: skip


def check_numa(driver: Driver) -> Check:
    """The pool's pages lie where the process first touches them; the GPU hangs on one of the sockets."""
    nodes = machine.numa_nodes()
    if len(nodes) < 2 or not driver.gpus:
        return Check("NUMA", "ok", f"{max(1, len(nodes))} memory node{'s' if len(nodes) > 1 else ''}")
    allowed = os.sched_getaffinity(0)
    within = [node.name for node in nodes if machine.cpus((node / "cpulist").read_text()) & allowed]
    found = f"{len(nodes)} memory nodes; this process may run on {', '.join(within)}"
    if len(within) < 2:
        return Check("NUMA", "ok", found)
    return Check(
        "NUMA", "warn", found, "a pool on the other socket costs transfers a part of their rate",
        "nvidia-smi topo -m names each GPU's node; numactl --cpunodebind=N --membind=N vllm serve ...",
    )  # fmt: skip


def check_mooncake(driver: Driver) -> Check:
    """The transfer engine of migration: one distribution of three, and system libraries that no wheel brings."""
    have = machine.installed(*MOONCAKE)
    extra = f"cuda{min(max(driver.version // 1000, 12), 13)}" if driver.gpus else "cpu"
    mend = f"pip install 'vllm-pega-connector[{extra}]'"
    if not have:
        return Check("Mooncake", "warn", "not installed", "no migration between instances; all else works", mend)
    if len(have) > 1:
        return _several("Mooncake", have, "these packages overwrite each other", mend)
    cuda = MOONCAKE[have[0].split()[0]]
    if cuda and not driver.gpus:
        means = "its CUDA build does not even load without NVIDIA's driver"
        mend = f"pip uninstall {have[0].split()[0]}, then {mend}"
        return Check("Mooncake", "fail", f"{have[0]}; no GPU", means, mend)
    libraries = MOONCAKE_LIBRARIES | (MOONCAKE_CUDA_LIBRARIES if cuda else {})
    missing = {name: why for name in libraries if (why := machine.why_not_loaded(name))}
    if missing:
        packages = " ".join(libraries[name] for name in missing)
        found = f"{have[0]}; missing {'; '.join(missing.values())}"
        return Check("Mooncake", "fail", found, "no migration, by TCP neither", f"apt-get install {packages}")
    # The CUDA builds find libcudart only where PyTorch has loaded it before.
    status, said = machine.run_python(("import torch; " if cuda else "") + "import mooncake.engine")
    if status:
        return Check("Mooncake", "fail", f"{have[0]}: {said}", "no migration between instances", mend)
    return Check("Mooncake", "ok", have[0])


def check_rdma() -> Check:
    devices = machine.rdma_devices()
    if not devices:
        return Check("RDMA", "ok", "no device; migration uses TCP")
    return Check("RDMA", "ok", ", ".join(devices))


def check_ports(listen: HostPort | None) -> Check:
    if listen is not None:
        try:
            machine.bind(listen.host, listen.port)
        except OSError as error:
            mend = "name an address of this machine: ip -brief address"
            if error.errno == errno.EADDRINUSE:
                mend = f"ss -ltnp 'sport = :{listen.port}' says who listens there; end it, or choose another port"
            return Check(
                "ports", "fail", f"cannot listen on {listen}: {error.strerror or error}",
                "the migration agent cannot start, so vLLM serves on without migration", mend,
            )  # fmt: skip
    try:
        machine.bind("127.0.0.1", 0)
    except OSError as error:
        means = "the agent and Mooncake cannot listen"
        return Check("ports", "fail", f"cannot listen on 127.0.0.1: {error.strerror}", means, "allow sockets here")
    free = sum(machine.is_free(port) for port in MOONCAKE_PORTS[::100])
    found = f"{listen} can be bound; " if listen else ""
    found += f"{free} of {len(MOONCAKE_PORTS[::100])} ports tried in Mooncake's range are free"
    if free == 0:
        mend = "set MC_MIN_RPC_PORT and MC_MAX_RPC_PORT to a free range"
        return Check("ports", "fail", found, "Mooncake finds no port to listen on", mend)
    return Check("ports", "ok", found)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
