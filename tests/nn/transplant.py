"""Models of transformers with random weights, and the same weights in ours by a short table of names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from qkv.families import describe
from qkv.nn import Transformer

Names = Mapping[str, str]  # our names to theirs, {n} for the number of a layer

# a layer as BERT's classes name its parts
BERT_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_post": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_post": "output.LayerNorm",
}
BERT_INPUT = {
    "embedding": "word_embeddings",
    "embedding.position": "position_embeddings",
    "embedding.types": "token_type_embeddings",
    "embedding.norm": "LayerNorm",
}


def layers(ours: str, theirs: str, parts: Names) -> dict[str, str]:
    """The parts of all layers, under their two prefixes."""
    return {f"{ours}.layers.{{n}}.{a}": f"{theirs}.{{n}}.{b}" for a, b in parts.items()}


def under(ours: str, theirs: str, parts: Names) -> dict[str, str]:
    return {f"{ours}.{a}": f"{theirs}.{b}" for a, b in parts.items()}


def randomised(model: Any, seed: int = 0) -> Any:
    """Random biases and scales too, which a fresh model has at 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def transplanted(theirs: Any, names: Names) -> Transformer:
    """Ours, described from their configuration, with their weights."""
    config = json.loads(json.dumps(theirs.config.to_dict())) | {"architectures": [type(theirs).__name__]}
    ours = Transformer(describe(config, "config.json").model)
    fill(ours, theirs.state_dict(), names)
    return ours


def fill(ours: torch.nn.Module, state: Mapping[str, torch.Tensor], names: Names) -> None:
    """Every parameter of ours, from theirs of as many values."""
    with torch.no_grad():
        for name, tensor in ours.named_parameters():
            tensor.copy_(state[_theirs(name, names)].reshape(tensor.shape))


def _theirs(name: str, names: Names) -> str:
    number = re.search(r"layers\.(\d+)\.", name)
    general = name.replace(number[0], "layers.{n}.") if number else name
    stem, _, leaf = general.rpartition(".")
    found = names.get(general) or f"{names[stem]}.{leaf}"
    return found.replace("{n}", number[1] if number else "")
