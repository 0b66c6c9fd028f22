# SPDX-License-Identifier: Apache-2.0
"""Start-up: bad settings end it promptly, with one error that names the key, the value and what is allowed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import ROOT, model_path

pytestmark = pytest.mark.vllm

START = """
import json, sys
from vllm import LLM
model, extra, find = sys.argv[1:]
transfer = {"kv_connector": "PegaConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
if find == "path":
    transfer["kv_connector_module_path"] = "vllm_pega_connector"
LLM(model=model, block_size=32, max_model_len=512, enforce_eager=True, dtype="float32", num_gpu_blocks_override=32,
    kv_transfer_config={**transfer, "kv_connector_extra_config": json.loads(extra)})
print("STARTED")
"""


def start(extra: dict[str, object], find: str = "path") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, "-c", START, model_path(), json.dumps(extra), find]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, cwd="/")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"host_pool_gibs": 1}, ("host_pool_gibs", "host_pool_gib")),  # the settings: found before anything starts
        ({"host_pool_gib": 1e-7}, ("host_pool_gib", "block")),  # the pool: too small for one block
        ({"host_pool_gib": 100000}, ("host_pool_gib", "100000", "left")),  # the pool: more than the machine has
    ],
)
def test_what_stops_the_start(extra: dict[str, object], words: tuple[str, ...]) -> None:
    began = time.monotonic()
    ended = start(extra)
    assert ended.returncode != 0 and "STARTED" not in ended.stdout
    lines = [line for line in ended.stderr.splitlines() if all(w in line for w in words)]
    assert lines, ended.stderr[-2000:]
    assert time.monotonic() - began < 120


def test_found_by_name_alone() -> None:
    """The entry point registers the name; this needs the package to be installed, not only on the path."""
    from importlib.metadata import entry_points

    assert any(e.name == "pega_connector" for e in entry_points(group="vllm.general_plugins")), "install the package"
    ended = start({"host_pool_gib": 0.01}, find="name")
    assert "STARTED" in ended.stdout, ended.stderr[-2000:]
