# SPDX-License-Identifier: Apache-2.0
"""What a subscriber of vLLM's KV cache events learns of the host pool, from a real engine over ZMQ."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("vllm")

import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from tests.serving.engine import BLOCK, Ask, Engine

pytestmark = pytest.mark.vllm

POOL_GIB = 0.002
GPU_BLOCKS = 40
Event = BlockStored | BlockRemoved | AllBlocksCleared


class Subscriber:
    """`stored`: what a router would believe to be in the host pool: hash -> (parent, tokens)."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next = 0
        self.on_gpu: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}  # ever
        self.stored: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}
        self.removed: list[bytes] = []
        self.cleared = 0

    def read(self) -> None:
        while self._socket.poll(500):
            _, number, payload = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._next, "a batch was lost"
            self._next += 1
            for event in self._decode(payload).events:
                self._apply(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.cleared += 1
            self.stored.clear()
        elif isinstance(event, BlockStored):
            blocks, parent = {}, event.parent_block_hash
            assert len(event.token_ids) == len(event.block_hashes) * event.block_size and event.block_size == BLOCK
            for i, key in enumerate(event.block_hashes):
                blocks[key] = (parent, tuple(event.token_ids[i * BLOCK : (i + 1) * BLOCK]))
                parent = key
            if event.medium == "GPU":
                self.on_gpu |= blocks
                return
            assert (event.medium, event.group_idx, event.lora_name) == ("CPU", 0, None)
            assert self.stored.keys().isdisjoint(blocks)
            self.stored |= blocks
        elif event.medium == "CPU":
            for key in event.block_hashes:
                del self.stored[key]
                self.removed.append(key)

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Subscriber]]:
    # A short path: those of Unix sockets end at 107 characters.
    endpoint = f"ipc://{tmp_path_factory.mktemp('e') / 's'}"
    subscriber = Subscriber(endpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")  # whole hashes, as the index has them
        made = Engine(
            {"host_pool_gib": POOL_GIB},
            num_gpu_blocks_override=GPU_BLOCKS,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint),
        )
        yield made, subscriber
        made.close()
    subscriber.close()


def prompt(seed: int, blocks: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1, 1024), k=blocks * BLOCK + 5))


def chain(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [tokens[i : i + BLOCK] for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def in_pool(engine: Engine, keys: set[bytes]) -> set[bytes]:
    index = engine.connector._scheduler._shared.index
    return {key for key in keys if index.match(0, key)}


def test_stored_removed_cleared(engine: tuple[Engine, Subscriber]) -> None:
    made, seen = engine
    slots = made.counts()["total"]
    assert 20 <= slots <= 100
    shared = prompt(0, 3)
    asks = [Ask(prompt(1, 6), 1), Ask(shared, 1), Ask(shared[: 3 * BLOCK] + prompt(2, 2), 1)]
    made.run(asks)
    made.finish()
    seen.read()
    expected = {block for ask in asks for block in chain(ask.prompt)}
    assert len(expected) == 6 + 3 + 2
    assert {tokens for _, tokens in seen.stored.values()} == expected
    # Hash by hash what vLLM itself says of these blocks, parents included.
    assert seen.stored == seen.on_gpu
    assert not seen.removed and not seen.cleared

    for seed in range(10, 10 + 2 * slots // 8):
        made.run([Ask(prompt(seed, 8), 1)])
    made.finish()
    seen.read()
    assert len(seen.removed) == made.connector._scheduler._shared.index.evictions >= slots
    assert len(seen.stored) == made.counts()["ready"] <= slots
    assert seen.stored.keys() == in_pool(made, set(seen.on_gpu))
    assert seen.stored.items() <= seen.on_gpu.items()

    made.forget_all()
    made.run([Ask(prompt(90, 2), 1)])  # vLLM publishes with the next step
    made.finish()
    seen.read()
    assert seen.cleared == 2  # of the GPU's cache, and of the pool
    assert {tokens for _, tokens in seen.stored.values()} == set(chain(prompt(90, 2)))
    assert seen.stored.keys() == in_pool(made, set(seen.on_gpu))
    made.assert_idle()
