# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus scrapes two servers, one pulling from the other: every query of the dashboard has an answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake.engine")

from examples.demo.server import Server, free_port, serve
from examples.grafana import check
from tests.serving.engine import one_seed
from tests.support.tiny_model import make_tiny_model, random_prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (apt-get install prometheus)"),
]
WINDOW = "20s"


@contextmanager
def prometheus(folder: Path, servers: list[Server]) -> Iterator[str]:
    port = free_port()
    targets = [server.url.removeprefix("http://") for server in servers]
    config = {"global": {"scrape_interval": "1s"}, "rule_files": [str(check.DASHBOARD.with_name("alerts.yml"))],
              "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": targets}]}]}  # fmt: skip
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def started(folder: Path, stack: ExitStack) -> list[Server]:
    model = Path(make_tiny_model(max_length=1024))
    ports = [free_port(), free_port()]

    def start(n: int) -> Server:
        extra = {"host_pool_gib": 0.003, "migration": {"listen": f"127.0.0.1:{ports[n]}", "transport": "tcp"}}
        if n:
            extra["migration"]["peers"] = [f"127.0.0.1:{ports[0]}"]  # type: ignore[index]
        transfer = {"kv_connector": "PegaConnector", "kv_connector_module_path": "vllm_pega_connector",
                    "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": extra}  # fmt: skip
        arguments = ["--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-model-len", "1024",
                     "--num-gpu-blocks-override", "100", "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
        return stack.enter_context(serve(model, arguments, folder / f"{n}.log", lambda waited: None))

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(start, range(2)))


def test_every_query_of_the_dashboard_has_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VLLM_SERVER_DEV_MODE": "1", **one_seed()}.items():
        monkeypatch.setenv(name, value)
    with ExitStack() as stack:
        first, second = started(tmp_path, stack)
        url = stack.enter_context(prometheus(tmp_path, [first, second]))
        began = time.monotonic()
        silent = check.questions()
        round_ = 0
        while silent and time.monotonic() - began < 120:
            round_ += 1
            # More than the pool holds, so that it evicts; one prompt of the other instance; one that comes back.
            prompts = [random_prompt(330, 10 * round_ + n) for n in range(4)]
            for prompt in prompts:
                first.complete(prompt, 4)
            second.complete(prompts[-1], 4, {"pega": {"nonsense": 1}})
            urllib.request.urlopen(urllib.request.Request(first.url + "/reset_prefix_cache", method="POST")).close()
            first.complete(prompts[-1], 4, {"pega": {"load_policy": ["kernel", "staged"][round_ % 2]}})
            time.sleep(2)
            if round_ > 3:
                silent = check.unanswered(url, WINDOW)
        assert not silent, [q.panel for q in silent]
        (hit_rate,) = check.ask(url, "query", query=check.questions(WINDOW)[0].expression)
        assert 0 < float(hit_rate["value"][1]) <= 1
        assert check.ask(url, "query", query="sum(vllm:pega_migration_bytes_total)")[0]["value"][1] != "0"
        assert check.ask(url, "query", query="sum(vllm:pega_evictions_total)")[0]["value"][1] != "0"
        with urllib.request.urlopen(f"{url}/api/v1/rules", timeout=30) as answer:
            rules = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
        assert len(rules) == 4 and {rule["health"] for rule in rules} <= {"ok", "unknown"}
        if picture := os.environ.get("PEGA_DASHBOARD_PICTURE"):
            check.draw(url, Path(picture), int(time.monotonic() - began), WINDOW)
