"""Mixtral: Mistral with experts of which each token uses a few. Jiang et al. 2024."""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.family import Description, Family
from qkv.families.llama import names
from qkv.families.positions import MOST_POSITIONS
from qkv.families.rotary_decoders import attention, decoder, experts, extended, gated, masks, sizes
from qkv.spec import RMSNorm, Router, pre_norm

EXPERTS = {
    "feed_forward.router": "block_sparse_moe.gate",
    "feed_forward.expert.gate": "block_sparse_moe.experts.{expert}.w1",
    "feed_forward.expert.up": "block_sparse_moe.experts.{expert}.w3",
    "feed_forward.expert.down": "block_sparse_moe.experts.{expert}.w2",
}


def describe(config: Config) -> Description:
    """From a configuration of model type mixtral."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-5))
    mixer = attention(config, size)
    size = extended(config, size, mixer.position)
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    config.discard("attention_bias")  # the class has none
    routed = experts(config, "num_local_experts", gated(config), Router())
    layers = (
        pre_norm(replace(mixer, mask=mask), routed, norm=norm)
        for mask in masks(config, window, size.context, [window is not None] * size.depth)
    )
    return decoder(config, size, layers, norm).named(names(EXPERTS), "model.")


FAMILY = Family(
    types=("mixtral",),
    describe=describe,
    defaults={
        "mixtral": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    },
)
