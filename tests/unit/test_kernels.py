# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels are kept by content; a broken cache or a missing compiler is explained, never fatal by itself."""

from __future__ import annotations

import builtins

import pytest

from vllm_pega_connector import kernels


class Nvrtc:
    """Stands in for CuPy's NVRTC; the "cubin" tells what was asked for."""

    class NVRTCError(Exception):
        pass

    def __init__(self, fails: bool = False):
        self.compiled = 0
        self.fails = fails

    def createProgram(self, source, name, headers, names):
        return {"source": source}

    def compileProgram(self, program, options):
        if self.fails:
            raise self.NVRTCError("refused")
        self.compiled += 1
        program["options"] = options

    def getCUBIN(self, program):
        return " ".join(program["options"]).encode()

    def getProgramLog(self, program):
        return "line 1: no"

    def destroyProgram(self, program):
        program.clear()


@pytest.fixture
def nvrtc(monkeypatch):
    fake = Nvrtc()
    monkeypatch.setattr(kernels, "_nvrtc", lambda: (fake, "13.0"))
    return fake


def test_compiled_once_for_each_architecture_version_and_source(nvrtc, tmp_path, monkeypatch):
    first = kernels.load_cubin(90, tmp_path)
    assert b"-arch=sm_90" in first and kernels.load_cubin(90, tmp_path) == first and nvrtc.compiled == 1
    assert b"-arch=sm_120" in kernels.load_cubin(120, tmp_path) and nvrtc.compiled == 2
    monkeypatch.setattr(kernels, "_nvrtc", lambda: (nvrtc, "12.9"))
    kernels.load_cubin(90, tmp_path)
    assert nvrtc.compiled == 3
    monkeypatch.setattr(kernels, "source", lambda: "other")
    kernels.load_cubin(90, tmp_path)
    assert nvrtc.compiled == 4
    assert len(list(tmp_path.iterdir())) == 4, "nothing but the four results is left there"


def test_a_cache_that_cannot_be_written_costs_time_only(nvrtc, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert kernels.load_cubin(90, blocked / "below") == kernels.load_cubin(90, blocked / "below")
    assert nvrtc.compiled == 2


def test_a_compiler_that_refuses_is_quoted(nvrtc, tmp_path):
    nvrtc.fails = True
    with pytest.raises(RuntimeError, match=r"NVRTC 13\.0 could not compile.*sm_90(.|\n)*line 1: no"):
        kernels.load_cubin(90, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_cupy_the_error_says_what_to_install(monkeypatch, tmp_path):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("cupy"):
            raise ImportError("No module named 'cupy'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(RuntimeError, match=r"vllm-pega-connector\[cuda13\]"):
        kernels.load_cubin(90, tmp_path)


def test_the_source_includes_nothing():
    assert "#include" not in kernels.source().replace("No #include", "") and "pega_load" in kernels.source()
