# SPDX-License-Identifier: Apache-2.0
"""Runs of the KV tensors that vLLM itself allocates, for kinds of pages and layouts that need a GPU to be served.

The oracle is memory: whatever bytes change when block b is overwritten through vLLM's views are block b.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.worker import utils as worker_utils

from vllm_pega_connector.layout import Run, group_runs

if not hasattr(worker_utils, "allocate_kv_cache"):
    pytest.skip("this vLLM has no allocation of all layers in one, with layouts by name", allow_module_level=True)

from vllm.v1.kv_cache_layout import KVCacheLayout

BLOCKS = 3
TOKENS = 16
LAYERS = ("a", "b")


def full(**fields: Any) -> Any:
    common = {"block_size": TOKENS, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    return interface.FullAttentionSpec(**{**common, **fields})


def latent(**fields: Any) -> Any:
    common = {"block_size": TOKENS, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    return interface.MLAAttentionSpec(**{**common, **fields})


# What a block of one layer is, bytes of it.
PAGES = {
    "FlashAttention, FlashInfer": (full(), TOKENS * 2 * 64 * 2),
    "values wider than keys": (full(head_size_v=48), TOKENS * 2 * 80 * 2),
    "FP8": (full(dtype=torch.float8_e4m3fn, kv_quant_mode=interface.KVQuantMode.FP8_PER_TENSOR), TOKENS * 2 * 64),
    # The scale lies behind the head's numbers, in float32; the Triton backend says so in `state_content_bytes`.
    "INT8 with a scale a head and token": (
        full(dtype=torch.int8, state_content_bytes=64 + 2 * 4),
        TOKENS * 2 * (64 + 2 * 4),
    ),
    "MLA": (latent(), TOKENS * 576 * 2),
    "MLA in FP8 with scales, 656 bytes": (
        latent(dtype=torch.uint8, cache_dtype_str="fp8_ds_mla", state_content_bytes=656),
        TOKENS * 656,
    ),
    "indexer of sparse MLA, 132 bytes": (latent(head_size=132, dtype=torch.uint8), TOKENS * 132),
}


def allocated(groups: dict[str, Any], layout: KVCacheLayout, kernel_block: int | None = None) -> Any:
    """(vLLM's cache configuration, its tensors) for groups of layers by their spec."""
    specs = [
        interface.KVCacheGroupSpec(list(spec.kv_cache_specs) if hasattr(spec, "kv_cache_specs") else list(names), spec)
        for names, spec in groups.items()
    ]
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=BLOCKS,
        prefix_cache_retention_interval=None,
    )
    vllm_config = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    config = kv_cache_utils.get_kv_cache_config_from_groups(vllm_config, specs, 1 << 24)
    kernel_blocks = [kernel_block or TOKENS] * len(specs)
    return config, worker_utils.allocate_kv_cache(config, torch.device("cpu"), layout, kernel_blocks)


def changed_by(tensors: list[torch.Tensor], block: int) -> set[int]:
    """Addresses of the bytes that a block has in these views, found by writing them."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensors[0].untyped_storage())
    raw.zero_()
    for tensor in tensors:
        ratio = tensor.shape[0] // BLOCKS
        tensor[block * ratio : (block + 1) * ratio].view(torch.uint8).fill_(255)
    found = {raw.data_ptr() + i for i in raw.nonzero().flatten().tolist()}
    raw.zero_()
    return found


def check(runs: list[Run], tensors: list[torch.Tensor]) -> None:
    for block in range(BLOCKS):
        addresses = [run.base + block * run.stride + i for run in runs for i in range(run.nbytes)]
        assert len(set(addresses)) == len(addresses)
        assert set(addresses) == changed_by(tensors, block)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("page", PAGES)
def test_every_page_in_every_layout(page: str, layout: KVCacheLayout) -> None:
    spec, nbytes = PAGES[page]
    config, tensors = allocated({"ab": spec}, layout)
    assert config.num_blocks == BLOCKS and set(tensors) == set(LAYERS)
    runs = group_runs(tensors.values(), BLOCKS)
    assert sum(run.nbytes for run in runs) == len(LAYERS) * nbytes
    heads = spec.num_kv_heads
    split = {"LBHNC": 2, "LBNHC": 2, "LHBNC": 2 * heads, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}
    assert len(runs) == split[layout.name]
    check(runs, list(tensors.values()))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("page", PAGES)
def test_kernel_blocks_smaller_than_manager_blocks(page: str, layout: str) -> None:
    _, tensors = allocated({"ab": PAGES[page][0]}, KVCacheLayout[layout], kernel_block=TOKENS // 4)
    assert tensors["a"].shape[0] == 4 * BLOCKS
    check(group_runs(tensors.values(), BLOCKS), list(tensors.values()))


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_two_kinds_of_pages_in_one_group(layout: str) -> None:
    """Sparse MLA: each layer has its latents and an indexer's keys."""
    layers = {
        name: PAGES[kind][0] for name, kind in (("a", "MLA"), ("b", "MLA"), ("i", "indexer of sparse MLA, 132 bytes"))
    }
    spec = interface.UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=layers)
    _, tensors = allocated({"abi": spec}, KVCacheLayout[layout])
    assert set(tensors) == set(layers)
    runs = group_runs(tensors.values(), BLOCKS)
    assert len(runs) == (1 if layout == "BLNHC" else 3)
    check(runs, list(tensors.values()))


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_groups_that_overlay_each_other(layout: str) -> None:
    """A block belongs to one group at a time, so groups may use the same bytes: each has its own runs."""
    window = interface.SlidingWindowSpec(
        block_size=TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=64
    )
    _, tensors = allocated({"ab": full(), "cd": window}, KVCacheLayout[layout])
    first, second = [[tensors[name] for name in names] for names in ("ab", "cd")]
    assert first[0].data_ptr() == second[0].data_ptr()
    assert group_runs(first, BLOCKS) == group_runs(second, BLOCKS)
    check(group_runs(second, BLOCKS), second)
