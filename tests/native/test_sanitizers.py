# SPDX-License-Identifier: Apache-2.0
"""The engine under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: minutes of building, so by
PEGA_SANITIZERS=1 only (engine_test.cpp says what runs)."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.environ.get("PEGA_SANITIZERS") != "1", reason="builds for minutes; PEGA_SANITIZERS=1 runs it")
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_engine_under(sanitizer, tmp_path):
    build = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), f"-DPEGA_SANITIZE={sanitizer}"]
    subprocess.run([*build, "-DCMAKE_BUILD_TYPE=RelWithDebInfo"], check=True)
    subprocess.run(["cmake", "--build", str(tmp_path), "-j2"], check=True)
    run = subprocess.run([str(tmp_path / "engine_test")], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "simulated done" in run.stdout and run.stderr == ""
