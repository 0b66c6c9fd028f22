# SPDX-License-Identifier: Apache-2.0
"""`pega explain --from-metrics` against pages of metrics, good, odd and none."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_pega_connector import cli, cli_running

pytest.importorskip("vllm_pega_connector._native")

INFO = 'device="NVIDIA H200",profile="{profile}",objective="tail",load_policy="auto",save_policy="memcpy"'
MOVED = """
vllm:pega_transfers_total{{{labels}}} 4.0
vllm:pega_transfer_bytes_total{{{labels}}} 268435456.0
vllm:pega_transfer_ranges_total{{{labels}}} 65536.0
vllm:pega_transfer_seconds_sum{{{labels}}} 0.125
vllm:pega_transfer_seconds_bucket{{le="1",{labels}}} 4.0
vllm:pega_queue_seconds_sum{{{labels}}} 0.002
"""


def page(profile: str = "h200", engine: str = "0") -> str:
    common = f'engine="{engine}",model_name="a\\"}} b"'
    labels = f'{common},direction="load",backend="staged"'
    idle = f'{common},direction="save",backend="kernel"'
    return (
        MOVED.format(labels=labels)
        + f"vllm:pega_transfers_total{{{idle}}} 0.0\nvllm:pega_info{{{common},{INFO.format(profile=profile)}}} 1.0\n"
        + f'vllm:pega_saves_dropped_total{{{common},reason="pool_full"}} 7.0\n'
        + f'vllm:pega_pool_slots{{{common},state="free"}} 1000.0\nvllm:num_requests_running{{{common}}} 3.0\n'
    )


@pytest.fixture
def serve() -> Iterator[Callable[[str], str]]:
    """Serves a text at /metrics; its address."""
    servers = []

    def start(text: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["explain", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_what_was_carried_and_what_auto_says(serve, capsys) -> None:
    status, out, err = explain(capsys, "--from-metrics", serve(page()), "--json")
    assert (status, err) == (0, "")
    (engine,) = json.loads(out)["engines"]
    (row,) = engine["carried"]  # what stands at 0 carried nothing
    assert (row["direction"], row["backend"], row["transfers"], row["bytes"]) == ("load", "staged", 4, 268435456)
    assert (row["gib_per_s"], row["mean_queue_ms"]) == (2.0, 0.5)
    assert row["mean_shape"] == {"ranges": 16384, "range_bytes": 4096}
    _, direct, _ = explain(capsys, "--ranges", "16384", "--range-bytes", "4096", "--profile", "h200", "--objective",
                           "tail", "--json")  # fmt: skip
    assert row["auto"]["reason"] == json.loads(direct)["reason"]
    assert engine["counts"] == {"saves_dropped_total": {"pool_full": 7}} and engine["pool"] == {"free": 1000}


def test_for_people_and_by_engine(serve, capsys) -> None:
    status, out, _ = explain(capsys, "--from-metrics", "http://" + serve(page() + page(engine="1")))
    assert status == 0 and out.count("profile h200") == 2
    assert "16384 ranges of 4 KiB" in out and "saves dropped: 7 pool_full" in out and "pool: 1,000 free" in out


def test_a_profile_that_only_the_server_has(serve, capsys) -> None:
    address = serve(page("my-gpu"))
    _, out, _ = explain(capsys, "--from-metrics", address)
    assert "'my-gpu', which is not built in: give its file by --profile" in out
    _, out, _ = explain(capsys, "--from-metrics", address, "--profile", "generic")
    assert "16384 ranges of 4 KiB" in out


def test_a_server_without_the_connector(serve, capsys) -> None:
    status, out, err = explain(capsys, "--from-metrics", serve("vllm:num_requests_running 0.0\n"))
    assert (status, out) == (1, "") and "runs without the connector" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<html>{</html>", "no page of metrics"),
        ("x" * 5000, "more than 0 MiB; is it vLLM?"),
    ],
)
def test_pages_that_are_none(serve, capsys, monkeypatch, text, said) -> None:
    monkeypatch.setattr(cli_running, "MAX_BYTES", 4000)
    status, _, err = explain(capsys, "--from-metrics", serve(text))
    assert status == 2 and said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from-metrics", "127.0.0.1:1"], "does not answer"),
        (["--from-metrics", "file:///etc/passwd"], "allowed: an http address"),
        (["--from-metrics", "http://[::1"], "does not answer"),
        (["--from-metrics", ""], "does not answer"),
        (["--from-metrics", "h", "--ranges", "3"], "either --from-metrics or a transfer"),
    ],
)
def test_bad_addresses_are_one_line(capsys, arguments, said) -> None:
    status, out, err = explain(capsys, *arguments)
    assert (status, out) == (2, "") and said in err and len(err.splitlines()) == 1
