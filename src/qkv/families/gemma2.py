"""Gemma 2: norms around every branch, a window in every other layer, scores and logits capped.

Google DeepMind 2024.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qkv.families.config import Config
from qkv.families.decoder_parts import expected
from qkv.families.family import Description, Family
from qkv.families.gemma import offset_norm
from qkv.families.llama import names
from qkv.families.positions import MOST_POSITIONS
from qkv.families.rotary_decoders import (
    attention,
    decoder,
    extended,
    gated,
    masks,
    optional_bias,
    sizes,
)
from qkv.spec import Gated, Score, sandwich

SANDWICH = {
    "attention_after": "post_attention_layernorm",
    "feed_forward_before": "pre_feedforward_layernorm",
    "feed_forward_after": "post_feedforward_layernorm",
}


def describe(config: Config) -> Description:
    """From a configuration of model type gemma2."""
    size, norm = sizes(config), offset_norm(config)
    mixer = attention(config, size, optional_bias(config))
    cap = config.positive("attn_logit_softcapping", None)
    mixer = replace(mixer, score=Score(config.positive("query_pre_attn_scalar") ** -0.5, cap))
    size = extended(config, size, mixer.position)
    expected(config, use_bidirectional_attention=False)
    config.discard("sliding_window_size")  # the window again
    feed_forward = geglu(config)
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    layers = (
        sandwich(replace(mixer, mask=mask), feed_forward, norm=norm)
        for mask in masks(config, window, size.context, [i % 2 == 0 for i in range(size.depth)])
    )
    cap = config.positive("final_logit_softcapping", None)
    found = decoder(config, size, layers, norm, scale=math.sqrt(size.width), cap=cap)
    return found.named(names(SANDWICH), "model.")


def geglu(config: Config) -> Gated:
    """Gemma's feed-forward, whose activation is called `hidden_activation`; `hidden_act` is not read."""
    name = config.take("hidden_activation", str, "gelu_pytorch_tanh")
    config.put("hidden_act", name)
    return gated(config)


FAMILY = Family(
    types=("gemma2",),
    describe=describe,
    defaults={
        "gemma2": {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
    },
)
