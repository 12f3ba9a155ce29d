"""Ministral 3 and the text of Mistral 3: Mistral whose queries grow with the logarithm of their position.

Mistral AI 2025. The vision tower (Pixtral) is not described: its rows turn in two dimensions, images
of any shape follow one another, and what lies between them is merged and normalised.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qkv.families.config import Config
from qkv.families.family import Description, Family
from qkv.families.llama import WEIGHTS
from qkv.families.pairs import nested
from qkv.families.positions import MOST_POSITIONS
from qkv.families.rotary_decoders import attention, decoder, extended, gated, masks, sizes
from qkv.spec import LogScale, RMSNorm, Rotary, Score, Yarn, pre_norm


def describe(config: Config) -> Description:
    """From a configuration of model type ministral3, or of mistral3 around it or around Mistral."""
    if "text_config" not in config:
        return _text(config)
    text = nested(config, "text_config", DEFAULTS)
    text.put("architectures", config.take("architectures", list, None))
    if "tie_word_embeddings" in config:
        text.put("tie_word_embeddings", config.take("tie_word_embeddings", bool))
    config.discard("image_token_index", "image_token_id")  # for the prompt
    config.leave("vision_config")  # see above
    config.discard("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size")
    config.discard("vision_feature_layer")  # of the same
    config.finish()
    return _text(text).named({})  # the vision tower's tensors would stand beside its own


def _text(config: Config) -> Description:
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-5))
    growth = _growth(config)
    mixer = attention(config, size)
    scaling = mixer.position.scaling if isinstance(mixer.position, Rotary) else None
    if growth and isinstance(scaling, Yarn):
        mixer = replace(mixer, score=Score(query_scale=LogScale(scaling.original, growth, first=0)))
    size = extended(config, size, mixer.position)
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    visible = masks(config, window, size.context, [window is not None] * size.depth)
    feed_forward = gated(config)
    layers = (pre_norm(replace(mixer, mask=mask), feed_forward, norm=norm) for mask in visible)
    return decoder(config, size, layers, norm).named(WEIGHTS, "model.")


def _growth(config: Config) -> float | None:
    """The factor stands among the numbers of the rotation."""
    found: Any = config.peek("rope_parameters")
    if not isinstance(found, dict) or "llama_4_scaling_beta" not in found:
        return None
    inside = config.again(
        {"llama_4_scaling_beta": found["llama_4_scaling_beta"]}, config.at("rope_parameters")
    )
    config.put("rope_parameters", {k: v for k, v in found.items() if k != "llama_4_scaling_beta"})
    return float(inside.positive("llama_4_scaling_beta", None) or 0.0)


DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
}
FAMILY = Family(types=("ministral3", "mistral3"), describe=describe, defaults={"ministral3": DEFAULTS})
