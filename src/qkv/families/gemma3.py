"""Gemma 3: five layers with a window, then one without, each kind with a base of its own; it may see.

Gemma Team 2025. The 4B and larger read images through SigLIP (Zhai et al. 2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.decoder_parts import TRAINING
from qkv.families.family import Description, Family
from qkv.families.gemma import offset_norm
from qkv.families.gemma2 import SANDWICH, geglu
from qkv.families.llama import LAYER_TYPES, QUERY_KEY_NORMS, names
from qkv.families.llava import around_text
from qkv.families.pairs import nested
from qkv.families.positions import MOST_POSITIONS, rotary
from qkv.families.rotary_decoders import (
    attention,
    decoder,
    extended,
    masks,
    optional_bias,
    sizes,
)
from qkv.families.siglip import VISION, vision_stack
from qkv.families.weights import Place, Table
from qkv.spec import (
    Everything,
    Mask,
    Patches,
    Project,
    Projections,
    Projector,
    Replace,
    RMSNorm,
    Score,
    Tower,
    Window,
    sandwich,
)

PROJECTOR: Table = {
    "towers.0.projector.norm.weight": "multi_modal_projector.mm_soft_emb_norm.weight",
    "towers.0.projector.maps.0.linear.weight": Place(
        "multi_modal_projector.mm_input_projection_weight", transposed=True
    ),
}


def describe(config: Config) -> Description:
    """From a configuration of model type gemma3 or gemma3_text."""
    return _seeing(config) if "text_config" in config or "vision_config" in config else _text(config)


def _text(config: Config) -> Description:
    size, norm = sizes(config), offset_norm(config)
    local = local_rotation(config)
    mixer = attention(config, size)
    mixer = replace(
        mixer,
        score=Score(config.positive("query_pre_attn_scalar") ** -0.5),
        projections=Projections(optional_bias(config), norm=norm),
    )
    size = extended(config, size, mixer.position)
    positions = {False: mixer.position, True: rotary(local, mixer.head_dim, size.context)}
    slides, both_ways = _sliding(config, size.depth), config.take("use_bidirectional_attention", bool, False)
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    visible = masks(config, window, size.context, slides)
    if both_ways:  # half of the window to either side
        near = _around((window or 0) // 2 + 1, size.context)
        visible = [near if slide else Everything() for slide in slides]
    feed_forward = geglu(config)
    layers = (
        sandwich(replace(mixer, mask=mask, position=positions[slide]), feed_forward, norm=norm)
        for mask, slide in zip(visible, slides, strict=True)
    )
    cap = config.positive("final_logit_softcapping", None)
    found = decoder(config, size, layers, norm, scale=math.sqrt(size.width), cap=cap)
    if both_ways:
        found = replace(found, model=replace(found.model, encoder=found.model.decoder, decoder=None))
    stack = "encoder" if both_ways else "decoder"
    return found.named(names({**SANDWICH, **QUERY_KEY_NORMS}, stack), "model.")


def local_rotation(config: Config) -> Config:
    """The keys of the rotation in layers with a window; those that stay are of the other layers.

    One spelling has an object for each kind of layer, the other two bases and a scaling that holds
    for the layers without a window.
    """
    own: dict[str, Any] = {"rope_theta": config.positive("rope_local_base_freq", 10_000.0)}
    own["partial_rotary_factor"] = config.peek("partial_rotary_factor")
    kinds = config.inside("rope_parameters")
    if kinds is not None:
        own["rope_parameters"] = kinds.take("sliding_attention", dict, {})
        config.put("rope_parameters", kinds.take("full_attention", dict, {}))
        kinds.finish()
    called = {"rope_parameters": "rope_parameters.sliding_attention"}
    return config.again(own, called=called, made=("rope_theta", "partial_rotary_factor"))


def _sliding(config: Config, depth: int) -> Sequence[bool]:
    """All but every sixth layer where the file does not say."""
    every = config.size("sliding_window_pattern", config.size("_sliding_window_pattern", 6))
    listed = config.each("layer_types", LAYER_TYPES, depth, "layers")
    return listed or [(i + 1) % every != 0 for i in range(depth)]


def _around(keys: int, context: int) -> Mask:
    return Window(keys, keys - 1) if keys < context else Everything()


def _seeing(config: Config) -> Description:
    """The text model, and the tower whose rows take the places of an image's tokens."""
    text = nested(config, "text_config", TEXT)
    text.put("architectures", config.take("architectures", list, None))
    text.put("tie_word_embeddings", config.take("tie_word_embeddings", bool, True))
    found = _text(text)
    tower = _tower(config, found.model.trunk.width)
    config.discard("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id")  # for the prompt
    config.finish()
    whole = replace(found, model=replace(found.model, towers=(tower,)))
    return around_text(whole, found, PROJECTOR)


def _tower(config: Config, width: int) -> Tower:
    """SigLIP's last rows, averaged over squares."""
    vision = nested(config, "vision_config", {"model_type": "siglip_vision_model", **VISION})
    kind = vision.peek("model_type")
    if kind != "siglip_vision_model":
        raise ConfigError(
            f"{vision.at('model_type')} is {shown(kind)}; only siglip_vision_model is known here."
        )
    stack, eps = vision_stack(vision), vision.positive("layer_norm_eps")
    if not isinstance(stack.input, Patches):
        raise ConfigError(f"{vision.where} describes no images.")
    (side, other), rows = stack.input.image, config.size("mm_tokens_per_image", 256)
    side, other = side // stack.input.size, other // stack.input.size
    if side != other or math.isqrt(rows) ** 2 != rows or side % math.isqrt(rows):
        raise ConfigError(
            f"{config.at('mm_tokens_per_image')} is {rows:,}; {side:,} by {other:,} patches do not "
            "average to a square of as many."
        )
    vision.discard("vision_use_head")  # nothing reads what it pools
    vision.discard(*TRAINING)
    vision.finish()
    projector = Projector((Project(width, bias=False),), RMSNorm(eps, offset=1.0), pool=side**2 // rows)
    token = config.take("image_token_index", int, config.take("image_token_id", int, 262_144))
    return Tower(stack, Replace(token, both_ways=True), projector)


TEXT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
FAMILY = Family(types=("gemma3", "gemma3_text"), describe=describe, defaults={"gemma3_text": TEXT})
