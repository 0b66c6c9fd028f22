# SPDX-License-Identifier: Apache-2.0
"""What `pega doctor` asks the machine: libraries, devices, limits, ports."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

PYTHON_TIMEOUT_S = 60  # a cold import of CuPy or Mooncake takes seconds, on a slow disk tens of them


def installed(*names: str) -> list[str]:
    """ "name version" of those distributions that are installed."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_python(code: str) -> tuple[int, str]:
    """Exit status and last line of a Python process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PYTHON_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer within {PYTHON_TIMEOUT_S} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else f"exit status {done.returncode}"


def why_not_loaded(library: str) -> str:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def nvidia_gpus() -> str:
    """What of NVIDIA's is on the PCI bus: "" or "2 NVIDIA devices"."""
    found = 0
    for vendor in Path("/sys/bus/pci/devices").glob("*/vendor"):
        try:
            # Class 03: display controllers, which data centre GPUs are too; not bridges and network cards.
            kind = (vendor.parent / "class").read_text()
            found += vendor.read_text().strip() == "0x10de" and kind.startswith("0x03")
        except OSError:
            continue
    return f"{found} NVIDIA GPU{'s' if found > 1 else ''} on its PCI bus" if found else ""


def may_lock_anyway() -> bool:
    """CAP_IPC_LOCK, bit 14, lifts RLIMIT_MEMLOCK (capabilities(7))."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return effective is not None and bool(int(effective[1], 16) >> 14 & 1)


def numa_nodes() -> list[Path]:
    return sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))


def cpus(text: str) -> set[int]:
    """The kernel's list of CPUs, "0-3,8", as numbers."""
    parts = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}


def rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir(Path("/sys/class/infiniband")))
    except OSError:
        return []


def bind(host: str, port: int) -> None:
    """Listens for a moment, as a server would. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen(1)


def is_free(port: int) -> bool:
    try:
        bind("127.0.0.1", port)
    except OSError:
        return False
    return True
