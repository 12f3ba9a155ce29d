"""Qwen3-VL: Qwen3 over text, images and films, with positions in time, height and width. Qwen team 2025.

Not known: what the decoder's first layers add from inside the vision model (deepstack). Without an
image this is the whole model; with one its description is short of those maps.
"""

from __future__ import annotations

import math
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import ACTIVATIONS, BIASED, MOST_LAYERS, MOST_POSITIONS, head_size
from qkv.families.family import Description, Family
from qkv.families.heads import head_among
from qkv.families.pairs import nested
from qkv.families.positions import rotary
from qkv.spec import (
    Attention,
    Axes,
    Dense,
    Everything,
    Gated,
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
    """From a configuration of model type qwen3_vl."""
    text = nested(config, "text_config", TEXT)
    tied = config.take("tie_word_embeddings", bool, False) or text.peek("tie_word_embeddings") is True
    text.discard("tie_word_embeddings")
    decoder, context = _decoder(text, tied)
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
        position=_three_axes(config, head_dim, context),
        projections=Projections("qkvo" if config.take("attention_bias", bool, False) else "", norm=norm),
    )
    gated = Gated(config.choice("hidden_act", ACTIVATIONS, "silu"), config.size("intermediate_size"))
    depth = config.size("num_hidden_layers", most=MOST_LAYERS)
    tokens = Tokens(config.size("vocab_size"), width, shared="tokens" if tied else None)
    return Stack(tokens, (pre_norm(attention, gated, norm=norm),) * depth, norm), context


def _three_axes(config: Config, head_dim: int, context: int) -> Rotary:
    """Pairs alternate between time, height and width; how many are of each stands beside the scaling."""
    sections: Any = None
    for key in ("rope_scaling", "rope_parameters"):
        found = config.take(key, dict, None)
        if found is not None:
            sections = found.get("mrope_section", sections)
            mine = ("mrope_section", "mrope_interleaved")
            config.put(key, {name: value for name, value in found.items() if name not in mine})
    position = rotary(config, head_dim, context, theta=500_000.0)
    return Rotary(
        position.theta,
        position.dims,
        position.pairs,
        position.scaling,
        Axes(_sections(config, sections or SECTIONS, head_dim), "interleaved"),
    )


def _sections(config: Config, given: Any, head_dim: int) -> tuple[int, ...]:
    """Those of height and width count; time has the pairs that are left."""
    pairs = head_dim // 2
    sound = isinstance(given, list) and len(given) == 3 and all(type(n) is int and n >= 0 for n in given)
    if not sound or 3 * max(given[1:]) > pairs:
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


FAMILY = Family(types=("qwen3_vl",), describe=describe)
