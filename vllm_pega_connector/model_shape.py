# SPDX-License-Identifier: Apache-2.0
"""How a model's KV blocks fall into ranges, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True)
class BlockShape:
    """One KV block of one rank: `fragments` ranges of `fragment_bytes` each."""

    fragments: int
    fragment_bytes: int
    layers: int
    description: str


def read_model_config(path: str) -> dict[str, Any]:
    """A model's config.json, given as file or folder; of multimodal models the text part. Raises ConfigError."""
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"--model: cannot read {file}: {error.strerror}"]) from None
    except (ValueError, RecursionError):
        raise ConfigError([f"--model: {file} is not valid JSON"]) from None
    if not isinstance(config, dict):
        raise ConfigError([f"--model: {file} is not a model's config.json"])
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def block_shape(config: dict[str, Any], block_size: int, tp: int, dtype: str, layout: str) -> BlockShape:
    """The ranges of one block. `layout`: "vllm" one range a layer, "split" K and V apart, "block" one range a block.

    `dtype` is that of the cache; "auto" takes the model's. Raises ConfigError naming the key that is missing.
    """
    layers = _layers(config)
    if dtype == "auto":
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        if dtype not in DTYPE_BYTES:
            raise ConfigError([f"--dtype: the model's {dtype!r} is unknown; give one of {', '.join(DTYPE_BYTES)}"])
    latent = _number(config, "kv_lora_rank", optional=True)
    if latent:  # multi-head latent attention: one vector a token, the same on every rank, no separate V
        values, parts = latent + _number(config, "qk_rope_head_dim"), 1
        heads_text = f"a latent of {values} values"
    else:
        heads = _number(config, "num_attention_heads")
        kv_heads = _number(config, "num_key_value_heads", optional=True) or heads
        if max(kv_heads, tp) % min(kv_heads, tp):
            raise ConfigError([f"--tp: got {tp}; allowed: a divisor or a multiple of the model's {kv_heads} KV heads"])
        head_size = _number(config, "head_dim", optional=True) or _number(config, "hidden_size") // heads
        own = max(1, kv_heads // tp)
        values, parts = 2 * own * head_size, 2
        heads_text = f"{own} KV head{'s' * (own > 1)} of {head_size}"
    layer_bytes = block_size * values * DTYPE_BYTES[dtype]
    description = f"{layers} layers, {heads_text}, {dtype}, {block_size} tokens a block"
    if layout == "block":
        return BlockShape(1, layers * layer_bytes, layers, description)
    if layout == "split" and parts == 2:
        return BlockShape(2 * layers, layer_bytes // 2, layers, description)
    return BlockShape(layers, layer_bytes, layers, description)


def _layers(config: dict[str, Any]) -> int:
    """Layers that keep KV. Where a model names the types of its layers, linear and recurrent ones keep none."""
    types = config.get("layer_types")
    if isinstance(types, list) and types:
        keeping = [t for t in types if "attention" in str(t) and "linear" not in str(t)]
        if keeping:
            return len(keeping)
    return _number(config, "num_hidden_layers")


def _number(config: dict[str, Any], key: str, optional: bool = False) -> int:
    value = config.get(key)
    if optional and value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError([f"--model: {key}: got {json.dumps(value)}; allowed: a positive integer"])
    return value
