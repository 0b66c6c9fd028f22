# SPDX-License-Identifier: Apache-2.0
"""Loads: what of a prompt the host pool holds, offered to vLLM and pinned until it is loaded or not wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllm_pega_connector.guard import log_limited
from vllm_pega_connector.messages import TransferJob
from vllm_pega_connector.scheduler_room import Room
from vllm_pega_connector.scheduler_state import Job, Match, RequestState, Shared, last_of, move_rows

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_pega_connector.migration.hook import Migration


READY = 2  # what SlotIndex.contains says of a key that can be loaded


class Loads:
    """`new_jobs` and `cancel` wait for the next metadata."""

    def __init__(self, shared: Shared, enabled: bool, drop_last_hit: bool, room: Room) -> None:
        self._shared = shared
        self._room = room
        self._enabled = enabled
        self._drop_last_hit = int(drop_last_hit)
        size = shared.block_size
        self._full = [g for g, group in enumerate(shared.groups) if not group.window]
        self._windows = {g: group.blocks_needed(size) for g, group in enumerate(shared.groups) if group.window}
        self.new_jobs: list[TransferJob] = []
        self.cancel: list[int] = []

    def match(self, state: RequestState, computed: int) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond `computed`, asynchronously). O(1) when nothing has changed."""
        if not self._shared.ready or not self._enabled or state.request.skip_reading_prefix_cache:
            return 0, False
        start = computed // self._shared.block_size
        if self._shared.migration is not None and self._not_yet(state, start, self._shared.migration):
            return None, False
        last = state.match
        # A pinned answer stays true whatever happens to the index; an empty one may improve with it.
        if (
            last is None
            or last.start != start
            or (not last.blocks and last.index_version != self._shared.index.version)
        ):
            self.release(state)
            last = state.match = self._lookup(state, start)
        tokens = last.blocks * self._shared.block_size
        if tokens and self._room.too_tight(state.request):
            return None, False
        return tokens, tokens > 0

    def _not_yet(self, state: RequestState, start: int, migration: Migration) -> bool:
        """True while blocks of this request are on their way from another instance. Asks for them once."""
        migration.poll()
        sources = migration.sources(state.params.source)
        if not sources or (state.ask is not None and state.ask.over):
            return False
        request = state.request
        # LoRA adapters are told apart by name alone; another instance's may differ.
        blocks = 0 if request.lora_request is not None or state.load_limit is not None else len(request.block_hashes)
        if start >= blocks or _past_end(request, start * self._shared.block_size):
            return False
        if state.ask is None:
            state.ask = migration.ask()
        return migration.not_yet(state.ask, sources, lambda: request.block_hashes[start:blocks])

    def _lookup(self, state: RequestState, start: int) -> Match:
        """The longest hit, as vLLM counts hits in its own cache: full attention needs every block, a sliding window
        those that the token behind the hit still sees."""
        shared, request = self._shared, state.request
        blocks = len(request.block_hashes)
        if state.load_limit is not None:
            blocks = min(blocks, state.load_limit)
        if self._windows:
            # Of a prompt that is all there the last token is computed again, and would look one token further back.
            blocks = min(blocks, (request.num_tokens - 1) // shared.block_size)
        match = Match(start, 0, [], shared.index.version)
        if start >= blocks or _past_end(request, start * shared.block_size):
            return match
        joined = state.joined_hashes(blocks, shared.index)
        end = blocks
        for group in self._full:
            slots: bytes = shared.index.match_and_pin(group, joined, start)
            match.pins.append((group, start, slots))
            end = min(end, start + len(slots) // 4)
        if self._windows and end > start:
            end = self._window_end(joined, start, end)
        match.blocks = max(0, end - start - self._drop_last_hit)
        self._trim(match)
        end = start + match.blocks
        for group, needed in self._windows.items() if match.blocks else ():
            first = max(start, end - needed)
            keys = joined[first * shared.key_bytes : end * shared.key_bytes]
            match.pins.append((group, first, shared.index.pin(group, keys)))
        return match

    def _window_end(self, joined: bytes, start: int, end: int) -> int:
        """The largest end up to `end` before which every window has the blocks it needs; those below `start` vLLM
        has itself."""
        keys = joined[start * self._shared.key_bytes : end * self._shared.key_bytes]
        index = np.arange(end - start)
        good = np.ones(end - start, bool)
        for group, needed in self._windows.items():
            ready = np.frombuffer(self._shared.index.contains(group, keys), np.uint8) == READY
            last_missing = np.maximum.accumulate(np.where(ready, -1, index))
            good &= index - last_missing >= np.minimum(needed + self._drop_last_hit, index + 1)
        hits = np.flatnonzero(good)
        return start + int(hits[-1]) + 1 if len(hits) else start

    def _trim(self, match: Match) -> None:
        """Lets go of pins behind the end of the hit."""
        end = match.start + match.blocks
        pins, match.pins = match.pins, []
        for group, first, slots in pins:
            keep = 4 * max(0, end - first)
            if slots[keep:]:
                self._shared.index.unpin(group, slots[keep:])
            if slots[:keep]:
                match.pins.append((group, first, slots[:keep]))

    def release(self, state: RequestState) -> None:
        if state.match is not None:
            for group, _, slots in state.match.pins:
                self._shared.index.unpin(group, slots)
            state.match = None

    def after_alloc(self, state: RequestState, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """vLLM took `external_tokens` of our offer, or none of it."""
        if state.match is None:
            return
        match, state.match = state.match, None
        # Rounded up: what vLLM counts on must be loaded, should it ever cut within a block.
        offered = match.blocks
        match.blocks = min(-(-external_tokens // self._shared.block_size), offered)
        self._trim(match)
        if not match.pins:
            return
        end = match.start + match.blocks
        joined = state.joined_hashes(end, self._shared.index)
        moves = move_rows([(group, block_ids[group][first:end], pinned) for group, first, pinned in match.pins])
        keys = b"".join(joined[first * self._shared.key_bytes :] for _, first, _ in match.pins)
        if self._windows and match.blocks < offered:
            keys = bytes(len(keys))  # the window before an earlier end was not pinned: let it fail and be computed
        job = self._shared.new_job("load", tuple((group, pinned) for group, _, pinned in match.pins))
        job.state, job.start = state, match.start
        state.load = job
        self._room.loads(state.request, sum(len(ids) for ids in block_ids))
        self.new_jobs.append(
            TransferJob(
                job.job_id,
                "load",
                moves,
                keys,
                state.request.request_id,
                state.params.load_policy,
            )
        )

    def end(self, job: Job) -> None:
        state = job.state
        assert state is not None
        state.load = None
        for group, slots in job.slots:
            self._shared.index.unpin(group, slots)
        if not job.errors:
            if job.start == 0 and job.epoch == self._shared.epoch:  # what the pool has needs no saving
                state.loaded = {g: (len(slots) // 4, last_of(slots)) for g, slots in job.slots if g in self._full}
            return
        state.load_limit = job.start
        failures = [e for e in job.errors if not e.startswith("cancelled")]  # we cancel when the request has gone
        if failures:
            self._shared.load_failures[failures[0].split(":", 1)[0]] += 1
            log_limited("load", "PegaConnector: a load failed, its blocks are computed instead: %s", failures[0])


def _past_end(request: Request, tokens: int) -> bool:
    """True if nothing is left to load: all but the last token is there already."""
    return tokens >= request.num_tokens - 1
