# SPDX-License-Identifier: Apache-2.0
"""The example proxy over two real `vllm serve` processes: a stream moves there and back, and the client sees one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake.engine")

import aiohttp
from aiohttp import web

from examples.demo.server import Server, serve
from examples.migrating_proxy import Instance, Proxy, parse
from tests.support.tiny_model import make_tiny_model, random_prompt

pytestmark = pytest.mark.vllm

BLOCK = 32
LIMIT_S = 240  # a machine with other work is slow
# Some seconds after the last move at 100: on a busy machine the instances run far ahead of the client that asks for it.
LENGTH = 500
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
ARGUMENTS = [
    "--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024",
    "--max-num-seqs", "8",
    "--num-gpu-blocks-override", "100", "--chat-template", CHAT_TEMPLATE,
    "--logits-processors", "tests.support.slow_decode:SlowDecode", "--kv-transfer-config",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def transfer_config(agent_port: int) -> str:
    return json.dumps(
        {
            "kv_connector": "PegaConnector",
            "kv_connector_module_path": "vllm_pega_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "host_pool_gib": 0.05,
                "migration": {"listen": f"127.0.0.1:{agent_port}", "transport": "tcp"},
            },
        }
    )


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Server, str]]]:
    model = Path(make_tiny_model(max_length=1024))
    logs = tmp_path_factory.mktemp("logs")
    ports = [free_port(), free_port()]

    def start(n: int) -> Server:
        arguments = [*ARGUMENTS, transfer_config(ports[n])]
        return stack.enter_context(serve(model, arguments, logs / f"{n}.log", lambda waited: None))

    with pytest.MonkeyPatch.context() as environment, ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        environment.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        made = list(pool.map(start, range(2)))
        yield [(server, f"127.0.0.1:{port}") for server, port in zip(made, ports, strict=True)]


@asynccontextmanager
async def proxy(servers: list[tuple[Server, str]], threshold: int = 0) -> AsyncIterator[tuple[Proxy, str, Any]]:
    made = Proxy([Instance(server.url, agent) for server, agent in servers], threshold)
    runner = web.AppRunner(made.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port := free_port())
    await site.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield made, f"http://127.0.0.1:{port}", http
    finally:
        await runner.cleanup()


async def stream(http: Any, url: str, path: str, body: dict[str, Any], at: dict[int, Any]) -> list[dict[str, Any]]:
    """All chunks; `at[n]` is awaited when n tokens have come."""
    chunks: list[dict[str, Any]] = []
    count = 0
    async with http.post(url + path, json={**body, "stream": True, "return_token_ids": True}) as got:
        assert got.status == 200, await got.text()
        async for line in got.content:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunks.append(json.loads(data))
            for choice in chunks[-1]["choices"]:
                for _ in choice.get("token_ids") or []:
                    count += 1
                    if count in at:
                        await at[count]()
    return chunks


def tokens(chunks: list[dict[str, Any]]) -> list[int]:
    return [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids") or []]


def text(chunks: list[dict[str, Any]]) -> str:
    parts = [ch.get("text") or ch.get("delta", {}).get("content") for c in chunks for ch in c["choices"]]
    return "".join(p for p in parts if p)


def hits(servers: list[tuple[Server, str]]) -> list[float]:
    return [server.total("vllm:external_prefix_cache_hits_total") for server, _ in servers]


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_stream_moves_there_and_back(servers: list[tuple[Server, str]], kind: str) -> None:
    prompt = random_prompt(200, seed=1 if kind == "chat" else 2)
    common = {"model": "tiny", "max_tokens": LENGTH, "temperature": 0, "stream_options": {"include_usage": True}}
    if kind == "chat":
        path, body = "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": prompt}]}
    else:
        path, body = "/v1/completions", {**common, "prompt": prompt}
    before = hits(servers)

    async def run() -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]:
        async with proxy(servers) as (made, url, http):
            moved: list[int] = []

            async def move() -> None:
                async with http.post(f"{url}/migrate", json={}) as got:
                    assert got.status == 200, await got.text()
                moved.append(1)

            chunks = await stream(http, url, path, body, {50: move, 100: move})
            assert made.streams == {} and all(not i.streams for i in made.instances)
            alone = await stream(http, servers[1][0].url, path, body, {})
            return chunks, alone, moved

    chunks, alone, moved = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert len(moved) == 2
    assert len(tokens(alone)) == LENGTH
    assert tokens(chunks) == tokens(alone)
    assert text(chunks) == text(alone)
    assert len({c["id"] for c in chunks}) == 1 and len({c["object"] for c in chunks}) == 1
    assert [ch["finish_reason"] for c in chunks for ch in c["choices"] if ch.get("finish_reason")] == ["length"]
    usage = next(c["usage"] for c in chunks if c.get("usage"))
    assert (
        usage["completion_tokens"] == LENGTH
        and usage["prompt_tokens"] == next(c["usage"] for c in alone if c.get("usage"))["prompt_tokens"]
    )
    # Each move brought at least the prompt's blocks from the other instance.
    gained = [after - b for after, b in zip(hits(servers), before, strict=True)]
    assert max(gained) >= 200 // BLOCK * BLOCK, gained


def test_streams_move_when_one_instance_has_too_many(servers: list[tuple[Server, str]]) -> None:
    prompts = [random_prompt(100, seed=10 + n) for n in range(4)]
    body = {"model": "tiny", "max_tokens": 300, "temperature": 0}

    async def run() -> tuple[list[list[int]], list[list[int]], int]:
        async with proxy(servers, threshold=2) as (made, url, http):
            made.instances[1].failed_at = float("inf")  # so that all begin on the first
            streams = [
                asyncio.create_task(stream(http, url, "/v1/completions", {**body, "prompt": p}, {})) for p in prompts
            ]
            while len(made.instances[0].streams) < 4 and not any(s.done() for s in streams):
                await asyncio.sleep(0.01)
            made.instances[1].failed_at = float("-inf")
            moves = 0
            while not all(s.done() for s in streams):
                moves = max(moves, sum(s.moves for s in made.streams.values()))
                await asyncio.sleep(0.01)
            direct = [
                await stream(http, servers[0][0].url, "/v1/completions", {**body, "prompt": p}, {}) for p in prompts
            ]
            return [tokens(s.result()) for s in streams], [tokens(d) for d in direct], moves

    got, direct, moves = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert got == direct
    assert moves >= 1


class Script:
    """An instance that streams these (token, text) pairs, and waits for `go` before the last."""

    def __init__(self, parts: list[tuple[int, str]]) -> None:
        self._parts = parts
        self.go, self.over = asyncio.Event(), asyncio.Event()
        self.asked: list[Any] = []

    async def start(self, stack: AsyncExitStack) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        stack.callback(self.over.set)
        await web.TCPSite(runner, "127.0.0.1", port := free_port()).start()
        return f"http://127.0.0.1:{port}"

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((await request.json())["prompt"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        for i, (token, text) in enumerate(self._parts):
            if i == len(self._parts) - 1:
                await self.go.wait()
            choice = {"index": 0, "text": text, "token_ids": [token], "prompt_token_ids": None if i else [1, 2],
                      "finish_reason": "stop" if text == "end" else None}  # fmt: skip
            await answer.write(f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode())
        if self._parts[-1][1] == "end":
            await answer.write(b"data: [DONE]\n\n")
        else:
            await self.over.wait()
        return answer


def test_tokens_without_text_come_once() -> None:
    """Such as <unk>, which detokenizes to nothing, or the first part of a character: a move takes them back."""

    async def run() -> tuple[list[int], list[Any]]:
        async with AsyncExitStack() as stack:
            first = Script([(5, "five "), (0, ""), (0, "")])
            second = Script([(0, ""), (0, ""), (7, "end")])
            second.go.set()
            urls = [await first.start(stack), await second.start(stack)]
            servers = [(Server(None, int(url.rsplit(":", 1)[1]), Path()), "127.0.0.1:9") for url in urls]  # type: ignore[arg-type]
            made, url, http = await stack.enter_async_context(proxy(servers))

            async def move() -> None:
                while not (running := list(made.streams.values())) or running[0].held != [0]:
                    await asyncio.sleep(0.01)
                async with http.post(f"{url}/migrate", json={}) as got:
                    assert got.status == 200
                first.go.set()

            chunks = await stream(http, url, "/v1/completions", {"model": "x", "prompt": [1, 2]}, {1: move})
            return tokens(chunks), second.asked

    shown, asked = asyncio.run(asyncio.wait_for(run(), 30))
    assert shown == [5, 0, 0, 7]
    assert asked == [[1, 2, 5]]


def test_an_instance_that_is_not_there_is_gone_around(servers: list[tuple[Server, str]]) -> None:
    async def run() -> tuple[list[int], list[int]]:
        dead = Server(servers[0][0].process, 9, servers[0][0].log)
        async with proxy([(dead, "127.0.0.1:9"), servers[1]]) as (_, url, http):
            body = {"model": "tiny", "max_tokens": 20, "temperature": 0, "prompt": random_prompt(50, seed=20)}
            through = await stream(http, url, "/v1/completions", body, {})
            return tokens(through), tokens(await stream(http, servers[1][0].url, "/v1/completions", body, {}))

    through, direct = asyncio.run(asyncio.wait_for(run(), LIMIT_S))
    assert through == direct and len(through) == 20


@pytest.mark.parametrize(
    "arguments", [["--instance", "localhost:8000"], ["--instance", "http://a=b", "--threshold", "1"], []]
)
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2 and "--" in capsys.readouterr().err
