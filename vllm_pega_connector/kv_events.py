# SPDX-License-Identifier: Apache-2.0
"""vLLM's KV cache events (--kv-events-config): which blocks the host pool holds, for routers that follow them.

The index alone knows what can be found in the pool, whoever put it there, so the events are its own changes. It
has keys only; what else an event says of a block is noted when a request offers the block for saving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pega_connector import compat

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

MEDIUM = "CPU"  # vLLM's word for host memory
# Keys that the index keeps for us between two steps. vLLM asks at every step, and a step changes fewer.
MAX_CHANGES = 1 << 16
# Blocks whose tokens are remembered until they are stored. Those of dropped saves go with the time; a block that was
# forgotten too early is announced by its hash alone.
MAX_NOTES = 1 << 14


@dataclass(frozen=True)
class Note:
    parent: bytes | None
    tokens: tuple[int, ...]
    lora: tuple[int | None, str | None]  # id and name


class KvEvents:
    def __init__(self, kv_cache_config: Any, block_size: int, key_bytes: int) -> None:
        self._groups = compat.event_groups(kv_cache_config)
        self._block_size = block_size
        self._key_bytes = key_bytes
        self._index: Any = None
        self._notes: dict[tuple[int, bytes], Note] = {}
        self._cleared = False

    def watch(self, index: Any) -> None:
        """From now on `index` is the pool; what another one had is gone."""
        self._cleared = self._index is not None
        self._index = index
        index.record_changes(MAX_CHANGES)

    def note(self, request: Request, group: int, first: int, joined: bytes) -> None:
        """Blocks of a request, in order and none before `first`, are about to be saved."""
        lora = request.lora_request
        names = (lora.adapter_id, lora.name) if lora is not None else (None, None)
        size, hashes, tokens, i = self._block_size, request.block_hashes, request.all_token_ids, first
        for key in self._split(joined):
            while hashes[i] != key:
                i += 1
            parent = hashes[i - 1] if i else None
            self._notes[group, key] = Note(parent, tuple(tokens[i * size : (i + 1) * size]), names)
        while len(self._notes) > MAX_NOTES:
            del self._notes[next(iter(self._notes))]

    def take(self) -> list[KVCacheEvent]:
        """What has changed since the last call, in order."""
        if self._index is None:
            return []
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

        events: list[KVCacheEvent] = [AllBlocksCleared()] if self._cleared else []
        self._cleared = False
        for kind, group, joined in self._index.take_changes():
            keys = self._split(joined)
            if kind == "stored":
                events += self._stored(group, keys)
            elif kind == "removed":
                hashes = [compat.event_hash(key) for key in keys]
                events.append(compat.make_event(BlockRemoved, block_hashes=hashes, medium=MEDIUM, group_idx=group))
            else:
                events.append(AllBlocksCleared())
        return events

    def _split(self, joined: bytes) -> list[bytes]:
        return [joined[i : i + self._key_bytes] for i in range(0, len(joined), self._key_bytes)]

    def _stored(self, group: int, keys: Sequence[bytes]) -> Iterator[KVCacheEvent]:
        """One event for each stretch of a prompt."""
        notes = [self._notes.pop((group, key), None) for key in keys]
        start = 0
        for i in range(1, len(keys) + 1):
            if i < len(keys) and _continues(notes[i - 1], keys[i - 1], notes[i]):
                continue
            yield self._event(group, keys[start:i], notes[start:i])
            start = i

    def _event(self, group: int, keys: Sequence[bytes], notes: Sequence[Note | None]) -> KVCacheEvent:
        from vllm.distributed.kv_events import BlockStored

        first = notes[0]
        lora_id, lora_name = first.lora if first is not None else (None, None)
        return compat.make_event(
            BlockStored,
            block_hashes=[compat.event_hash(key) for key in keys],
            parent_block_hash=compat.event_hash(first.parent) if first is not None and first.parent else None,
            token_ids=[token for note in notes if note is not None for token in note.tokens],
            block_size=self._block_size if first is not None else 0,  # 0, as of vLLM's own: only the hash is known
            lora_id=lora_id,
            lora_name=lora_name,
            medium=MEDIUM,
            group_idx=group,
            **self._groups[group],
        )


def _continues(note: Note | None, key: bytes, following: Note | None) -> bool:
    if note is None or following is None:
        return note is following  # hashes alone go together
    return following.parent == key and following.lora == note.lora
