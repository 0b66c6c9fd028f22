# SPDX-License-Identifier: Apache-2.0
"""A real `vllm serve`: known traffic is found on /metrics to the byte, and no scraper can disturb serving."""

from __future__ import annotations

import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from prometheus_client.parser import text_string_to_metric_families

from examples.demo.server import Server, free_port, serve
from tests.support.tiny_model import make_tiny_model, random_prompt
from vllm_pega_connector import cli
from vllm_pega_connector.prometheus import METRICS

pytestmark = pytest.mark.vllm

BLOCK = 32
PROMPT_BLOCKS = 10
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK + 8
LAYERS, KV_HEADS, HEAD = 3, 2, 32
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * HEAD * 4 * BLOCK  # keys and values in float32
POOL_GIB = 0.05
ODD_NAME = 'tiny "q" \\ {le="1"}\nvllm:pega_x 1 \u00e4\u4e2d'
BACKENDS = ("memcpy", "kernel", "chunked", "staged")


class Scraper(threading.Thread):
    """Asks for /metrics as fast as it can, from before the server listens."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.refused = self.answered = 0
        self.strange: list[str] = []
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            try:
                with urllib.request.urlopen(self.url, timeout=10) as answer:
                    list(text_string_to_metric_families(answer.read().decode()))
                self.answered += 1
            except (urllib.error.URLError, ConnectionError) as error:
                self.refused += 1
                if "refused" not in str(error) and "reset" not in str(error):
                    self.strange.append(str(error))
            except ValueError as error:
                self.strange.append(str(error))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Scraper]]:
    transfer = {
        "kv_connector": "PegaConnector",
        "kv_connector_module_path": "vllm_pega_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_pool_gib": POOL_GIB, "log_decisions": True, "max_pending_save_blocks": 50},
    }
    arguments = ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024",
                 "--num-gpu-blocks-override", "60", "--served-model-name", ODD_NAME, "tiny",
                 "--kv-transfer-config", json.dumps(transfer)]  # fmt: skip
    model = Path(make_tiny_model(max_length=1024, layers=LAYERS, kv_heads=KV_HEADS, hidden=4 * HEAD, heads=4))
    port = free_port()
    scraper = Scraper(port)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # for /reset_prefix_cache
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # other tests of this process want less
        scraper.start()
        log = tmp_path_factory.mktemp("log") / "serve.log"
        with serve(model, arguments, log, lambda waited: None, port) as server:
            time.sleep(0.5)
            scraper.done.set()
            scraper.join(10)
            yield server, scraper


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(server: Server) -> Samples:
    """Every sample of ours; the labels that vLLM adds are checked, and left out."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm:pega_") and not sample.name.endswith(("_created", "_bucket")):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("engine")) == (ODD_NAME, "0")
                found[sample.name.removeprefix("vllm:pega_"), frozenset(labels.items())] = sample.value
    return found


def gained(before: Samples, after: Samples) -> dict[str, float]:
    """What has changed, as "name label=value ...": new values of gauges, growth of the others; no seconds."""
    changed = {}
    for (name, labels), value in after.items():
        if not name.endswith("seconds_sum") and value != before.get((name, labels), 0):
            grown = value if name in ("pool_slots", "info") else value - before.get((name, labels), 0)
            changed[" ".join([name, *(f"{k}={v}" for k, v in sorted(labels))])] = grown
    return changed


def settled(server: Server, name: str, labels: dict[str, str], value: float) -> Samples:
    """The samples as soon as one of them is what it must become; the last saves end after the last answer."""
    deadline = time.monotonic() + 20
    while True:
        now = samples(server)
        if now.get((name, frozenset(labels.items()))) == value or time.monotonic() > deadline:
            time.sleep(0.3)  # what comes in the same report, or wrongly after it
            return samples(server)
        time.sleep(0.1)


def reset_gpu_cache(server: Server) -> None:
    request = urllib.request.Request(server.url + "/reset_prefix_cache", method="POST")
    urllib.request.urlopen(request, timeout=30).close()


def test_scraped_while_it_starts(started: tuple[Server, Scraper]) -> None:
    server, scraper = started
    assert not scraper.strange, scraper.strange[:3]
    assert scraper.refused > 0 and scraper.answered > 0
    before = samples(server)
    assert before[("transfers_total", frozenset({("direction", "load"), ("backend", "staged")}))] == 0
    assert {m.name for m in METRICS if m.known} <= {name for name, _ in before}


def test_every_byte_block_and_transfer_is_counted(started: tuple[Server, Scraper]) -> None:
    """Prompts of 10 blocks saved under each policy, then loaded under each other one."""
    server, _ = started
    prompts = [random_prompt(PROMPT_TOKENS, seed) for seed in range(len(BACKENDS))]
    nbytes = PROMPT_BLOCKS * BLOCK_BYTES
    before = samples(server)
    texts = [
        server.complete(text, 1, {"pega": {"save_policy": policy}}).text
        for text, policy in zip(prompts, BACKENDS, strict=True)
    ]
    saved = settled(server, "transfer_blocks_total", {"direction": "save"}, 4 * PROMPT_BLOCKS)
    total = int(POOL_GIB * 2**30) // BLOCK_BYTES
    expected: dict[str, float] = {
        "transfer_blocks_total direction=save": 4 * PROMPT_BLOCKS,
        "pool_slots state=ready": 4 * PROMPT_BLOCKS,
        "pool_slots state=free": total - 4 * PROMPT_BLOCKS,
        "pool_slots state=total": total,
        f"info device={_device(saved)} load_policy=auto objective=balanced profile=host save_policy=auto": 1,
    }
    for backend in BACKENDS:
        labels = f"backend={backend} direction=save"
        expected |= {
            f"transfer_bytes_total {labels}": nbytes,
            f"transfers_total {labels}": 1,
            f"transfer_ranges_total {labels}": PROMPT_BLOCKS * LAYERS,
            f"transfer_seconds_count {labels}": 1,
            f"queue_seconds_count {labels}": 1,
        }
    assert gained(before, saved) == expected

    reset_gpu_cache(server)
    hits = server.total("vllm:external_prefix_cache_hits_total")
    for text, policy, said in zip(prompts, reversed(BACKENDS), texts, strict=True):
        assert server.complete(text, 1, {"pega": {"load_policy": policy}}).text == said
    loaded = settled(server, "transfer_blocks_total", {"direction": "load"}, 4 * PROMPT_BLOCKS)
    changed = gained(saved, loaded)
    # Blocks that lie beside each other in the cache merge.
    ranges = [changed.pop(f"transfer_ranges_total backend={b} direction=load") for b in BACKENDS]
    assert all(LAYERS <= n <= LAYERS * PROMPT_BLOCKS for n in ranges)
    expected = {"transfer_blocks_total direction=load": 4 * PROMPT_BLOCKS}
    for backend in BACKENDS:
        labels = f"backend={backend} direction=load"
        expected |= {f"transfer_bytes_total {labels}": nbytes, f"transfers_total {labels}": 1,
                     f"transfer_seconds_count {labels}": 1, f"queue_seconds_count {labels}": 1}  # fmt: skip
    assert changed == expected
    assert server.total("vllm:external_prefix_cache_hits_total") - hits == 4 * PROMPT_BLOCKS * BLOCK
    tiers = server.metrics().get("vllm:prompt_tokens_cached_by_source_total", [])  # not in older vLLM
    external = {labels["source"]: tokens for labels, tokens in tiers if labels["source"] != "device" and tokens}
    assert external == ({"host": 4 * PROMPT_BLOCKS * BLOCK} if tiers else {})


def _device(found: Samples) -> str:
    return next(dict(labels)["device"] for name, labels in found if name == "info")


def test_wrong_parameters_have_a_count_of_their_own(started: tuple[Server, Scraper]) -> None:
    server, _ = started
    before = samples(server)
    odd = {"pega": {"load_policy": ODD_NAME, "save": 'x"}\n', "\n\u2028": 1}}
    server.complete(random_prompt(8, seed=50), 1, odd)
    after = settled(server, "ignored_request_params_total", {}, 3)
    assert gained(before, after) == {"ignored_request_params_total": 3}


def test_consumers_that_die_while_they_read(started: tuple[Server, Scraper]) -> None:
    server, _ = started
    port = int(server.url.rsplit(":", 1)[1])
    prompt = random_prompt(PROMPT_TOKENS, seed=60)
    text = server.complete(prompt, 20).text
    stop = threading.Event()
    killed = 0

    def die_again_and_again() -> None:
        nonlocal killed
        while not stop.is_set():
            with socket.create_connection(("127.0.0.1", port), 10) as consumer:
                consumer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                consumer.recv(64)
                # Closed with a reset, the rest unread: what a killed process leaves behind.
                consumer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            killed += 1

    thread = threading.Thread(target=die_again_and_again)
    thread.start()
    slow = subprocess.Popen(  # and a real process, which reads nothing and is killed
        [sys.executable, "-c", "import socket,sys,time\n"
         f"s = socket.create_connection(('127.0.0.1', {port}))\n"
         "s.sendall(b'GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\nprint('asked', flush=True)\ntime.sleep(60)"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert slow.stdout is not None and slow.stdout.readline() == b"asked\n"
        before = samples(server)
        reset_gpu_cache(server)
        assert server.complete(prompt, 20).text == text
        slow.send_signal(signal.SIGKILL)
        assert server.complete(prompt, 20).text == text
    finally:
        stop.set()
        thread.join(30)
        slow.kill()
        slow.wait()
        slow.stdout.close() if slow.stdout else None
    assert killed > 5
    expected = before[("transfer_blocks_total", frozenset({("direction", "load")}))] + PROMPT_BLOCKS
    after = settled(server, "transfer_blocks_total", {"direction": "load"}, expected)
    assert gained(before, after)["transfer_blocks_total direction=load"] == PROMPT_BLOCKS
    assert after[("faults_total", frozenset())] == 0
    assert server.process.poll() is None


def test_the_log_shows_decisions(started: tuple[Server, Scraper]) -> None:
    server, _ = started
    log = server.log.read_text(errors="replace")
    for words in ("PegaConnector on host device", "1,024 blocks", f"{LAYERS} fragments of 16 KiB per block",
                  "PegaConnector decision: load of", "PegaConnector decision: save of"):  # fmt: skip
        assert words in log
    deadline = time.monotonic() + 15  # vLLM writes its line every ten seconds
    while "KV Transfer metrics: " not in server.log.read_text(errors="replace") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert "save blocks=" in server.log.read_text(errors="replace")


def test_explain_reads_the_running_server(started: tuple[Server, Scraper], capsys: pytest.CaptureFixture[str]) -> None:
    server, _ = started
    assert cli.main(["explain", "--from-metrics", server.url, "--json"]) == 0
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    carried = {(c["direction"], c["backend"]): c for c in engine["carried"]}
    assert set(carried) >= {(d, b) for d in ("load", "save") for b in BACKENDS}
    staged = carried["save", "staged"]
    assert (staged["transfers"], staged["bytes"]) == (1, PROMPT_BLOCKS * BLOCK_BYTES)
    assert staged["mean_shape"] == {"ranges": PROMPT_BLOCKS * LAYERS, "range_bytes": BLOCK_BYTES // LAYERS}
    assert "30 ranges of 16 KiB" in staged["auto"]["reason"]
    assert engine["info"]["profile"] == "host"
    assert cli.main(["explain", "--from-metrics", server.url.removeprefix("http://")]) == 0
    out = capsys.readouterr().out
    assert "staged" in out and "Auto for the mean shape" in out
    assert cli.main(["explain", "--from-metrics", server.url + "/nothing"]) == 2
    assert "does not answer" in capsys.readouterr().err
