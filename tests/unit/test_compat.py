# SPDX-License-Identifier: Apache-2.0
"""Which models and configurations are cached, and which are served without: decided by vLLM's own cache specs."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1 import kv_cache_interface as interface

from tests.support.fake_setup import Setup, make_kv_cache_config, make_vllm_config
from vllm_pega_connector import compat

BLOCK = 16
ATTENTION = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


def full(**fields: Any) -> Any:
    return interface.FullAttentionSpec(**{**ATTENTION, **fields})


def latent(**fields: Any) -> Any:
    return interface.MLAAttentionSpec(**{**ATTENTION, "num_kv_heads": 1, "head_size": 576, **fields})


def window(tokens: int = 64, **fields: Any) -> Any:
    return interface.SlidingWindowSpec(**{**ATTENTION, "sliding_window": tokens, **fields})


def recurrent() -> Any:
    return interface.MambaSpec(block_size=BLOCK, shapes=((2, 3),), dtypes=(torch.float32,))


def together(**specs: Any) -> Any:
    return interface.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)


def answer(*specs: Any, **cache: Any) -> compat.Support:
    vllm_config = make_vllm_config(Setup())
    vllm_config.parallel_config = copy.copy(vllm_config.parallel_config)
    for key, value in cache.items():
        where = vllm_config.parallel_config if key.endswith("parallel_size") else vllm_config.cache_config
        setattr(where, key, value)
    return compat.check_support(vllm_config, config(*specs))


def config(*specs: Any) -> Any:
    groups = [interface.KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return interface.KVCacheConfig(8, [], groups)


@pytest.mark.parametrize(
    "specs",
    [
        [full()],
        [full(dtype=torch.uint8, head_size_v=16)],
        [full(attention_chunk_size=64)],  # without vLLM's hybrid manager: blocks are all kept
        [full(sliding_window=64)],
        [latent()],
        [together(a=latent(), i=latent(head_size=132, dtype=torch.uint8))],
        [window()],
        [full(), window()],
        [full(), window(64), window(128)],
    ],
)
def test_cached(specs: list[Any]) -> None:
    assert answer(*specs)


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        ([], "no KV cache"),
        ([recurrent()], "MambaSpec"),
        ([full(), recurrent()], "MambaSpec"),
        ([together(a=full(), m=recurrent())], "UniformTypeKVCacheSpecs"),
        ([interface.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64)], "ChunkedLocalAttentionSpec"),
        ([full(), interface.CrossAttentionSpec(**ATTENTION)], "CrossAttentionSpec"),
        ([full(), window(block_size=2 * BLOCK)], "different sizes ([16, 32] tokens)"),
    ],
)
def test_served_without(specs: list[Any], words: str) -> None:
    support = answer(*specs)
    assert not support and words in support.reason


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size"),
        ({"prefix_match_unit": 8}, "prefix_match_unit"),  # keys that are no blocks'
    ],
)
def test_configurations_served_without(cache: dict[str, Any], words: str) -> None:
    support = answer(full(), **cache)
    assert not support and words in support.reason


def test_windows_decide_what_is_loaded_and_how_it_may_fail() -> None:
    groups = compat.cache_groups(config(full(), window(64), together(a=window(64), b=window(100))))
    assert [group.window for group in groups] == [0, 64, 100]
    # A token sees itself and the 63 before it: the block before those is not needed.
    assert groups[1].blocks_needed(BLOCK) == 4
    assert [groups[1].first_needed(tokens, BLOCK) for tokens in (0, 63, 64, 79, 80)] == [0, 0, 0, 1, 1]
    assert groups[0].first_needed(1000, BLOCK) == 0
    assert not compat.loads_fail_whole(make_kv_cache_config(Setup()))
    assert compat.loads_fail_whole(config(window()))
    assert compat.loads_fail_whole(config(full(), full()))
