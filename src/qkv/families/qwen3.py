"""Qwen 3, dense and with experts: no biases, each head's queries and keys normalised. Yang et al. 2025."""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.encoders import discard_if
from qkv.families.family import Description, Family
from qkv.families.llama import EXPERTS, QUERY_KEY_NORMS, names
from qkv.families.qwen2 import switched_window
from qkv.families.rotary_decoders import (
    attention,
    decoder,
    extended,
    masks,
    mixed_feed_forwards,
    optional_bias,
    sizes,
)
from qkv.spec import Projections, RMSNorm, pre_norm


def describe(config: Config) -> Description:
    """From a configuration of model type qwen3 or qwen3_moe."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-6))
    mixer = attention(config, size)
    mixer = replace(mixer, projections=Projections(optional_bias(config), norm=norm))
    size = extended(config, size, mixer.position)
    window, start = switched_window(config), config.take("max_window_layers", int, 28)
    if "num_experts" in config:  # windows in every layer or in none
        start = 0
    slides = [window is not None and i >= start for i in range(size.depth)]
    visible = masks(config, window, size.context, slides)
    layers = (
        pre_norm(replace(mixer, mask=mask), feed_forward, norm=norm)
        for mask, feed_forward in zip(visible, mixed_feed_forwards(config, size.depth), strict=True)
    )
    discard_if(config, {"qkv_bias": False, "use_qk_norm": True})  # what the class has, in words of others
    return decoder(config, size, layers, norm).named(names({**QUERY_KEY_NORMS, **EXPERTS}), "model.")


FAMILY = Family(
    types=("qwen3", "qwen3_moe"),
    describe=describe,
    defaults={
        "qwen3": {
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_key_value_heads": 32,
        },
        "qwen3_moe": {
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    },
)
