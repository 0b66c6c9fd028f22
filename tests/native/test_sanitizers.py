# SPDX-License-Identifier: Apache-2.0
"""The engine under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer (engine_test.cpp says
what runs). Each is a build of its own, of a minute or so."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def supported(sanitizer: str, folder: Path) -> bool:
    """Whether the compiler has the sanitizer's runtime, which some distributions package apart."""
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    command = ["c++", f"-fsanitize={sanitizer}", "empty.cpp", "-o", "empty"]
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_engine_under(sanitizer: str, tmp_path: Path) -> None:
    if not supported(sanitizer, tmp_path):
        pytest.skip(f"this compiler lacks the runtime of -fsanitize={sanitizer}")
    build = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), f"-DPEGA_SANITIZE={sanitizer}"]
    subprocess.run([*build, "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DCMAKE_UNITY_BUILD=ON"], check=True)
    subprocess.run(["cmake", "--build", str(tmp_path / "build"), "-j2"], check=True)
    # vLLM, in this process before, may preload libraries into its children; a sanitizer's own must come first.
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    engine_test = [str(tmp_path / "build/engine_test")]
    run = subprocess.run(engine_test, env=clean, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert "simulated done" in run.stdout and run.stderr == ""
