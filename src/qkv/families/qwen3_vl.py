"""Qwen3-VL, dense and with experts: Qwen3 over text, images and films. Qwen team 2025.

Its positions are in time, height and width.

Not known: what the decoder's first layers add from inside the vision model (deepstack). Without an
image this is the whole model; with one its description is short of those maps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import ACTIVATIONS, BIASED, MOST_LAYERS, MOST_POSITIONS, head_size
from qkv.families.family import Description, Family
from qkv.families.heads import head_among
from qkv.families.pairs import nested
from qkv.families.positions import rotary
from qkv.families.rotary_decoders import mixed_feed_forwards
from qkv.spec import (
    Attention,
    Axes,
    Dense,
    Everything,
    Language,
    LayerNorm,
    Learned,
    Model,
    Patches,
    Project,
    Projections,
    Projector,
    Replace,
    RMSNorm,
    Rotary,
    Stack,
    Tokens,
    Tower,
    pre_norm,
)

TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 128_000,
}
EXPERTS = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,  # the class does it whatever the file says
}
VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
}
VISION_NORM = LayerNorm(1e-6)
SECTIONS = [24, 20, 20]
IRRELEVANT = ("*visual.deepstack_merger_list.*",)


def describe(config: Config) -> Description:
    """From a configuration of model type qwen3_vl or qwen3_vl_moe."""
    routed = str(config.peek("model_type")).endswith("_moe")
    text = nested(config, "text_config", {**TEXT, **EXPERTS} if routed else TEXT)
    tied = config.take("tie_word_embeddings", bool, False) or text.peek("tie_word_embeddings") is True
    text.discard("tie_word_embeddings")
    decoder, context = _decoder(text, tied)
    return seeing(config, text, decoder, context)


def seeing(config: Config, text: Config, decoder: Stack, context: int) -> Description:
    """The whole model, around the decoder that was read from `text`."""
    text.finish()
    vision = nested(config, "vision_config", VISION)
    tower = _tower(vision, config.take("image_token_id", int, 151655), decoder.width)
    vision.finish()
    tokens = decoder.input
    language = Language(text.size("vocab_size"), shared=tokens.shared)
    heads = {"Model": None, "ForConditionalGeneration": language}
    head = head_among(config, heads, "ForConditionalGeneration")
    # where the text puts images and films, and how it marks them
    config.discard("video_token_id", "vision_start_token_id", "vision_end_token_id")
    config.finish()
    return Description(Model(decoder=decoder, head=head, towers=(tower,)), {}, context, IRRELEVANT)


def _decoder(config: Config, tied: bool) -> tuple[Stack, int]:
    """Qwen3: each head's queries and keys normalised."""
    width, context = config.size("hidden_size"), config.size("max_position_embeddings", most=MOST_POSITIONS)
    heads, head_dim = config.size("num_attention_heads"), config.size("head_dim")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.at('num_attention_heads')} {heads:,} is no multiple of "
            f"num_key_value_heads {kv_heads:,}."
        )
    norm = RMSNorm(config.positive("rms_norm_eps", 1e-6))
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        position=three_axes(config, head_dim, context, SECTIONS, 500_000.0),
        projections=Projections("qkvo" if config.take("attention_bias", bool, False) else "", norm=norm),
    )
    depth = config.size("num_hidden_layers", most=MOST_LAYERS)
    feed_forwards = mixed_feed_forwards(config, depth)
    tokens = Tokens(config.size("vocab_size"), width, shared="tokens" if tied else None)
    layers = tuple(pre_norm(attention, feed_forward, norm=norm) for feed_forward in feed_forwards)
    return Stack(tokens, layers, norm), context


def three_axes(config: Config, head_dim: int, context: int, divided: Sequence[int], theta: float) -> Rotary:
    """Pairs alternate between time, height and width; how many are of each stands beside the scaling.

    `divided` and `theta` hold where the file does not say.
    """
    sections: Any = None
    for key in ("rope_scaling", "rope_parameters"):
        found = config.take(key, dict, None)
        if found is not None:
            sections = found.get("mrope_section", sections)
            mine = ("mrope_section", "mrope_interleaved")
            config.put(key, {name: value for name, value in found.items() if name not in mine})
    position = rotary(config, head_dim, context, theta)
    axes = Axes(_sections(config, sections or list(divided), position.dims or head_dim), "interleaved")
    return replace(position, axes=axes)


def _sections(config: Config, given: Any, dims: int) -> tuple[int, ...]:
    """Those of height and width count; time has the pairs that are left."""
    pairs = dims // 2
    sound = isinstance(given, list) and len(given) == 3 and all(type(n) is int and n >= 0 for n in given)
    if not sound or any(axis + 3 * (given[axis] - 1) >= pairs for axis in (1, 2)):  # its last turn
        raise ConfigError(
            f"{config.where}: mrope_section {given!r} does not divide {pairs:,} pairs in three."
        )
    return (pairs - given[1] - given[2], given[1], given[2])


def _tower(config: Config, token: int, width: int) -> Tower:
    """Squares of pixels in two frames at a time; four neighbouring rows become one of the decoder's."""
    size, heads = config.size("hidden_size"), config.size("num_heads")
    head_dim = head_size(config, size, heads)
    table, patch = config.size("num_position_embeddings"), config.size("patch_size")
    side, frames = math.isqrt(table) * patch, config.size("temporal_patch_size")
    patches = Patches(
        patch,
        size,
        (side, side),  # the grid of the table; other sizes read between its rows
        channels=config.size("in_channels") * frames,
        bias=True,
        position=Learned(table),
    )
    theta = _vision_theta(config)
    attention = Attention(
        heads,
        heads,
        head_dim,
        position=Rotary(theta, axes=Axes((head_dim // 4, head_dim // 4), own=True)),
        mask=Everything(),
        projections=BIASED,
    )
    dense = Dense(config.choice("hidden_act", ACTIVATIONS, "gelu"), config.size("intermediate_size"))
    layers = (pre_norm(attention, dense, norm=VISION_NORM),) * config.size("depth", most=MOST_LAYERS)
    merge = config.size("spatial_merge_size", most=64) ** 2
    out = config.size("out_hidden_size")
    if out != width:
        raise ConfigError(f"{config.at('out_hidden_size')} is {out:,}, and the text's width {width:,}.")
    maps = (Project(merge * size, activation="gelu"), Project(out))
    if config.take("deepstack_visual_indexes", list, [8, 16, 24]):
        config.leave("deepstack_visual_indexes")
    return Tower(Stack(patches, layers, VISION_NORM), Replace(token), Projector(maps, merge=merge))


def _vision_theta(config: Config) -> float:
    """Of the newer spelling; the older one had it in the class."""
    given = config.inside("rope_parameters")
    if given is None:
        return 10_000.0
    theta = given.positive("rope_theta", 10_000.0)
    given.choice("rope_type", {"axial": True}, "axial")
    given.finish()
    return float(theta)


FAMILY = Family(types=("qwen3_vl", "qwen3_vl_moe"), describe=describe)
