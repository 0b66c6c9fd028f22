# SPDX-License-Identifier: Apache-2.0
"""Compiles csrc/copy_kernels.cu at start-up and keeps the result on disk.

The result is cubin bytes, which the native device loads into its own context: a module loaded by CuPy would be
unloaded together with a Python object.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

_OPTIONS = ("--std=c++17", "-default-device")


def source() -> str:
    """The kernels' CUDA C++ source: beside this file in a wheel, in csrc/ of a checkout."""
    here = Path(__file__).resolve().parent
    for path in (here / "copy_kernels.cu", here.parent / "csrc" / "copy_kernels.cu"):
        if path.is_file():
            return path.read_text()
    raise RuntimeError(f"copy_kernels.cu is missing from {here}: reinstall vllm-pega-connector")


def cache_dir() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME or ~/.cache, `vllm_pega_connector/kernels`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "vllm_pega_connector" / "kernels"


def compile_cubin(ordinal: int) -> bytes:
    """The copy kernels for the GPU that CUDA calls `ordinal` in this process. Raises as `load_cubin`."""
    from vllm_pega_connector import _native

    return load_cubin(_native.cuda_architecture(ordinal))


def load_cubin(architecture: int, cache: Path | None = None) -> bytes:
    """The copy kernels for compute capability `architecture` (90 = 9.0), from the cache or compiled (seconds).

    The cache's key is the content of all that decides the result; a cache that cannot be read or written is not
    an error. Raises RuntimeError, with what to install, when NVRTC is missing or refuses.
    """
    nvrtc, version = _nvrtc()
    text = source()
    options = (*_OPTIONS, f"-arch=sm_{architecture}")
    key = hashlib.sha256("\0".join((text, *options, version)).encode()).hexdigest()
    path = (cache or cache_dir()) / f"copy_kernels-sm{architecture}-{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        cubin = _compile(nvrtc, version, text, options)
        _store(path, cubin)
        return cubin


def _nvrtc() -> tuple[Any, str]:
    """CuPy's NVRTC module and the version of the library that it found."""
    advice = "install vllm-pega-connector[cuda13] or [cuda12], whichever matches the driver, and nvidia-cuda-nvrtc"
    try:
        from cupy.cuda import nvrtc
    except ImportError as error:
        raise RuntimeError(
            f"the copy kernels are compiled by CuPy, which cannot be imported ({error}): {advice}"
        ) from error
    try:
        return nvrtc, ".".join(map(str, nvrtc.getVersion()))
    except Exception as error:  # the loader's own types, which differ between CuPy versions
        raise RuntimeError(f"CuPy finds no NVRTC library ({error}): {advice}") from error


def _compile(nvrtc: Any, version: str, text: str, options: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(text, "copy_kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise RuntimeError(
            f"NVRTC {version} could not compile the copy kernels with "
            f"{' '.join(options)}: {error}; a newer CuPy may know this GPU\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _store(path: Path, cubin: bytes) -> None:
    """Readers see nothing or the whole file: written beside it, then renamed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            temporary.write_bytes(cubin)
            temporary.replace(path)
    except OSError:
        return
