# SPDX-License-Identifier: Apache-2.0
"""Model shapes by name, served with dummy weights: nothing is downloaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
        "attention_bias": False,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
}


def model_options(model: str) -> dict[str, Any]:
    """EngineArgs for a shape's name, or for a path."""
    if model not in SHAPES:
        return {"model": model}
    folder = Path(tempfile.mkdtemp(prefix="shape-"))
    (folder / "config.json").write_text(json.dumps(SHAPES[model]))
    return {"model": str(folder), "load_format": "dummy"}


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer of made-up words, one a token, for servers that answer in text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, **{f"w{i}": i for i in range(1, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
