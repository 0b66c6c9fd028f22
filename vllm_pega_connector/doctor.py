# SPDX-License-Identifier: Apache-2.0
"""`pega doctor`: what this machine has of what the connector needs. Each check says what was found, what that
means and how to mend it.

vLLM is never imported, and Mooncake and CuPy only in a process of their own: what breaks there breaks alone.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .address import HostPort
from .config import ConfigError
from .gpu import Driver, ask_driver
from .pool_size import GIB, available_memory
from .profile import match_gpu

Status = Literal["ok", "warn", "fail"]
VLLM_RANGE = ((0, 26), (0, 33))  # the versions that the connector is tested with
IMPORT_TIMEOUT_S = 60  # a cold import of CuPy or Mooncake takes seconds, on a slow disk tens of them
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


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check this machine, and say how to mend what is missing",
        description="Checks driver, memory, CuPy, Mooncake and ports. Exits 1 if something fails, else 0.",
        allow_abbrev=False,
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help="also try to bind what migration.listen will be")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command="doctor")


def run(args: Any) -> int:
    listen = None
    if args.listen:
        try:
            listen = HostPort.parse(args.listen)
        except ValueError as error:
            raise ConfigError([f'--listen: got "{args.listen}" ({error}); allowed: host:port']) from None
    checks = list(examine(listen))
    if args.json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _show(checks)
    return 1 if any(check.status == "fail" for check in checks) else 0


def examine(listen: HostPort | None = None) -> Iterator[Check]:
    driver = ask_driver()
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("vLLM", check_vllm),
        ("native module", check_native),
        ("GPU", lambda: check_gpu(driver)),
        ("copy kernels", lambda: check_kernels(driver)),
        ("memory", check_memory),
        ("pinned memory", lambda: check_memlock(driver)),
        ("Mooncake", lambda: check_mooncake(driver)),
        ("RDMA", check_rdma),
        ("ports", lambda: check_ports(listen)),
    ]
    for name, check in checks:
        try:
            yield check()
        except Exception as error:  # one check that cannot be made must not hide the others
            yield Check(name, "warn", f"could not be checked: {type(error).__name__}: {error}")


# --- the checks -----------------------------------------------------------------------------------------------


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
        return Check(
            "GPU", "warn", driver.problem, "the connector serves vLLM on CPU only, by its host device",
            "on a GPU machine, install NVIDIA's driver; in a container, start it with the GPU (--gpus all)",
        )  # fmt: skip
    version = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
    kinds = ", ".join(f"{driver.gpus.count(name)} x {name}" for name in dict.fromkeys(driver.gpus))
    profiles = {match_gpu(name) for name in driver.gpus}
    found = f"{kinds}; driver for CUDA {version}; device profile {', '.join(sorted(profiles))}"
    if "generic" in profiles:
        return Check(
            "GPU", "warn", found, "there is no profile of this GPU, so Auto decides conservatively",
            "give a profile measured on this GPU as device_profile",
        )  # fmt: skip
    return Check("GPU", "ok", found)


def check_kernels(driver: Driver) -> Check:
    """CuPy, whose NVRTC compiles the copy kernels; needed only where there is a GPU."""
    have = _installed("cupy-cuda12x", "cupy-cuda13x", "cupy")
    major = driver.version // 1000
    if not driver.gpus:
        return Check("copy kernels", "ok", f"not needed without a GPU ({', '.join(have) or 'no CuPy'})")
    mend = f"pip install 'vllm-pega-connector[cuda{min(max(major, 12), 13)}]'"
    if not have:
        return Check("copy kernels", "fail", "no CuPy", "the copy kernels cannot be compiled", mend)
    if len(have) > 1:
        mend = f"pip uninstall {' '.join(name.split()[0] for name in have)}, then {mend}"
        return Check("copy kernels", "fail", ", ".join(have), "CuPy's packages overwrite each other", mend)
    status, said = _python("from cupy.cuda import nvrtc; print('NVRTC %d.%d' % nvrtc.getVersion())")
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
    if not driver.gpus and not _rdma_devices():
        return Check("pinned memory", "ok", f"{found}; nothing is pinned without a GPU or an RDMA device")
    return Check(
        "pinned memory", "warn", found,
        "RDMA cannot register a larger pool, and some drivers refuse to pin one for the GPU",
        "ulimit -l unlimited; in a container --ulimit memlock=-1; under systemd LimitMEMLOCK=infinity",
    )  # fmt: skip


def check_mooncake(driver: Driver) -> Check:
    """The transfer engine of migration: one distribution of three, and system libraries that no wheel brings."""
    have = _installed(*MOONCAKE)
    extra = f"cuda{min(max(driver.version // 1000, 12), 13)}" if driver.gpus else "cpu"
    mend = f"pip install 'vllm-pega-connector[{extra}]'"
    if not have:
        return Check("Mooncake", "warn", "not installed", "no migration between instances; all else works", mend)
    if len(have) > 1:
        mend = f"pip uninstall {' '.join(name.split()[0] for name in have)}, then {mend}"
        return Check("Mooncake", "fail", ", ".join(have), "these packages overwrite each other", mend)
    cuda = MOONCAKE[have[0].split()[0]]
    if cuda and not driver.gpus:
        means = "its CUDA build does not even load without NVIDIA's driver"
        mend = f"pip uninstall {have[0].split()[0]}, then {mend}"
        return Check("Mooncake", "fail", f"{have[0]}; no GPU", means, mend)
    libraries = MOONCAKE_LIBRARIES | (MOONCAKE_CUDA_LIBRARIES if cuda else {})
    missing = [name for name in libraries if not _loads(name)]
    if missing:
        packages = " ".join(libraries[name] for name in missing)
        found = f"{have[0]}; missing {', '.join(missing)}"
        return Check("Mooncake", "fail", found, "no migration, by TCP neither", f"apt-get install {packages}")
    # The CUDA builds find libcudart only where PyTorch has loaded it before.
    status, said = _python(("import torch; " if cuda else "") + "import mooncake.engine")
    if status:
        return Check("Mooncake", "fail", f"{have[0]}: {said}", "no migration between instances", mend)
    return Check("Mooncake", "ok", have[0])


def check_rdma() -> Check:
    devices = _rdma_devices()
    if not devices:
        return Check("RDMA", "ok", "no device; migration uses TCP")
    return Check("RDMA", "ok", ", ".join(devices))


def check_ports(listen: HostPort | None) -> Check:
    if listen is not None:
        try:
            _bind(listen.host, listen.port)
        except OSError as error:
            return Check(
                "ports", "fail", f"cannot listen on {listen}: {error.strerror or error}", "the migration agent fails",
                "choose another port (0 takes any), or an address of this machine",
            )  # fmt: skip
    try:
        _bind("127.0.0.1", 0)
    except OSError as error:
        means = "the agent and Mooncake cannot listen"
        return Check("ports", "fail", f"cannot listen on 127.0.0.1: {error.strerror}", means, "allow sockets here")
    free = sum(_is_free(port) for port in MOONCAKE_PORTS[::100])
    found = f"{listen} can be bound; " if listen else ""
    found += f"{free} of {len(MOONCAKE_PORTS[::100])} ports tried in Mooncake's range are free"
    if free == 0:
        mend = "set MC_MIN_RPC_PORT and MC_MAX_RPC_PORT to a free range"
        return Check("ports", "fail", found, "Mooncake finds no port to listen on", mend)
    return Check("ports", "ok", found)


# --- how they look --------------------------------------------------------------------------------------------


def _installed(*names: str) -> list[str]:
    """ "name version" of those distributions that are installed."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _python(code: str) -> tuple[int, str]:
    """Exit status and last line of a Python process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {IMPORT_TIMEOUT_S} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit status {done.returncode}"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir(Path("/sys/class/infiniband")))
    except OSError:
        return []


def _bind(host: str, port: int) -> None:
    """Listens for a moment, as a server would. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(1)


def _is_free(port: int) -> bool:
    try:
        _bind("127.0.0.1", port)
    except OSError:
        return False
    return True


def _show(checks: list[Check]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        table.add_row(Text(check.status, style=styles[check.status]), Text(check.name), Text(check.found))
        if check.means:
            table.add_row("", "", Text(f"means: {check.means}"))
        if check.mend:
            table.add_row("", "", Text(f"mend:  {check.mend}"))
    Console(soft_wrap=not sys.stdout.isatty()).print(table)
