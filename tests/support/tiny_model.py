# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama with random weights and a tokenizer of made-up words: nothing is downloaded.

As a command: python tests/support/tiny_model.py DIRECTORY [--layers N ...] makes one and prints where it lies.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCAB = 1024  # token 0 is <unk>, the others are words of two syllables
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "models"

# Standard deviations of the random weights, as multiples of 1/sqrt(fan in). With gains of 1 attention over a
# thousand tokens is almost a mean, and a wrong KV block may leave the greedy output unchanged; with 3 rounding
# errors grow until they flip it. With these, on 1,000-token prompts: one changed prompt token changed the next 48
# tokens in 8 of 8 prompts, those held 35-44 distinct tokens, and float32 differed from float64 by 1e-5 in logits
# whose best two lie 0.2 apart (median). What attention adds shrinks with depth: else 8 layers repeat one token.
GAIN_QUERY_KEY = 1.5
GAIN_VALUE_OUTPUT = 2.0  # at 3 layers; 1.22 at 8


def words() -> list[str]:
    """The vocabulary in token order, without <unk>; word i is token i + 1."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    names = [a + b for a in syllables for b in syllables]
    return random.Random(0).sample(names, VOCAB - 1)


def random_prompt(tokens: int, seed: int) -> str:
    """A text of exactly `tokens` tokens; texts of different seeds share no prefix worth naming."""
    return " ".join(random.Random(seed).choices(words(), k=tokens))


def make_tiny_model(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    max_length: int = 4096,
) -> Path:
    """Writes a float32 Llama (config, safetensors, tokenizer) and returns its directory; a second call is instant.

    `path`: where; by default a directory under .cache/ named by content. The model has no end-of-sequence token, so
    every completion has as many tokens as were asked for. KV bytes per token: layers x kv_heads x hidden/heads x 8.
    Raises ValueError when hidden is not a multiple of 32 x heads (vLLM's CPU attention wants such heads).
    """
    if hidden % (32 * heads) or heads % kv_heads:
        raise ValueError(
            f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}: hidden must be a multiple of 32 x heads, "
            "and heads of kv_heads; for example hidden=128, heads=4, kv_heads=2"
        )
    shape = {"seed": seed, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    recipe = {**shape, "max_length": max_length, "maker": Path(__file__).read_text()}

    def write(scratch: Path) -> None:
        _write_model(scratch, max_length=max_length, **shape)
        write_tokenizer(scratch, max_length)

    return made_once(recipe, write, path)


def made_once(recipe: dict[str, Any], write: Callable[[Path], None], path: str | Path | None = None) -> Path:
    """The directory that `write` fills, made unless it is there from the same recipe."""
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    target = Path(path) if path is not None else CACHE / digest[:16]
    stamp = target / "recipe.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        return target

    # Written aside and renamed: two test processes may want the same model at once.
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tiny-", dir=target.parent))
    try:
        write(scratch)
        (scratch / stamp.name).write_text(digest)
        scratch.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        try:
            os.rename(scratch, target)
        except OSError:  # another process was faster, with the same content
            if not stamp.exists() or stamp.read_text() != digest:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _write_model(
    path: Path, *, seed: int, layers: int, hidden: int, heads: int, kv_heads: int, max_length: int
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if weight.dim() == 1:  # norms
                weight.fill_(1.0)
                continue
            deviation = weight.shape[1] ** -0.5
            if "embed_tokens" in name:
                deviation = 1.0
            elif "q_proj" in name or "k_proj" in name:
                deviation *= GAIN_QUERY_KEY
            elif "v_proj" in name or "o_proj" in name:
                deviation *= GAIN_VALUE_OUTPUT * (3 / layers) ** 0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * deviation)
    model.save_pretrained(path, safe_serialization=True)


def write_tokenizer(path: Path, max_length: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, **{word: i for i, word in enumerate(words(), start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", model_max_length=max_length)
    fast.save_pretrained(path)


def main() -> None:
    """The command line; its options are the numbers that make_tiny_model takes."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("directory", type=Path)
    numbers = {n: p.default for n, p in inspect.signature(make_tiny_model).parameters.items() if n != "path"}
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options = vars(parser.parse_args())
    print(make_tiny_model(options.pop("directory"), **options))


if __name__ == "__main__":
    main()
