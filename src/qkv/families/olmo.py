"""OLMo: Llama's block, its norms without a single parameter, queries, keys and values clipped.

Groeneveld et al. 2024.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    biases,
    context_of,
    depth_of,
    promised,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.families.llama import IRRELEVANT, WEIGHTS
from qkv.spec import Gated, Language, LayerNorm, Projections, Stack, Tokens, pre_norm


def describe(config: Config) -> Description:
    """From a configuration of model type olmo."""
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = LayerNorm(1e-5, scale=False, bias=False)
    projections = Projections(
        bias=biases(config, "attention_bias", False),
        clip=config.positive("clip_qkv", None),
    )
    attention = rotary_attention(config, width, context, projections)
    layer = pre_norm(
        attention,
        Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size")),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(WEIGHTS, "model.", IRRELEVANT)


FAMILY = Family(types=("olmo",), describe=describe)
