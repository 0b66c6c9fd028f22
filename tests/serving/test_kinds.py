# SPDX-License-Identifier: Apache-2.0
"""Models of every further kind that vLLM runs on CPU: cached if they can be, otherwise served without us, with a
warning that says why; and in either case as vLLM alone serves them.

vLLM switches its prefix cache off for MLA on CPU, so MLA is served without us there; with the cache forced on, what
is stored and loaded is compared by bytes, since vLLM's own answers there depend on how requests are batched. Mamba
fails on CPU in vLLM alone if the prefix cache is on, and short convolutions answer wrongly if a prompt is computed in
chunks. Images need a model whose processor does without torchvision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from tests.serving.engine import BLOCK, COMMON, POISON, Ask, Engine, model_path, prompt
from tests.support.tiny_kinds import IMAGE_SIZE, IMAGE_TOKENS, look_at_here, make_tiny_kind

pytestmark = pytest.mark.vllm

TOKENS = 12
OPTIONS = {"num_gpu_blocks_override": 96, "max_num_batched_tokens": 1024}
PEGA = {"host_pool_gib": 0.05, "max_pending_save_blocks": 64}
# Of each length two prompts that differ in their first block alone: a wrong block there would tell.
PROMPTS = [prompt(s, n) for s, n in enumerate((33, 100, 230))]
ASKS = [Ask(p, TOKENS) for p in PROMPTS]
ASKS += [Ask((*prompt(9 + i, BLOCK), *p[BLOCK:]), TOKENS) for i, p in enumerate(PROMPTS)]


def whole_blocks(lengths: Sequence[int], block: int = BLOCK) -> int:
    """Tokens that a warm run takes from the pool: all but the last of each prompt, in whole blocks."""
    return sum((n - 1) // block * block for n in lengths)


@contextmanager
def alone(model: str, **options: Any) -> Iterator[Any]:
    """vLLM without the connector."""
    from vllm import LLM

    llm = LLM(model=model, **{**COMMON, **OPTIONS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def served(model: str, poison: bool = True, **options: Any) -> Iterator[Engine]:
    engine = Engine(PEGA, poison, model, **{**OPTIONS, **options})
    try:
        yield engine
    finally:
        engine.close()


def answers(llm: Any, asks: Sequence[Ask]) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": list(ask.prompt)} for ask in asks], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def warnings_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[set[str]]:
    """Filled at the end. vLLM's loggers hand on to the root, where pytest listens, or not, by how they were set up."""
    said: set[str] = set()
    logger = logging.getLogger("vllm.pega")
    logger.addHandler(caplog.handler)
    try:
        yield said
    finally:
        logger.removeHandler(caplog.handler)
        said |= {r.getMessage() for r in caplog.records if r.name == logger.name and r.levelno >= logging.WARNING}


# Older vLLM, which asks in other words, serves an FP8 cache on CPU with these too.
wide_cpu = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM keeps an FP8 cache on CPU only with AVX-512 or AMX",
)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("odd heads", {}),
        pytest.param("odd heads", {"kv_cache_dtype": "fp8"}, marks=wide_cpu),
        ("mixtral", {}),
        ("qwen3 moe", {}),
    ],
    ids=["odd heads", "fp8", "mixtral", "qwen3 moe"],
)
def test_cold_then_warm(name: str, options: dict[str, Any]) -> None:
    look_at_here(name)
    model = str(make_tiny_kind(name))
    with alone(model, enable_prefix_caching=False, **options) as llm:
        expected = answers(llm, ASKS)
    assert len({str(tokens) for tokens in expected}) == len(ASKS)
    with served(model, **options) as engine:
        with engine.watch() as cold:
            assert [run.tokens for run in engine.run(ASKS)] == expected
            engine.drop_gpu_cache()
        assert cold.saves > 0 and cold.hit_tokens == 0
        with engine.watch() as warm:
            assert [run.tokens for run in engine.run(ASKS)] == expected
        assert warm.loads == len(ASKS) and warm.hit_tokens == whole_blocks([len(a.prompt) for a in ASKS])
        engine.assert_idle()


latent = pytest.mark.skipif(
    find_spec("vllm.v1.attention.backends.mla.cpu_mla") is None, reason="this vLLM has no latent attention on CPU"
)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("short convolution", {}, "MambaSpec is not supported"),
        ("mamba and attention", {"enable_prefix_caching": False}, "MambaSpec is not supported"),
        pytest.param("deepseek", {"block_size": 16}, "prefix caching is off", marks=latent),
    ],
    ids=["short convolution", "mamba and attention", "deepseek"],
)
def test_served_without_us(
    name: str,
    options: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Where a CPU has these instructions, older vLLM lays convolutions out for kernels that know neither float32 nor
    # this width, and fails by itself.
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    look_at_here(name)
    model = str(make_tiny_kind(name))
    with alone(model, **options) as llm:
        expected = answers(llm, ASKS)
    with warnings_of_ours(caplog) as said, served(model, poison=False, **options) as engine:
        for _ in range(2):
            assert [run.tokens for run in engine.run(ASKS)] == expected
            engine.drop_gpu_cache()
        assert engine.hit_tokens == 0
    (warning,) = said
    assert "PegaConnector is off: " + reason in warning and "Serving goes on without it" in warning


@latent
def test_latent_attention_comes_back_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    usual = current_platform.check_and_update_config

    def with_prefix_caching(config: Any) -> None:
        usual(config)
        config.cache_config.enable_prefix_caching = True

    monkeypatch.setattr(current_platform, "check_and_update_config", with_prefix_caching)
    look_at_here("deepseek")
    # One token more than whole blocks: what is left to compute after a hit is then no second prefill, which vLLM's
    # MLA on CPU could not do.
    lengths = (33, 97, 225)
    asks = [Ask(prompt(s, n), 1) for s, n in enumerate(lengths)]
    with served(str(make_tiny_kind("deepseek")), block_size=16) as engine:
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        assert [type(g.kv_cache_spec).__name__ for g in groups] == ["MLAAttentionSpec"]
        with engine.watch() as cold:
            engine.run(asks)
            before = cached_blocks(engine)
            engine.drop_gpu_cache()
        assert cold.saves > 0
        for tensor in engine.worker_connector._worker._kv_caches.values():
            tensor.fill_(POISON)
        with engine.watch() as warm:
            engine.run(asks)
            after = cached_blocks(engine)
        assert warm.loads == len(asks) and warm.hit_tokens == whole_blocks(lengths, 16)
        assert len(before) == warm.hit_tokens // 16 and before == after
        engine.assert_idle()


def cached_blocks(engine: Engine) -> dict[bytes, list[bytes]]:
    """By key: the bytes of every layer of what the GPU's prefix cache holds."""
    tensors = list(engine.worker_connector._worker._kv_caches.values())
    blocks = [block for block in engine.block_pool.blocks if block.block_hash is not None]
    return {block.block_hash: [t[block.block_id].numpy().tobytes() for t in tensors] for block in blocks}


def test_images_keep_prompts_apart() -> None:
    """The token ids are the same; only what stands in the place of the image's differs."""
    import numpy as np
    from PIL import Image
    from vllm import SamplingParams

    shape = (IMAGE_SIZE, IMAGE_SIZE, 3)
    images = [Image.fromarray(np.random.default_rng(s).integers(0, 255, shape, np.uint8)) for s in range(3)]
    text = list(prompt(2, 40))

    def ask(llm: Any, image: Any) -> list[int]:
        asked = {"prompt_token_ids": text, "multi_modal_data": {"image": image}}
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        (output,) = llm.generate([asked], params, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    look_at_here("images")
    model = str(make_tiny_kind("images"))
    with alone(model, enable_prefix_caching=False) as llm:
        expected = [ask(llm, image) for image in images]
    assert len({str(tokens) for tokens in expected}) == len(images)
    with served(model) as engine:
        for image, tokens in zip(images, expected, strict=True):
            with engine.watch() as cold:
                assert ask(engine.llm, image) == tokens
                engine.drop_gpu_cache()
            assert cold.saves > 0 and cold.hit_tokens == 0
        for image, tokens in zip(images, expected, strict=True):
            with engine.watch() as warm:
                assert ask(engine.llm, image) == tokens
                engine.drop_gpu_cache()
            assert warm.loads == 1 and warm.hit_tokens == whole_blocks([IMAGE_TOKENS + len(text)])
        engine.assert_idle()


def embeddings(llm: Any) -> list[list[float]]:
    outputs = llm.embed([{"prompt_token_ids": list(p)} for p in PROMPTS], use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def test_embeddings_of_a_decoder_are_cached() -> None:
    """What is pooled is the last token, and that is computed in any case."""
    options = {"runner": "pooling"}
    with alone(model_path(), enable_prefix_caching=False, **options) as llm:
        expected = embeddings(llm)
    with served(model_path(), **options) as engine:
        with engine.watch() as cold:
            assert embeddings(engine.llm) == [pytest.approx(e, abs=1e-5) for e in expected]
            engine.drop_gpu_cache()
        assert cold.saves > 0 and cold.hit_tokens == 0
        with engine.watch() as warm:
            assert embeddings(engine.llm) == [pytest.approx(e, abs=1e-5) for e in expected]
            engine.finish()
        assert warm.loads == len(PROMPTS) and warm.hit_tokens == whole_blocks([len(p) for p in PROMPTS])
        engine.assert_idle()


def test_an_encoder_has_nothing_to_cache(caplog: pytest.LogCaptureFixture) -> None:
    options = {"runner": "pooling"}
    look_at_here("encoder")
    model = str(make_tiny_kind("encoder"))
    with alone(model, **options) as llm:
        expected = embeddings(llm)
    with warnings_of_ours(caplog) as said, served(model, poison=False, **options) as engine:
        assert embeddings(engine.llm) == [pytest.approx(e, abs=1e-5) for e in expected]
    (warning,) = said
    assert "PegaConnector is off: this model has no KV cache" in warning
