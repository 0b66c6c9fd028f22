# SPDX-License-Identifier: Apache-2.0
"""`pega agent`, as people run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mooncake.engine")

from tests.migration.support import FINGERPRINT, Instance

ROOT = Path(__file__).resolve().parents[2]


def pega(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_pega_connector.cli", "agent", *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_an_agent_alone_listens() -> None:
    done = pega('{"listen": "127.0.0.1:0", "transport": "tcp"}', "--once")
    assert done.returncode == 0 and "127.0.0.1:" in done.stdout, done.stderr


def test_a_port_in_use_is_said() -> None:
    with Instance() as instance:
        done = pega(json.dumps({"listen": instance.address, "transport": "tcp"}), "--once")
    assert done.returncode == 1 and "choose a free port" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_of_another_machine_is_said() -> None:
    done = pega('{"listen": "192.0.2.1:0", "transport": "tcp"}', "--once")
    assert done.returncode == 1 and "name an address of this machine" in done.stderr
    assert done.stderr.count("cannot listen on") == 1


def test_a_missing_library_is_said(tmp_path: Path) -> None:
    """As if libibverbs were not installed: loading Mooncake fails, and the reason says what to ask."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_pega_connector.cli", "agent", '{"listen": "127.0.0.1:0"}', "--once"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "libibverbs.so.1" in done.stderr and "pega doctor" in done.stderr


def test_asking_with_and_without_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a long secret\n")
    with Instance(token=b"a long secret") as instance:
        done = pega("--ask", instance.address, "--token-file", str(token))
        assert done.returncode == 0 and json.loads(done.stdout)["fingerprint"] == FINGERPRINT
        done = pega("--ask", instance.address)
        assert done.returncode == 1 and "did not answer" in done.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["{"], ['{"listen": 3}'], ["--ask", "nowhere"], ['{"listen": "a:1"}', "--ask", "b:2"]]
)
def test_bad_input_is_one_line_and_2(arguments: list[str]) -> None:
    done = pega(*arguments)
    assert done.returncode == 2 and done.stderr.startswith("pega agent: ") and "Traceback" not in done.stderr
