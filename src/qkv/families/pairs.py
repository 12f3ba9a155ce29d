"""Pairs of models, for text and for images, that meet only in a score of their two answers.

A pair does not fit one description. Its configuration describes the half that `architectures`
names, or the one that is left when the other is ignored; the scale (and bias) of the score of
both stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import BIASED, MOST_POSITIONS, Shape, head_size
from qkv.families.family import Description
from qkv.families.vit import kernel
from qkv.families.weights import KINDS, Place, layer_names
from qkv.spec import (
    Attention,
    Causal,
    Dense,
    Everything,
    Layer,
    Learned,
    Patches,
    Stack,
    Tokens,
    pre_norm,
)

HALVES = {"TextModel": "text_config", "VisionModel": "vision_config"}
# of a pair, what the other half and the score of both hold
BESIDE = {
    "text_config": ("vision_model.*", "visual_projection.weight", "logit_scale", "logit_bias"),
    "vision_config": ("text_model.*", "text_projection.weight", "logit_scale", "logit_bias"),
}
UNUSED = ("*embeddings.position_ids",)  # the numbers of positions
PARTS = {
    "attention_before": "layer_norm1",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "feed_forward_before": "layer_norm2",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}
Defaults = Mapping[str, Mapping[str, Any]]


def is_pair(config: Config) -> bool:
    return any(key in config for key in HALVES.values())


def half_of(pair: Config, defaults: Defaults) -> tuple[Config, bool]:
    """The configuration of one half, and whether it is to answer as it does in the pair.

    It does, unless `architectures` names the half as a model of its own.
    """
    names = pair.take("architectures", list, None) or [""]
    asked = [key for called, key in HALVES.items() if called in str(names[0])]
    there = asked or [key for key in HALVES.values() if key in pair]
    if len(there) != 1:
        raise ConfigError(
            f"{pair.where} describes a pair of models, which meet only in a score of their answers. "
            'Pass ignore=("text_config",) for the one that reads images, or ignore=("vision_config",) '
            "for the one that reads text."
        )
    half = nested(pair, there[0], defaults[there[0]])
    if asked:
        half.put("architectures", names)
    pair.discard(*HALVES.values(), *(f"{key}_dict" for key in HALVES.values()))
    pair.discard("logit_scale_init_value", "initializer_factor")  # what training began with
    return half, not asked


def alone(half: Description, is_vision: bool) -> Description:
    """That of one half, which finds the other's tensors beside its own."""
    beside = BESIDE["vision_config" if is_vision else "text_config"]
    return replace(half, irrelevant=(*half.irrelevant, *beside))


def nested(config: Config, key: str, defaults: Mapping[str, Any]) -> Config:
    """The object under a key, completed with what its class has as defaults.

    Older pairs hold it a second time as `..._dict`, which then wins.
    """
    values = config.take(key, dict, {})
    again = config.take(f"{key}_dict", dict, None)
    if again:
        values = {**values, **defaults, **again}
    return config.again({**defaults, **values}, config.at(key), made=defaults.keys() - values.keys())


def layers(config: Config, size: Shape, causal: bool = False) -> tuple[Layer, ...]:
    """Pre-norm, a bias on everything."""
    attention = Attention(
        size.heads,
        size.heads,
        head_size(config, size.width, size.heads),
        mask=Causal() if causal else Everything(),
        projections=BIASED,
    )
    return (pre_norm(attention, Dense(size.activation, size.hidden), norm=size.norm),) * size.depth


def text_stack(config: Config, size: Shape, causal: bool) -> tuple[Stack, int]:
    """Tokens and positions through the layers; and the number of positions."""
    context = config.size("max_position_embeddings", most=MOST_POSITIONS)
    tokens = Tokens(config.size("vocab_size"), size.width, position=Learned(context))
    return Stack(tokens, layers(config, size, causal), size.norm), context


def text_names(theirs: str = "text_model") -> dict[str, str | Place]:
    return {
        "encoder.embedding.weight": f"{theirs}.embeddings.token_embedding.weight",
        "encoder.embedding.position.weight": f"{theirs}.embeddings.position_embedding.weight",
        **layer_names(f"{theirs}.encoder.layers.{{layer}}", PARTS, "encoder"),
        **{f"encoder.norm.{kind}": f"{theirs}.final_layer_norm.{kind}" for kind in KINDS},
    }


def vision_names(stack: Stack, theirs: str = "vision_model", ours: str = "encoder") -> dict[str, str | Place]:
    """Of a stack that reads patches, with all that one of them may have in front."""
    embeddings = f"{theirs}.embeddings"
    shape = kernel(cast(Patches, stack.input))
    return {
        f"{ours}.embedding.class_token": f"{embeddings}.class_embedding",
        f"{ours}.embedding.patch.weight": Place(f"{embeddings}.patch_embedding.weight", shape=shape),
        f"{ours}.embedding.patch.bias": f"{embeddings}.patch_embedding.bias",
        f"{ours}.embedding.position.weight": f"{embeddings}.position_embedding.weight",
        **{f"{ours}.embedding.norm.{kind}": f"{theirs}.pre_layrnorm.{kind}" for kind in KINDS},  # sic
        **layer_names(f"{theirs}.encoder.layers.{{layer}}", PARTS, ours),
        **{f"{ours}.norm.{kind}": f"{theirs}.post_layernorm.{kind}" for kind in KINDS},
    }
