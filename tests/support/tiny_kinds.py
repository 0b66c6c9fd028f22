# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many kinds with random weights: nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.tiny_model import VOCAB, made_once, write_tokenizer

MAX_LENGTH = 1024
IMAGE = VOCAB  # the token that stands for an image; the tokenizer's last
IMAGE_TOKENS = 32  # one block
IMAGE_SIZE = 28

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
OPT = {
    **{key: value for key, value in COMMON.items() if key not in ("intermediate_size", "num_key_value_heads")},
    "model_type": "opt",
    "vocab_size": VOCAB + 32,
    "ffn_dim": 128,
    "word_embed_proj_dim": 64,
}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}

# By name: the class that transformers and vLLM know it by, and what its configuration has beside COMMON.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "odd heads": (
        "LlamaForCausalLM",
        {"hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_experts": 4},
    ),
    "deepseek": (  # 512 + 64 is the one latent size that vLLM's kernels for CPU know
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 64,
            "v_head_dim": 32,
            "head_dim": 64,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
        },
    ),
    "short convolution": (
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_dim": 64,
            "block_dim": 64,
            "use_pos_enc": True,
        },
    ),
    "mamba and attention": (
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32},
    ),
    "encoder": ("BertModel", {}),
    "images": (
        "Blip2ForConditionalGeneration",
        {
            "vision_config": {**VISION, "image_size": IMAGE_SIZE, "patch_size": 14},
            "qformer_config": {**VISION, "vocab_size": 32, "encoder_hidden_size": 64, "cross_attention_frequency": 1},
            "text_config": OPT,
            "num_query_tokens": IMAGE_TOKENS,
            "image_token_index": IMAGE,
            "image_text_hidden_size": 64,
        },
    ),
}


def make_tiny_kind(name: str) -> Path:
    """A float32 model of one of KINDS, with a tokenizer, and with an image processor if it wants one."""
    architecture, differences = KINDS[name]
    settings = differences if "text_config" in differences else {**COMMON, **differences}

    def write(path: Path) -> None:
        import torch
        import transformers

        kind = getattr(transformers, architecture)
        model = kind(kind.config_class(**settings)).float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter, weight in sorted(model.named_parameters()):
                if weight.dim() == 1:  # norms and biases
                    weight.fill_(0.0 if parameter.endswith("bias") else 1.0)
                    continue
                table = "embed" in parameter or "query_tokens" in parameter
                deviation = 1.0 if table else 1.5 * weight[0].numel() ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
        model.save_pretrained(path)
        write_tokenizer(path, MAX_LENGTH)
        if "vision_config" in settings:
            _write_image_processor(path)

    return made_once({"kind": name, "settings": settings, "maker": Path(__file__).read_text()}, write)


def _write_image_processor(path: Path) -> None:
    from transformers import Blip2Processor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil  # needs no torchvision

    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    images = BlipImageProcessorPil(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})
    Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(path)


def look_at_here(name: str) -> None:
    """vLLM looks at the class of a model in a process of its own, which takes it ten seconds; this process has it at
    hand."""
    from vllm import ModelRegistry

    architecture = KINDS[name][0]
    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
