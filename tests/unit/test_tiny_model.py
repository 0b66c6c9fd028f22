# SPDX-License-Identifier: Apache-2.0
"""The model that every comparison of texts rests on: it must tell a right KV block from a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_prompt_has_as_many_tokens_as_asked_for(model: Path) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(tiny_model.random_prompt(333, seed=1))["input_ids"]
    assert len(ids) == 333
    assert 0 not in ids  # <unk>


def test_made_once_and_the_same_each_time(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert tiny_model.make_tiny_model(model) == model
    assert weights.stat().st_mtime_ns == made
    again = tiny_model.make_tiny_model(tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == weights.read_bytes()
    other = tiny_model.make_tiny_model(tmp_path / "again", seed=1)  # another recipe replaces what is there
    assert (other / "model.safetensors").read_bytes() != weights.read_bytes()
    assert not list(tmp_path.glob(".tiny-*"))


def test_a_shape_that_vllm_would_refuse_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden=100"):
        tiny_model.make_tiny_model("/nonexistent/model", hidden=100)


@pytest.mark.parametrize("block", [0, 7, 14])
def test_one_other_block_of_32_tokens_changes_the_text(model: Path, block: int) -> None:
    import torch
    from transformers import LlamaForCausalLM

    llama = LlamaForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(block)
    prompt = torch.randint(1, tiny_model.VOCAB, (1, 500), generator=generator)
    altered = prompt.clone()
    altered[0, 32 * block : 32 * (block + 1)] = torch.randint(1, tiny_model.VOCAB, (32,), generator=generator)
    both = torch.cat([prompt, altered])
    texts = llama.generate(both, attention_mask=torch.ones_like(both), max_new_tokens=16, do_sample=False)[:, 500:]
    assert not torch.equal(texts[0], texts[1])
    assert all(len(set(text.tolist())) >= 8 for text in texts)  # and is no single word over and over
