# SPDX-License-Identifier: Apache-2.0
"""Loads: what of a prompt the host pool holds, offered to vLLM and pinned until it is loaded or not wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pega_connector.guard import log_limited
from vllm_pega_connector.messages import TransferJob
from vllm_pega_connector.scheduler_state import GROUP, Job, Match, RequestState, Shared, move_rows

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_pega_connector.migration.hook import Migration


class Loads:
    """`new_jobs` and `cancel` wait for the next metadata."""

    def __init__(self, shared: Shared, enabled: bool, drop_last_hit: bool) -> None:
        self._shared = shared
        self._enabled = enabled
        self._drop_last_hit = drop_last_hit
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
        if last is None or last.start != start or (not last.slots and last.index_version != self._shared.index.version):
            self.release(state)
            last = state.match = self._lookup(state, start)
        tokens = last.blocks * self._shared.block_size
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
        blocks = len(state.request.block_hashes)
        if state.load_limit is not None:
            blocks = min(blocks, state.load_limit)
        version = self._shared.index.version
        if start >= blocks or _past_end(state.request, start * self._shared.block_size):
            return Match(start, b"", version)
        joined = state.joined_hashes(blocks, self._shared.key_bytes)
        slots: bytes = self._shared.index.match_and_pin(GROUP, joined, start)
        if self._drop_last_hit and slots:
            self._shared.index.unpin(GROUP, slots[-4:])
            slots = slots[:-4]
        return Match(start, slots, version)

    def release(self, state: RequestState) -> None:
        if state.match is not None:
            if state.match.slots:
                self._shared.index.unpin(GROUP, state.match.slots)
            state.match = None

    def after_alloc(self, state: RequestState, block_ids: tuple[list[int], ...], external_tokens: int) -> None:
        """vLLM took `external_tokens` of our offer, or none of it."""
        if state.match is None:
            return
        match, state.match = state.match, None
        # Rounded up: what vLLM counts on must be loaded, should it ever cut within a block.
        blocks = min(-(-external_tokens // self._shared.block_size), match.blocks)
        taken, rest = match.slots[: 4 * blocks], match.slots[4 * blocks :]
        if rest:
            self._shared.index.unpin(GROUP, rest)
        if not taken:
            return
        job = self._shared.new_job("load", taken)
        job.state, job.start = state, match.start
        state.load = job
        first, end = match.start, match.start + blocks
        self.new_jobs.append(
            TransferJob(
                job.job_id,
                "load",
                move_rows(block_ids[GROUP][first:end], taken),
                state.joined_hashes(end, self._shared.key_bytes)[first * self._shared.key_bytes :],
                state.request.request_id,
                state.params.load_policy,
            )
        )

    def end(self, job: Job) -> None:
        state = job.state
        assert state is not None
        state.load = None
        self._shared.index.unpin(GROUP, job.slots)
        if not job.errors:
            return
        state.load_limit = job.start
        failures = [e for e in job.errors if not e.startswith("cancelled")]  # we cancel when the request has gone
        if failures:
            self._shared.load_failures[failures[0].split(":", 1)[0]] += 1
            log_limited("load", "PegaConnector: a load failed, its blocks are computed instead: %s", failures[0])


def _past_end(request: Request, tokens: int) -> bool:
    """True if nothing is left to load: all but the last token is there already."""
    return tokens >= request.num_tokens - 1
