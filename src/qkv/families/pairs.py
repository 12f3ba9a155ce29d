"""Pairs of models, for text and for images, that meet only in a score of their two answers.

A pair does not fit one description. Its configuration describes the half that `architectures`
names, or the one that is left when the other is ignored; the scale (and bias) of the score of
both stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import BIASED, MOST_POSITIONS, Shape, head_size
from qkv.spec import Attention, Causal, Dense, Everything, Layer, Learned, Stack, Tokens, pre_norm

HALVES = {"TextModel": "text_config", "VisionModel": "vision_config"}
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
