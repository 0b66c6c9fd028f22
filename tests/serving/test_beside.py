# SPDX-License-Identifier: Apache-2.0
"""Beside another connector under MultiConnector, which takes a prompt from the first child that has any of it, and
gives what is computed to all. The other is vLLM's ExampleConnector: it stores whole prompts as files, loads them within
the step, and knows one block less of a prompt than there is if the prompt has one token more than whole blocks.
OffloadingConnector insists on a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, Ask, Engine, prompt, same

pytestmark = pytest.mark.vllm

LENGTHS = (BLOCK + 1, 64, 100, 230)


class Beside(Engine):
    """`other`: the connector beside ours; `other_tokens`: what MultiConnector took from it."""

    def __init__(self, first: bool, storage: Path) -> None:
        example = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(storage)},
        }
        self.storage = storage
        # Whole prompts in one step: the other would store a prompt's first chunk under the name of all of it.
        options = {"num_gpu_blocks_override": 96, "max_num_batched_tokens": 1024}
        super().__init__(
            {"host_pool_gib": 0.05, "max_pending_save_blocks": 64},
            before=[] if first else [example],
            after=[example] if first else [],
            **options,
        )
        (self.other,) = [c for c in self.scheduler.connector._connectors if c is not self.connector]
        self.other_tokens = 0
        self._count_the_other_s()

    def _count_the_other_s(self) -> None:
        after_alloc = self.other.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, tokens: int) -> None:
            self.other_tokens += tokens
            after_alloc(request, blocks, tokens)

        self.other.update_state_after_alloc = update_state_after_alloc

    def forget_the_other_s(self) -> None:
        shutil.rmtree(self.storage)
        self.storage.mkdir()

    def ask_each(self, asks: list[Ask]) -> tuple[int, int]:
        """One after the other, from a cold GPU cache. Tokens taken from ours, and from the other."""
        ours, others = self.hit_tokens, self.other_tokens
        for ask in asks:
            same(self.run([ask]))
        self.assert_idle()
        self.drop_gpu_cache()
        return self.hit_tokens - ours, self.other_tokens - others


@pytest.fixture(scope="module", params=[True, False], ids=["first", "second"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    made = Beside(request.param, tmp_path_factory.mktemp("kv"))
    yield made
    made.close()


def others_share(length: int) -> int:
    """Tokens that ExampleConnector has of a stored prompt."""
    return (length - 2) // BLOCK * BLOCK


def our_share(length: int) -> int:
    return length // BLOCK * BLOCK


def test_each_prompt_is_taken_from_the_first_that_has_any_of_it(engine: Beside) -> None:
    asks = [Ask(prompt(s, n), 12) for s, n in enumerate(LENGTHS)]
    we_are_first = engine.scheduler.connector._connectors[0] is engine.connector
    with engine.watch() as cold:
        assert engine.ask_each(asks) == (0, 0)
    assert cold.saves > 0 and cold.loads == 0
    with engine.watch() as warm:
        taken = engine.ask_each(asks)
    if we_are_first:
        assert taken == (sum(our_share(n) for n in LENGTHS), 0) and warm.loads == len(LENGTHS)
    else:
        left = [n for n in LENGTHS if not others_share(n)]
        assert left  # of these the other has nothing
        assert taken == (sum(our_share(n) for n in left), sum(others_share(n) for n in LENGTHS))
        assert warm.loads == len(left)


def test_what_only_one_of_them_has(engine: Beside) -> None:
    """And what the other loads within a step is stored by us, with the right bytes, after that step."""
    asks = [Ask(prompt(10 + s, n), 12) for s, n in enumerate(LENGTHS)]
    assert engine.ask_each(asks) == (0, 0)
    engine.connector.reset_cache()
    assert engine.counts()["ready"] == 0
    with engine.watch() as seen:
        assert engine.ask_each(asks) == (0, sum(others_share(n) for n in LENGTHS))
    assert seen.saves > 0 and seen.loads == 0
    engine.forget_the_other_s()
    with engine.watch() as seen:
        assert engine.ask_each(asks) == (sum(our_share(n) for n in LENGTHS), 0)
    assert seen.loads == len(LENGTHS)
