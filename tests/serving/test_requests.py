# SPDX-License-Identifier: Apache-2.0
"""Every kind of request on one engine: as vLLM alone answers it, from the pool where it should be, and from nobody
else's blocks. What vLLM alone answers is computed first, in the same process and without any cache.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.serving.engine import BLOCK, COMMON, Ask, Engine, model_path, references
from tests.support.tiny_adapter import adapter

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("quiet")]

PROMPT_TOKENS = 100
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK
OPTIONS = {
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 512,  # three prompts: vLLM on CPU cannot split the prefill of a request with a seed
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "enable_prompt_embeds": True,
    "scheduling_policy": "priority",
}


def tokens(seed: int, n: int = PROMPT_TOKENS) -> list[int]:
    return random.Random(seed).choices(range(1, 1024), k=n)


@functools.cache
def embeddings(seed: int) -> Any:
    import torch

    return torch.randn((PROMPT_TOKENS, 128), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Kind:
    """One way to ask. loaded: blocks that the pool gives when the same is asked again."""

    name: str
    sampling: dict[str, Any] = field(default_factory=dict)
    salt: str = ""
    lora: int = 0
    embeddings: int = 0
    beams: int = 0
    loaded: int = PROMPT_BLOCKS

    def run(self, llm: Any) -> list[Any]:
        """Token ids of every completion, and what else the request was about."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

        prompt: dict[str, Any] = {"prompt_token_ids": tokens(1)}
        if self.embeddings:
            prompt = {"prompt_embeds": embeddings(self.embeddings)}
        if self.salt:
            prompt["cache_salt"] = self.salt
        if self.beams:
            (searched,) = llm.beam_search(
                [prompt], BeamSearchParams(beam_width=self.beams, max_tokens=40, ignore_eos=True)
            )
            return [list(s.tokens) for s in searched.sequences]
        options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, **self.sampling}
        if regex := options.pop("regex", ""):
            options["structured_outputs"] = StructuredOutputsParams(regex=regex)
        lora = LoRARequest(f"adapter{self.lora}", self.lora, str(adapter(self.lora))) if self.lora else None
        (output,) = llm.generate([prompt], SamplingParams(**options), lora_request=lora, use_tqdm=False)
        answer: list[Any] = [list(completion.token_ids) for completion in output.outputs]
        if options.get("prompt_logprobs") is not None:
            # A logprob for every token but the first: of a loaded block there would be none.
            answer.append([round(min(x.logprob for x in of.values()), 2) for of in output.prompt_logprobs[1:]])
        return answer


# Each of these has KV of its own: nothing may be loaded for one that another has saved.
IDENTITIES = [
    Kind("plain"),
    Kind("adapter 1", lora=1),
    Kind("adapter 2", lora=2),
    Kind("salt x", salt="x"),
    Kind("salt y", salt="y"),
    Kind("embeddings 1", embeddings=1),
    Kind("embeddings 2", embeddings=2),
]
KINDS = [
    *IDENTITIES,
    Kind("adapter and salt", lora=1, salt="x"),
    Kind("structured output", {"regex": "[bdf][a-z]+"}),
    Kind("several completions", {"n": 3, "temperature": 0.9, "seed": 3}, loaded=3 * PROMPT_BLOCKS),
    Kind("logprobs", {"logprobs": 2}),
    Kind("minimum of tokens", {"min_tokens": 5, "stop_token_ids": list(range(1, 1024))}),
    Kind("penalties and bias", {"repetition_penalty": 1.3, "logit_bias": {7: 3.0}}),
    Kind("prompt logprobs", {"prompt_logprobs": 1}, loaded=0),  # vLLM itself reads no cache for these
    Kind("no cache wanted", {"skip_reading_prefix_cache": True}, loaded=0),
]
BEAMS = Kind("beam search", beams=3)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Any]]:
    """What vLLM answers without the connector."""
    from vllm import LLM

    llm = LLM(model=model_path(), enable_prefix_caching=False, **{**COMMON, **OPTIONS})
    answers = {kind.name: kind.run(llm) for kind in [*KINDS, BEAMS]}
    llm.llm_engine.engine_core.shutdown()
    return answers


@pytest.fixture(scope="module")
def engine(alone: dict[str, list[Any]]) -> Iterator[Engine]:
    made = Engine({"host_pool_gib": 0.05}, **OPTIONS)
    yield made
    made.close()


def test_the_kinds_that_differ_have_different_answers(alone: dict[str, list[Any]]) -> None:
    """Otherwise a wrong hit between them would go unseen. A salt changes the key alone."""
    distinct = {str(alone[kind.name]) for kind in IDENTITIES if not kind.salt}
    assert len(distinct) == 5


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_asked_twice(engine: Engine, alone: dict[str, list[Any]], kind: Kind) -> None:
    with engine.watch() as cold:
        assert kind.run(engine.llm) == alone[kind.name]
        engine.drop_gpu_cache()
    assert cold.saves > 0 and cold.hit_tokens == 0
    with engine.watch() as warm:
        assert kind.run(engine.llm) == alone[kind.name]
        engine.finish()
    assert warm.hit_tokens == kind.loaded * BLOCK
    assert (warm.loads > 0) == (kind.loaded > 0)


def test_nobody_gets_the_blocks_of_another_kind(engine: Engine, alone: dict[str, list[Any]]) -> None:
    for kind in IDENTITIES:
        with engine.watch() as first:
            assert kind.run(engine.llm) == alone[kind.name]
            engine.drop_gpu_cache()
        assert first.hit_tokens == 0 and first.saves > 0, kind.name
    for kind in reversed(IDENTITIES):
        with engine.watch() as again:
            assert kind.run(engine.llm) == alone[kind.name]
            engine.drop_gpu_cache()
        assert again.hit_tokens == PROMPT_BLOCKS * BLOCK, kind.name


def test_beam_search(engine: Engine, alone: dict[str, list[Any]]) -> None:
    """Each step of each beam is a request; what one saved, the next may load."""
    assert BEAMS.run(engine.llm) == alone[BEAMS.name]
    engine.drop_gpu_cache()
    with engine.watch() as warm:
        assert BEAMS.run(engine.llm) == alone[BEAMS.name]
        engine.finish()
    assert warm.loads > 0


def test_the_urgent_preempt_the_others(engine: Engine) -> None:
    from vllm import SamplingParams

    asks = [Ask(tuple(tokens(20 + i, 300)), 120) for i in range(6)]  # 6 x 420 tokens want 84 of 63 blocks
    expected = references(asks)
    for ask in asks:  # so that what is preempted, and what preempts, may be loaded
        engine.run([ask])
    engine.drop_gpu_cache()
    preempted = 0
    with engine.watch() as seen:
        for urgency, ask in enumerate(asks):
            params = SamplingParams(temperature=0, max_tokens=ask.tokens, ignore_eos=True)
            engine.track(ask, params, priority=-urgency)
            for _ in range(20):
                engine.step()
            preempted += len(engine.scheduler.waiting)
        engine.finish()
    runs = list(engine.requests.values())[-len(asks) :]
    for run in runs:
        assert run.finished and run.tokens == expected[run.ask.key]
    assert preempted > 0 and seen.loads >= len(asks)
