# SPDX-License-Identifier: Apache-2.0
"""The workers of a fake engine: a model runner whose forward pass only writes known KV, and checks what it reads.

Every rank has our real connector's worker side, over a `FakeTransfers` in place of the native engine.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from tests.support.fake_setup import Setup
from tests.support.fake_transfers import VOCAB, FakeTransfers, TokenSequence, Violation, mix
from vllm_pega_connector import PegaConnector, compat
from vllm_pega_connector.messages import PegaWorkerMetadata


@dataclass
class _Live:
    """What the model runner knows of a request."""

    sequence: TokenSequence
    table: list[int]
    computed: int  # tokens whose KV is there and right
    length: int  # tokens known, sampled ones included
    fresh: bool = True  # (re)started in this step: it has no drafts yet


@dataclass
class Rank:
    connector: PegaConnector
    transfers: FakeTransfers

    def collect(self, finished: set[str], rng: random.Random) -> KVConnectorOutput:
        """The worker's hooks after a step, in vLLM's order."""
        ended: dict[str, set[str] | None] = {}
        if compat.can_fail_whole():
            results = self.connector.get_transfer_results(finished)
            ended["finished_recving"], ended["failed_recving"] = results.finished_recving, results.failed_recving
        else:
            _, ended["finished_recving"] = self.connector.get_finished(finished)
        output = KVConnectorOutput(
            **ended,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        meta = output.kv_connector_worker_meta
        if meta is not None and rng.random() < self.transfers.faults.report_twice:
            assert isinstance(meta, PegaWorkerMetadata)
            meta.ended.append(rng.choice(meta.ended))
            self.transfers.seen["reported twice"] += 1
        return output


@dataclass
class Step:
    number: int
    output: SchedulerOutput
    allocated: list[int]  # GPU blocks that the pool handed out for it
    result: ModelRunnerOutput | None = None


class FakeRunner:
    """All ranks in step: they compute the same tokens, each over its own memory."""

    def __init__(
        self, setup: Setup, ranks: list[Rank], sequences: dict[str, TokenSequence], rng: random.Random,
        seen: Counter[str],
    ) -> None:  # fmt: skip
        self._setup, self._ranks, self._sequences, self._rng, self._seen = setup, ranks, sequences, rng, seen
        self._aggregator = KVOutputAggregator(len(ranks))
        self._live: dict[str, _Live] = {}
        self.computed: Counter[str] = Counter()  # tokens by request, drafts left out

    def execute(self, step: Step) -> ModelRunnerOutput:
        output = step.output
        for rank in self._ranks:
            rank.transfers.memory.poison(step.allocated, step.number)
        self._update_states(output)
        for rank in self._ranks:
            assert output.kv_connector_metadata is not None
            rank.connector.bind_connector_metadata(output.kv_connector_metadata)
            rank.transfers.run()
        names = list(output.num_scheduled_tokens)
        sampled = self._forward(step)
        results: list[ModelRunnerOutput | None] = []
        for rank in self._ranks:
            rank.transfers.run()
            result = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, [sampled[n] for n in names])
            result.kv_connector_output = rank.collect(output.finished_req_ids, self._rng)
            results.append(result)
        combined = self._aggregator.aggregate(results)
        assert combined is not None
        return combined

    def _update_states(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self._live.pop(name, None)
        for live in self._live.values():
            live.fresh = False
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids if new.prefill_token_ids is not None else new.prompt_token_ids
            assert tokens is not None
            self._start(new.req_id, new.block_ids[0], new.num_computed_tokens, len(tokens))
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                assert blocks is not None
                self._start(name, blocks[0], computed, len(cached.all_token_ids[name]))
            elif blocks is not None:
                self._live[name].table.extend(blocks[0])

    def _start(self, name: str, table: list[int], computed: int, length: int) -> None:
        self._live[name] = _Live(self._sequences[name], list(table), computed, length)
        self._seen["cached starts"] += computed > 0

    def _forward(self, step: Step) -> dict[str, list[int]]:
        """Writes the KV of every scheduled token, drafts included, then reads all KV that attention would read."""
        sampled: dict[str, list[int]] = {}
        reads: list[tuple[str, _Live, int]] = []
        for name, tokens in step.output.num_scheduled_tokens.items():
            live = self._live[name]
            drafts = self._drafts(live, step.output.scheduled_spec_decode_tokens.get(name, []))
            start, end = live.computed, live.computed + tokens - len(drafts)
            assert end <= live.length and (not drafts or end == live.length), f"{name}: {start}, {end}, {live.length}"
            kv, accepted = self._draft_kv(live, drafts)
            self._write(live, start, live.sequence.kv(start, end) + kv)
            reads.append((name, live, end))
            sampled[name] = []
            if end == live.length:
                live.sequence.token(end + accepted)
                sampled[name] = live.sequence.tokens[end : end + accepted + 1]
                live.length = end + accepted + 1
            live.computed = end + accepted
            self.computed[name] += end - start
            self._seen["drafts accepted"] += accepted
            self._seen["drafts rejected"] += len(drafts) - accepted
        for name, live, end in reads:
            self._check_reads(step, name, live, end)
        return sampled

    def _drafts(self, live: _Live, scheduled: list[int]) -> list[int]:
        """Async scheduling sends placeholders: the runner has the drafts. A request just started has none."""
        if -1 not in scheduled or live.fresh:
            return scheduled
        return self._guess(live, len(scheduled))

    def _guess(self, live: _Live, n: int) -> list[int]:
        truth = [live.sequence.token(live.length + i) for i in range(n)]
        return [t if self._rng.random() < 0.6 else self._rng.randrange(VOCAB) for t in truth]

    def propose(self, output: SchedulerOutput) -> DraftTokenIds:
        names = list(output.num_scheduled_tokens)
        return DraftTokenIds(
            names, [self._guess(self._live[n], self._rng.randint(0, self._setup.drafts)) for n in names]
        )

    def _draft_kv(self, live: _Live, drafts: list[int]) -> tuple[list[int], int]:
        """KV of the draft tokens, and how many of them are what the model would have sampled."""
        kv: list[int] = []
        prefix = live.sequence.kv(live.length - 1, live.length)[0]
        accepted, right = 0, True
        for i, token in enumerate(drafts):
            prefix = mix(prefix, token)
            kv.append(prefix)
            right = right and token == live.sequence.token(live.length + i)
            accepted += right
        return kv, accepted

    def _slots(self, live: _Live, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        size = self._setup.block_size
        return np.asarray(live.table)[positions // size] * size + positions % size

    def _write(self, live: _Live, start: int, kv: list[int]) -> None:
        slots = self._slots(live, start, start + len(kv))
        for rank in self._ranks:
            rank.transfers.memory.gpu.reshape(-1)[slots] = np.array(kv, np.int64) + rank.transfers.memory.mark

    def _check_reads(self, step: Step, name: str, live: _Live, end: int) -> None:
        slots = self._slots(live, 0, end)
        expected = np.array(live.sequence.kv(0, end), np.int64)
        for r, rank in enumerate(self._ranks):
            found = rank.transfers.memory.gpu.reshape(-1)[slots]
            wrong = np.flatnonzero(found - rank.transfers.memory.mark != expected)
            if len(wrong):
                at = int(wrong[0])
                raise Violation(
                    f"step {step.number}, rank {r}: {name} attends to {len(wrong)} wrong positions, the first {at} of "
                    f"{end} in block {slots[at] // self._setup.block_size}: {self._whose(int(found[at]))}"
                )

    def _whose(self, kv: int) -> str:
        """For people: what a wrong slot holds."""
        if kv < 0:
            return f"nothing since step {-(1 << 40) - kv} allocated it"
        plain = kv & ((1 << 56) - 1)
        for name, sequence in self._sequences.items():
            if plain in sequence._kv:
                return f"position {sequence._kv.index(plain)} of {name}"
        return "the KV of a rejected draft, or of other weights"
