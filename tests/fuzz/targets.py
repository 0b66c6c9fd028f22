# SPDX-License-Identifier: Apache-2.0
"""What reads bytes from outside, as functions of bytes. Each may refuse in the one way it promises; nothing else.

`SEEDS` are well-formed inputs, for a fuzzer to begin with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from vllm_pega_connector import _native, cli_running, model_shape, profile
from vllm_pega_connector.address import HostPort
from vllm_pega_connector.config import ConfigError, PegaConfig, RequestParams
from vllm_pega_connector.migration import protocol
from vllm_pega_connector.migration.pools import Pools
from vllm_pega_connector.migration.protocol import ProtocolError
from vllm_pega_connector.migration.pull import PeerError, Puller
from vllm_pega_connector.migration.serve import Server

KEY = 32
FINGERPRINT = {"model": "m", "dtype": "float32"}
encode = msgspec.msgpack.encode


@cache
def pools() -> Pools:
    """Eight slots of 4 KiB of a real pool; the first four hold keys."""
    pool = _native.HostPool([(4096, 8)])
    table = _native.SlotTable(pool, 0, KEY)
    for slot in range(4):
        table.begin(slot.to_bytes(4, "little"))
        table.end(slot.to_bytes(4, "little"), bytes([slot]) * KEY, 4096)
    shared = [protocol.Pool(pool.data_fd, pool.table_fd, [(4096, 8)])]
    spec = protocol.Spec(
        pools=shared, slot_class=0, key_bytes=KEY, slots=8, fingerprint=FINGERPRINT, listen_host="", listen_port=0,
        data_host="", allow_sources=[], token=None, transport="tcp", timeout_s=1.0, verify=False, same_host=False,
    )  # fmt: skip
    return Pools(spec)


@cache
def server() -> Server:
    return Server(pools(), FINGERPRINT, data_port=1, door=None)


@cache
def puller() -> Puller:
    async def made() -> Puller:
        nothing: Any = None
        return Puller(pools(), nothing, nothing, nothing, FINGERPRINT, verify=False, same_host=False)

    return asyncio.run(made())


def peer_request(data: bytes) -> None:
    """A peer's message to an agent: refused as unreadable, or answered."""
    try:
        request = protocol.parse([protocol.HEADER, data], protocol.request_decoder)
    except ProtocolError as error:
        protocol.frames(protocol.Refused(0, "message", str(error)))
        return
    protocol.frames(server().answer(request))


def peer_header(data: bytes) -> None:
    """Any number of frames with any header."""
    with contextlib.suppress(ProtocolError):
        protocol.parse(data.split(b"\xff"), protocol.request_decoder)


def peer_reply(data: bytes) -> None:
    """A source's answer to a lookup: believed only if it fits our pools."""
    with contextlib.suppress(ProtocolError, PeerError):
        found: Any = protocol.parse([protocol.HEADER, data], protocol.reply_decoder)
        count = puller()._check(found, wanted=4)
        assert count <= 4 and len(found.generations) == 8 * count


def stream(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> None:
    """The first byte says how the rest is cut; the cut must not matter."""
    whole, cut = protocol.Unpacker(decoder), protocol.Unpacker(decoder)
    data, size = data[1:], 1 + (data[0] if data else 0)

    def read(unpacker: protocol.Unpacker, parts: list[bytes]) -> bytes | None:
        messages = []
        try:
            for part in parts:
                messages += unpacker.feed(part)
        except ProtocolError:
            return None
        # A pull without its time gets that of its reading. As bytes: a NaN equals itself.
        return encode([msgspec.structs.replace(m, posted=0) if isinstance(m, protocol.Pull) else m for m in messages])

    assert read(whole, [data]) == read(cut, [data[i : i + size] for i in range(0, len(data), size)])


def agent_says(data: bytes) -> None:
    stream(protocol.from_agent_decoder, data)


def engine_says(data: bytes) -> None:
    stream(protocol.to_agent_decoder, data)


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pega-fuzz")


def profile_json(data: bytes) -> None:
    """A profile's file. One that is accepted must decide everything, and be written and read back as it was."""
    file = Path(folder().name) / "p.json"
    file.write_bytes(data)
    try:
        found = profile.read_profile(file)
    except ConfigError:
        return
    native = _native.DeviceProfile(found)
    for direction in ("load", "save"):
        for ranges, size in ((1, 1), (16384, 4096), (3, 1 << 30)):
            shape = _native.TransferShape(direction, ranges, ranges * size, size, size)
            for objective in ("throughput", "balanced", "tail", "strict"):
                assert _native.decide(shape, native, objective, _native.Policy()).reason
    profile.write_profile(found, file)
    assert profile.read_profile(file) == found


def settings(data: bytes) -> None:
    """kv_connector_extra_config, as JSON."""
    with contextlib.suppress(ValueError, RecursionError):  # of the JSON, which vLLM reads
        extra = json.loads(data)
        with contextlib.suppress(ConfigError):
            PegaConfig.from_extra_config(extra, env={})


def environment(data: bytes) -> None:
    """Lines of NAME=text; the environment is what the user says it is."""
    lines = data.decode("utf-8", "replace").replace("\0", "").splitlines()
    env = {f"VLLM_PEGA_{name}": value for name, _, value in (line.partition("=") for line in lines)}
    with contextlib.suppress(ConfigError):
        PegaConfig.from_extra_config({}, env=env)


@cache
def migrating() -> PegaConfig:
    return PegaConfig.from_extra_config({"migration": {"listen": "127.0.0.1:0"}}, env={})


def request_params(data: bytes) -> None:
    """kv_transfer_params of a client, as JSON: never raises, and says little."""
    with contextlib.suppress(ValueError, RecursionError):  # of the JSON, which vLLM reads
        params = json.loads(data)
        asked = RequestParams.parse(params, migrating())
        assert len(asked.problems) <= 9


def address(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        found = HostPort.parse(data.decode("utf-8", "surrogateescape"))
        assert HostPort.parse(str(found)) == found


def model_config(data: bytes) -> None:
    file = Path(folder().name) / "config.json"
    file.write_bytes(data)
    with contextlib.suppress(ConfigError):
        found = model_shape.read_model_config(str(file))
        for layout in ("vllm", "split", "block"):
            shape = model_shape.block_shape(found, 16, 2, "auto", layout)
            assert shape.fragments > 0 and shape.fragment_bytes > 0


def metrics_page(data: bytes) -> None:
    """What a server answers to `pega explain --from-metrics`."""
    with contextlib.suppress(ConfigError):
        cli_running._answers(cli_running._read(data.decode(errors="replace")), "auto")


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        peer_request, peer_header, peer_reply, agent_says, engine_says, profile_json, settings, environment,
        request_params, address, model_config, metrics_page,
    )
}  # fmt: skip

_slots, _generations = b"\0\0\0\0\1\0\0\0", bytes(16)
_pull = protocol.Pull(1, ["127.0.0.1:1"], bytes(2 * KEY), _slots, 1.0, 0.0)
_found = protocol.Found(1, _slots, _generations, [1 << 20], 4096, 5)
_policy = {"backend": "staged", "chunk_bytes": 65536, "inflight_chunks": 2}
SEEDS: dict[str, list[bytes]] = {
    "peer_request": [
        encode(m)
        for m in (
            protocol.Ping(1),
            protocol.Lookup(2, FINGERPRINT, b"".join(bytes([i]) * KEY for i in range(5)), 1.0),
            protocol.Validate(3, _slots, _generations, True),
        )
    ],
    "peer_header": [protocol.HEADER + b"\xff" + encode(protocol.Ping(1)), b"pega-migration/2\xff"],
    "peer_reply": [
        encode(m)
        for m in (
            protocol.Pong(1, FINGERPRINT, 8, 4096), _found, protocol.Validated(1, b"\1\0", bytes(8)),
            protocol.Refused(1, "model", "other"),
        )
    ],
    "agent_says": [
        b"\3" + protocol.pack(protocol.Ready(1, 2)) + protocol.pack(protocol.Failed("no")),
        b"\0" + protocol.pack(protocol.Ended(1, "s", b"\1\0", b"\0\1", "deadline: slow", 4096, {"read": 0.5})),
    ],
    "engine_says": [b"\7" + protocol.pack(_pull) + protocol.pack(protocol.Stop())],
    "profile_json": [path.read_bytes() for path in sorted(profile.BUILT_IN.glob("*.json"))],
    "settings": [
        json.dumps(c).encode()
        for c in (
            {"host_pool_gib": 1.5, "load_policy": "memcpy", "save_policy": _policy, "objective": "tail"},
            {"migration": {"listen": "[::1]:0", "peers": ["a.b:1"], "allow_sources": ["10.0.0.0/8"], "timeout_s": 1}},
            {"host_pol_gib": [], "max_pending_save_blocks": "auto", "kv_layout": "block", "device_profile": "h200"},
        )
    ],
    "environment": [b"HOST_POOL_GIB=2\nSAVE_DECODE=off\nOBJECTIVE=Tail", b"MIGRATION_LISTEN=a:1\nLOAD_POLICY=memcpy"],
    "request_params": [
        json.dumps({"pega": p}).encode()
        for p in (
            {"source": "127.0.0.1:7000", "load_policy": "kernel", "save_policy": _policy, "save": False},
            {"source": 1, "blocks": 3, "fingerprint": "x", "more": {"deep": [[[]]]}},
        )
    ],
    "address": [b"host:1", b"[::1]:65535", b"10.0.0.1:0"],
    "model_config": [
        json.dumps(c).encode()
        for c in (
            {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
             "head_dim": 16, "torch_dtype": "bfloat16"},
            {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "float16"},
            {"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}},
        )
    ],
    "metrics_page": [
        b'vllm:pega_info{engine="0",profile="h200",objective="tail"} 1.0\n'
        b'vllm:pega_transfers_total{engine="0",direction="load",backend="memcpy"} 3.0\n'
        b'vllm:pega_transfer_bytes_total{engine="0",direction="load",backend="memcpy"} 4096\n'
        b'vllm:pega_pool_slots{engine="0",state="ready"} 7\n'
    ],
}  # fmt: skip
assert SEEDS.keys() == TARGETS.keys()
