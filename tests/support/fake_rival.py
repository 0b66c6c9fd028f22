# SPDX-License-Identifier: Apache-2.0
"""A second connector beside ours, as in a MultiConnector: it answers in our stead now and then, and then loads."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.request import Request

from tests.support.fake_runner import Rank
from tests.support.fake_transfers import TokenSequence
from vllm_pega_connector import PegaConnector


@dataclass
class _Load:
    after: int  # the step with which it is handed over
    start: int  # first block
    table: list[int]  # GPU blocks


class Rival:
    """`chance`: how often it is the first that has a hit. What it loads is always right, and arrives whole."""

    def __init__(self, connector: PegaConnector, block_size: int, chance: float, stall: float, rng: random.Random,
                 seen: Counter[str]) -> None:  # fmt: skip
        self._ask, self._take = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
        self._block_size, self._chance, self._stall, self._rng, self._seen = block_size, chance, stall, rng, seen
        self._offers: dict[str, tuple[int, int]] = {}  # first block, blocks
        self.loads: dict[str, _Load] = {}
        self.step = 0  # the number of the step that is being scheduled
        connector.get_num_new_matched_tokens = self._asked  # type: ignore
        connector.update_state_after_alloc = self._taken  # type: ignore

    def _asked(self, request: Request, computed: int) -> tuple[int | None, bool]:
        answer = self._ask(request, computed)
        self._offers.pop(request.request_id, None)
        if answer[0] is None or self._rng.random() >= self._chance:  # MultiConnector: "not yet" goes before all
            return answer
        self._seen["answers thrown away"] += bool(answer[0])
        start = computed // self._block_size
        blocks = self._rng.randint(0, max(0, len(request.block_hashes) - start))
        self._offers[request.request_id] = (start, blocks)
        return blocks * self._block_size, blocks > 0

    def _taken(self, request: Request, blocks: Any, tokens: int) -> None:
        offer = self._offers.pop(request.request_id, None)
        self._take(request, blocks, 0 if offer else tokens)
        if offer and tokens:
            start, n = offer
            self.loads[request.request_id] = _Load(self.step, start, blocks.get_block_ids()[0][start : start + n])

    def run(self, step: int, ranks: list[Rank], sequences: dict[str, TokenSequence]) -> set[str]:
        """The requests whose KV has arrived with this step."""
        done = {n for n, x in self.loads.items() if x.after <= step and self._rng.random() >= self._stall}
        for name in done:
            load, size = self.loads.pop(name), self._block_size
            kv = sequences[name].kv(load.start * size, (load.start + len(load.table)) * size)
            for rank in ranks:
                memory = rank.transfers.memory
                memory.gpu[load.table] = np.array(kv, np.int64).reshape(-1, size) + memory.mark
            self._seen["loads of another connector"] += 1
        return done
