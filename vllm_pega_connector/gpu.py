# SPDX-License-Identifier: Apache-2.0
"""What the CUDA driver says about this machine, asked directly: no context is created, no toolkit needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True)
class Driver:
    """version: the highest CUDA that it supports, as 13000 for 13.0. `problem` says why there is no GPU."""

    version: int = 0
    gpus: tuple[str, ...] = ()
    problem: str = ""


def ask_driver() -> Driver:
    """Never raises: a machine without a GPU is an answer."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Driver(problem=f"NVIDIA's driver library cannot be loaded ({error})")
    version, count = ctypes.c_int(), ctypes.c_int()
    try:
        cuda.cuDriverGetVersion(ctypes.byref(version))
        if status := cuda.cuInit(0):
            return Driver(version.value, problem=f"cuInit failed with error {status}")
        if status := cuda.cuDeviceGetCount(ctypes.byref(count)):
            return Driver(version.value, problem=f"cuDeviceGetCount failed with error {status}")
        names = []
        for ordinal in range(count.value):
            device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
            if cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
                cuda.cuDeviceGetName(name, len(name), device)
                names.append(name.value.decode(errors="replace"))
    except AttributeError as error:  # a stand-in library without the functions
        return Driver(version.value, problem=f"libcuda.so.1 is not a CUDA driver ({error})")
    return Driver(version.value, tuple(names), "" if names else "the driver shows no GPU")


def gpu_name() -> str:
    """The first GPU's name, or "" where there is none."""
    return next(iter(ask_driver().gpus), "")
