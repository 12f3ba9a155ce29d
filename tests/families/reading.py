"""Reading configurations as `qkv.families` does, and counting what transformers builds from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from qkv.families import (
    albert,
    bart,
    bert,
    clip,
    deberta,
    distilbert,
    electra,
    llava,
    modernbert,
    mt5,
    nomic_bert,
    qwen3_vl,
    roberta,
    siglip,
    t5,
    vit,
    whisper,
)
from qkv.families.config import Config
from qkv.families.family import Description
from qkv.spec import Attention, Stack, Tokens

MODULES = (
    albert, bart, bert, clip, deberta, distilbert, electra, llava, modernbert, mt5, nomic_bert, qwen3_vl,
    roberta, siglip, t5, vit, whisper,
)  # fmt: skip
FAMILIES = {kind: module.FAMILY for module in MODULES for kind in module.FAMILY.types}


def read(data: dict[str, Any], ignore: tuple[str, ...] = ()) -> Description:
    """As `qkv.families.describe` does it."""
    family = FAMILIES[data["model_type"]]
    config = Config({**family.defaults.get(data["model_type"], {}), **data}, "config.json", ignore)
    return family.describe(config)


def saved(config: Any, architecture: str, **more: Any) -> dict[str, Any]:
    """The contents of the file that a class would write, through text as files are."""
    data = json.loads(json.dumps({**config.to_dict(), "architectures": [architecture], **more}))
    return dict(data)


def describe(config: Any, architecture: str, ignore: tuple[str, ...] = (), **more: Any) -> Description:
    return read(saved(config, architecture, **more), ignore)


def count(
    kind: Callable[..., torch.nn.Module], config: Any, without: tuple[str, ...] = (), **how: Any
) -> int:
    """Unique parameters of a class built without memory, but for those named."""
    with torch.device("meta"):
        model = kind(config, **how)
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in without))


def self_attention(stack: Stack | None, layer: int) -> Attention:
    assert stack is not None
    found = stack.layers[layer].sublayers[0].branches[0].mixer
    assert isinstance(found, Attention)
    return found


def tokens(stack: Stack | None) -> Tokens:
    assert stack is not None and isinstance(stack.input, Tokens)
    return stack.input


VISION = {
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 44,
    "image_size": 36,
    "patch_size": 7,
    "num_channels": 1,
}
TEXT = {
    "vocab_size": 97,
    "hidden_size": 35,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "intermediate_size": 44,
    "max_position_embeddings": 13,
}
