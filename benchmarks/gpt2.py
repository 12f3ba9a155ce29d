"""GPT-2's shape with random weights, as a folder that needs no hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qkv.checkpoints import StoredTensor, quantise, write_safetensors

SPREAD = 0.02  # of matrices, as GPT-2 begins with


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocab: int
    context: int = 128

    @property
    def config(self) -> dict[str, object]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": self.layers,
            "n_embd": self.width,
            "n_head": self.heads,
            "n_positions": self.context,
            "vocab_size": self.vocab,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "dtype": "float32",
        }

    def sizes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor, matrices as (in, out)."""
        width = self.width
        yield "transformer.wte.weight", (self.vocab, width)
        yield "transformer.wpe.weight", (self.context, width)
        for layer in range(self.layers):
            for name, size in (
                ("ln_1", (width,)),
                ("attn.c_attn", (width, 3 * width)),
                ("attn.c_proj", (width, width)),
                ("ln_2", (width,)),
                ("mlp.c_fc", (width, 4 * width)),
                ("mlp.c_proj", (4 * width, width)),
            ):
                yield f"transformer.h.{layer}.{name}.weight", size
                yield f"transformer.h.{layer}.{name}.bias", size[-1:]
        yield "transformer.ln_f.weight", (width,)
        yield "transformer.ln_f.bias", (width,)


def write(folder: Path, shape: Shape, seed: int = 0, spread: float = SPREAD) -> Path:
    """The folder, made at its first use; config.json comes last, so that half a folder is none.

    Matrices are normal with this spread. Biases and the scales of norms are random too, as at their
    usual zeros and ones it would not show whether they are used.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    held: dict[str, StoredTensor] = {}
    for name, size in shape.sizes():
        values = generator.standard_normal(size, np.float32)
        scale = len(size) == 1 and name.endswith("weight")
        held[name] = quantise(name, 1 + values / 10 if scale else values * np.float32(spread), "F32")
    write_safetensors(folder / "model.safetensors", held, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2))
    return folder
