# SPDX-License-Identifier: Apache-2.0
"""An OpenAI-compatible proxy over several vLLM instances that moves running streams from one to another.

A stream is moved when its instance has many more streams than another (--threshold), on demand (POST /migrate), or
when its instance fails. The client sees one stream. See migrating_proxy.md for the commands.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

BALANCE_EVERY_S = 0.5
# Parameters whose state lies in the instance and not in the tokens: such a request stays where it is.
PINNED = (
    "stop", "echo", "suffix", "tools", "response_format", "structured_outputs", "logprobs", "top_logprobs",
    "prompt_logprobs", "presence_penalty", "frequency_penalty", "use_beam_search", "thinking_token_budget",
)  # fmt: skip


@dataclass(eq=False)
class Instance:
    """A vLLM server and the address of its migration agent."""

    url: str
    agent: str
    streams: set[Stream] = field(default_factory=set)
    failed_at: float = float("-inf")

    def load(self) -> tuple[bool, int]:
        return time.monotonic() - self.failed_at < 10.0, len(self.streams)


@dataclass(eq=False)
class Stream:
    """One client's stream. `tokens` are generated and shown; everything after them is generated again."""

    id: str
    body: dict[str, Any]
    chat: bool
    instance: Instance
    movable: bool
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    moves: int = 0
    move_to: Instance | None = None
    finished: bool = False
    head: dict[str, Any] = field(default_factory=dict)  # of the first chunk, kept to the last
    held: list[int] = field(default_factory=list)  # generated, but their text is not out yet

    def request(self, limit: int, source: Instance | None) -> tuple[str, dict[str, Any]]:
        """(path, body) of what the current instance is asked: the whole, or the rest of it."""
        body = {**self.body, "stream": True, "return_token_ids": True}
        if source is not None:
            params = dict(body.get("kv_transfer_params") or {})
            params["pega"] = {**(params.get("pega") or {}), "source": source.agent}
            body["kv_transfer_params"] = params
        if not self.prompt:
            return ("/v1/chat/completions" if self.chat else "/v1/completions"), body
        asked = body.pop("max_completion_tokens", None) or body.pop("max_tokens", None)
        if asked is None:
            asked = limit - len(self.prompt) if self.chat else 16  # OpenAI's default for completions
        for key in ("messages", "chat_template_kwargs", "add_generation_prompt", "max_tokens"):
            body.pop(key, None)
        body["prompt"] = self.prompt + self.tokens
        body["max_tokens"] = asked - len(self.tokens)
        if body.get("min_tokens"):
            body["min_tokens"] = max(0, body["min_tokens"] - len(self.tokens))
        return "/v1/completions", body


class Moved(Exception):
    """The stream is to go on elsewhere."""


class Proxy:
    def __init__(self, instances: list[Instance], threshold: int) -> None:
        self.instances = instances
        self.threshold = threshold
        self.streams: dict[str, Stream] = {}
        self._numbers = itertools.count(1)
        self._limits: dict[str, int] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.cleanup_ctx.append(self._session)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/migrate", self.migrate)
        app.router.add_get("/streams", self.list)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def _session(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self.http:
            balancing = asyncio.create_task(self._balance())
            yield
            balancing.cancel()

    def least_loaded(self, other_than: Instance | None = None) -> Instance:
        """Instances that failed lately come last."""
        return min((i for i in self.instances if i is not other_than), key=Instance.load)

    # --- moving ---

    async def _balance(self) -> None:
        while self.threshold:
            await asyncio.sleep(BALANCE_EVERY_S)
            full, empty = max(self.instances, key=lambda i: len(i.streams)), self.least_loaded()
            if len(full.streams) - len(empty.streams) < self.threshold:
                continue
            movable = [s for s in full.streams if s.movable and s.tokens and s.move_to is None]
            if movable:
                # The one that has moved least, and has least to carry.
                min(movable, key=lambda s: (s.moves, len(s.prompt) + len(s.tokens))).move_to = empty

    async def migrate(self, request: web.Request) -> web.Response:
        """{"id": a stream's id, "to": an instance's URL}; both may be left out: any stream, the least loaded."""
        try:
            asked = await request.json()
            streams = [
                s for s in self.streams.values() if s.movable and asked.get("id", s.id) in (s.id, s.head.get("id"))
            ]
            targets = [i for i in self.instances if asked.get("to", i.url).rstrip("/") == i.url]
        except (ValueError, AttributeError):
            return _error(400, 'the body must be JSON such as {"id": "...", "to": "http://..."}; both are optional')
        if not streams:
            return _error(404, f"no such stream can be moved; GET /streams lists the {len(self.streams)} that run")
        stream = streams[0]
        targets = [i for i in targets if i is not stream.instance]
        if not targets:
            return _error(404, f"no other such instance; there are {', '.join(i.url for i in self.instances)}")
        stream.move_to = min(targets, key=Instance.load)
        return web.json_response({"id": stream.id, "from": stream.instance.url, "to": stream.move_to.url})

    async def list(self, request: web.Request) -> web.Response:
        return web.json_response(
            [
                {"id": s.id, "response": s.head.get("id"), "instance": s.instance.url, "movable": s.movable,
                 "prompt_tokens": len(s.prompt), "tokens": len(s.tokens), "moves": s.moves}
                for s in self.streams.values()
            ]
        )  # fmt: skip

    # --- requests ---

    async def forward(self, request: web.Request, body: bytes | None = None) -> web.StreamResponse:
        """Anything else goes to the least loaded instance as it is."""
        instance = self.least_loaded()
        data = await request.read() if body is None else body
        headers = {k: v for k, v in request.headers.items() if k.lower() in ("authorization", "content-type", "accept")}
        try:
            async with self.http.request(
                request.method, instance.url + request.path_qs, data=data, headers=headers
            ) as got:
                answer = web.StreamResponse(
                    status=got.status, headers={"content-type": got.headers.get("content-type", "")}
                )
                await answer.prepare(request)
                async for part in got.content.iter_any():
                    await answer.write(part)
                return answer
        except aiohttp.ClientConnectorError as error:
            instance.failed_at = time.monotonic()
            return _error(502, f"{instance.url} cannot be reached: {error}")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        try:
            body = json.loads(raw)
            streamed = bool(body.get("stream"))
        except (ValueError, AttributeError):
            return _error(400, "the body is not a JSON object")
        if not streamed:
            return await self.forward(request, raw)
        movable = (
            not any(body.get(p) for p in PINNED) and body.get("n") in (None, 1) and len(self.instances) > 1
        )  # fmt: skip
        instance = self.least_loaded()
        stream = Stream(f"s{next(self._numbers)}", body, request.path.endswith("/chat/completions"), instance, movable)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "x-stream-id": stream.id})
        self.streams[stream.id] = stream
        instance.streams.add(stream)
        authorization = {k: v for k, v in request.headers.items() if k.lower() == "authorization"}
        try:
            return await self._run(stream, request, answer, authorization)
        finally:
            del self.streams[stream.id]
            stream.instance.streams.discard(stream)

    async def _run(
        self, stream: Stream, request: web.Request, answer: web.StreamResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        """One instance after the other until the stream is over."""
        source: Instance | None = None
        tried = 0
        while True:
            limit = await self._limit(stream, headers) if stream.chat and stream.prompt else 0
            path, body = stream.request(limit, source)
            before = len(stream.tokens)
            try:
                async with self.http.post(stream.instance.url + path, json=body, headers=headers) as got:
                    if got.status != 200:
                        if answer.prepared:
                            raise aiohttp.ClientPayloadError(f"HTTP {got.status}: {(await got.text())[:200]}")
                        return web.Response(status=got.status, text=await got.text(), content_type="application/json")
                    if not answer.prepared:
                        await answer.prepare(request)
                    async for event in _events(got):
                        await self._show(stream, answer, event)
                        if stream.move_to is not None and stream.tokens and not stream.finished:
                            raise Moved
                await answer.write(b"data: [DONE]\n\n")
                return answer
            except Moved:
                target = stream.move_to
                assert target is not None
                tried = 0
            except aiohttp.ClientError as error:
                if stream.finished:
                    await answer.write(b"data: [DONE]\n\n")
                    return answer
                stream.instance.failed_at = time.monotonic()
                tried = 1 if len(stream.tokens) > before else tried + 1
                if not stream.movable or tried > len(self.instances) or (answer.prepared and not stream.prompt):
                    if not answer.prepared:
                        return _error(502, f"{stream.instance.url} failed: {error}")
                    await answer.write(
                        f"data: {json.dumps({'error': {'message': str(error), 'code': 502}})}\n\n".encode()
                    )
                    return answer
                target = self.least_loaded(stream.instance)
            # Leaving the block above closed the connection, by which the instance ends the request.
            source = stream.instance if stream.prompt else None
            stream.instance.streams.discard(stream)
            stream.instance, stream.move_to = target, None
            target.streams.add(stream)
            stream.moves += 1
            stream.held.clear()

    async def _limit(self, stream: Stream, headers: dict[str, str]) -> int:
        """Context length of the model: a chat without max_tokens goes on until there."""
        url = stream.instance.url
        if url not in self._limits:
            async with self.http.get(url + "/v1/models", headers=headers) as got:
                self._limits[url] = int((await got.json())["data"][0]["max_model_len"])
        return self._limits[url]

    async def _show(self, stream: Stream, answer: web.StreamResponse, event: dict[str, Any]) -> None:
        """Passes a chunk on as a chunk of the one stream that the client sees."""
        for choice in event.get("choices", ()):
            shown = stream.body.get("return_token_ids")
            prompt = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
            if not stream.prompt and prompt:
                stream.prompt = list(prompt)
            stream.held += choice.get("token_ids") or []
            out: list[int] = []
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            stream.finished = stream.finished or bool(choice.get("finish_reason"))
            if text or stream.finished:
                # Until text is out a token may be half a character, and is generated again after a move.
                out, stream.held = stream.held, []
                stream.tokens += out
            if stream.moves and stream.chat and "text" in choice:
                choice["delta"] = {"content": choice.pop("text")}
            if stream.moves or not shown:
                choice.pop("prompt_token_ids", None)
                event.pop("prompt_token_ids", None)
            if shown:
                choice["token_ids"] = out
            else:
                choice.pop("token_ids", None)
        if usage := event.get("usage"):
            usage["prompt_tokens"] = len(stream.prompt) or usage["prompt_tokens"]
            usage["completion_tokens"] = len(stream.tokens)
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        if not stream.head:
            stream.head = {k: event[k] for k in ("id", "created", "model", "object") if k in event}
        await answer.write(f"data: {json.dumps({**event, **stream.head})}\n\n".encode())


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of a stream of server-sent events. Raises ClientPayloadError if it ends before [DONE], or says so."""
    buffer = b""
    async for part in response.content.iter_any():
        buffer += part
        while (end := buffer.find(b"\n\n")) >= 0:
            line, buffer = buffer[:end].strip(), buffer[end + 2 :]
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise aiohttp.ClientPayloadError(str(event["error"]))
                yield event
    raise aiohttp.ClientPayloadError("the stream ended before it was done")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Proxy that moves running streams between vLLM instances.")
    parser.add_argument(
        "--instance", action="append", required=True, metavar="URL=AGENT", dest="instances",
        help="a vLLM server and its migration agent, such as http://10.0.0.1:8000=10.0.0.1:7100; at least two to move",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--threshold", type=int, default=4, help="move when loads differ by so many streams; 0: never")
    args = parser.parse_args(argv)
    if args.threshold < 0 or args.threshold == 1:
        parser.error("--threshold must be 0 or at least 2: a difference of one cannot be mended by moving")
    for text in args.instances:
        url, _, agent = text.partition("=")
        if not url.startswith(("http://", "https://")) or not agent:
            parser.error(f"--instance {text}: give URL=AGENT, such as http://10.0.0.1:8000=10.0.0.1:7100")
    args.instances = [Instance(url.rstrip("/"), agent) for url, _, agent in (i.partition("=") for i in args.instances)]
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    line = f"proxy on http://{args.host}:{args.port} over {', '.join(i.url for i in args.instances)}"
    app = Proxy(args.instances, args.threshold).app()
    web.run_app(app, host=args.host, port=args.port, print=lambda _: print(line, flush=True))


if __name__ == "__main__":
    main()
