"""Gemma: wide heads, GEGLU, norms that store their scale less one, an embedding times its width's root.

Google DeepMind 2024.
"""

from __future__ import annotations

import math
from dataclasses import replace

from qkv.families.config import Config
from qkv.families.decoder_parts import expected
from qkv.families.family import Description, Family
from qkv.families.llama import IRRELEVANT, WEIGHTS
from qkv.families.rotary_decoders import attention, decoder, extended, gated, optional_bias, sizes
from qkv.spec import RMSNorm, pre_norm

# the first files say "gelu" and mean the tanh form, with which the models were trained
ACTIVATIONS = {"gelu": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def describe(config: Config) -> Description:
    """From a configuration of model type gemma."""
    size, norm = sizes(config), offset_norm(config)
    mixer = attention(config, size, optional_bias(config))
    size = extended(config, size, mixer.position)
    expected(config, use_bidirectional_attention=False)
    older = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    activation = (
        older if "hidden_activation" not in config else config.choice("hidden_activation", ACTIVATIONS, "")
    )
    layer = pre_norm(mixer, replace(gated(config), activation=activation), norm=norm)
    found = decoder(config, size, (layer,) * size.depth, norm, scale=math.sqrt(size.width))
    return found.named(WEIGHTS, "model.", IRRELEVANT)


def offset_norm(config: Config) -> RMSNorm:
    """Gemma's: what is stored is the scale less one."""
    return RMSNorm(config.positive("rms_norm_eps", 1e-6), offset=1.0)


FAMILY = Family(
    types=("gemma",),
    describe=describe,
    defaults={
        "gemma": {
            "num_key_value_heads": 16,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    },
)
