# SPDX-License-Identifier: Apache-2.0
"""One fake engine's shape, and the vLLM configuration that it stands for. No model is needed: a config.json is."""

from __future__ import annotations

import copy
import functools
import json
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Setup:
    """One engine: how it schedules, and how the connector is configured."""

    asynchronous: bool = False
    drafts: int = 0  # draft tokens per step
    eagle: bool = False  # drafts come from an EAGLE head: vLLM drops the last block of a hit
    v2_runner: bool = False  # resumed requests are announced as new ones
    priority: bool = False
    block_size: int = 16
    gpu_blocks: int = 32
    max_seqs: int = 4
    budget: int = 64  # tokens per step
    host_slots: tuple[int, ...] = (64,)  # one number per rank
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    recompute: bool = True  # kv_load_failure_policy; otherwise a failed load fails its request
    rival: float = 0.0  # how often another connector, beside ours in a MultiConnector, is taken instead
    settings: tuple[tuple[str, Any], ...] = ()

    def room(self) -> int:
        """Tokens that one request may ever have, so that it fits the GPU alone, drafts and lookahead included."""
        return (self.gpu_blocks - 2) * self.block_size - 3 * (self.drafts + 1)


@functools.cache
def _base_config() -> VllmConfig:
    for chatty in ("vllm.v1", "vllm.config", "vllm.distributed"):
        logging.getLogger(chatty).setLevel(logging.CRITICAL)
    init_none_hash(sha256)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
        "max_position_embeddings": MAX_MODEL_LEN, "torch_dtype": "float32",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN)
        return VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=True,
                is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )  # fmt: skip


@functools.cache
def _speculation(drafts: int, eagle: bool) -> SpeculativeConfig:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=3, prompt_lookup_min=2,
        target_model_config=_base_config().model_config, target_parallel_config=ParallelConfig(),
    )  # fmt: skip
    if eagle:
        config.method = "eagle"  # only the scheduler looks at it; there is no head to load
    return config


@functools.cache
def structured_output() -> StructuredOutputManager:
    return StructuredOutputManager(_base_config())


def make_vllm_config(setup: Setup) -> VllmConfig:
    config = copy.copy(_base_config())
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_seqs = setup.max_seqs
    config.scheduler_config.max_num_batched_tokens = setup.budget
    config.scheduler_config.max_num_scheduled_tokens = setup.budget
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.scheduler_config.policy = "priority" if setup.priority else "fcfs"
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = setup.block_size
    config.cache_config.num_gpu_blocks = setup.gpu_blocks
    config.speculative_config = _speculation(setup.drafts, setup.eagle) if setup.drafts else None
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="PegaConnector",
        kv_connector_module_path="vllm_pega_connector",
        kv_role=setup.role,
        kv_load_failure_policy="recompute" if setup.recompute else "fail",
        kv_connector_extra_config=dict(setup.settings),
    )
    return config


def make_kv_cache_config(setup: Setup) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=setup.block_size, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return KVCacheConfig(setup.gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
