"""Phi-1, 1.5 and 2: one norm feeds both branches, half of a head turns, biases everywhere.

Gunasekar et al. 2023, Li et al. 2023.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    context_of,
    depth_of,
    promised,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.spec import Dense, Language, LayerNorm, Projections, Stack, Tokens, parallel


def describe(config: Config) -> Description:
    """From a configuration of model type phi."""
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = LayerNorm(config.positive("layer_norm_eps", 1e-5))
    normed = config.take("qk_layernorm", bool, False)
    projections = Projections(bias="qkvo", norm=norm if normed else None)
    attention = rotary_attention(config, width, context, projections)
    layer = parallel(
        attention,
        Dense(activation_of(config, "hidden_act", "gelu_new"), config.size("intermediate_size")),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    return assembled(config, stack, Language(vocab, bias=True), promised(attention, context))


FAMILY = Family(types=("phi",), describe=describe, defaults={"phi": {"partial_rotary_factor": 0.5}})
