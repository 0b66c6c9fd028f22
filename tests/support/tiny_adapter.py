# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters for the tiny model: random weights, nothing downloaded."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.tiny_model import made_once

WIDTH = 128  # the model's hidden size


def adapter(seed: int, layers: int = 3, heads: int = 4, kv_heads: int = 2) -> Path:
    """A LoRA adapter for make_tiny_model's Llama that changes its keys and values, and so its KV."""

    def write(path: Path) -> None:
        import torch
        from safetensors.torch import save_file

        rank, generator = 8, torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(layers):
            kv = WIDTH // heads * kv_heads
            for module, out in {"q_proj": WIDTH, "k_proj": kv, "v_proj": kv}.items():
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{name}.lora_A.weight"] = torch.randn((rank, WIDTH), generator=generator) * WIDTH**-0.5
                weights[f"{name}.lora_B.weight"] = torch.randn((out, rank), generator=generator) * rank**-0.5
        save_file(weights, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none",
                  "target_modules": ["q_proj", "k_proj", "v_proj"]}  # fmt: skip
        (path / "adapter_config.json").write_text(json.dumps(config))

    return made_once({"adapter": seed, "layers": layers, "maker": Path(__file__).read_text()}, write)
