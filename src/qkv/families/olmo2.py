"""OLMo 2: norms after the branches, queries and keys normalised over all heads at once. OLMo et al. 2024."""

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
from qkv.families.llama import QUERY_KEY_NORMS, names
from qkv.spec import Gated, Language, Projections, RMSNorm, Stack, Tokens, reordered

AFTER = {
    "attention_after": "post_attention_layernorm",
    "feed_forward_after": "post_feedforward_layernorm",
}


def describe(config: Config) -> Description:
    """From a configuration of model type olmo2."""
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = RMSNorm(config.positive("rms_norm_eps", 1e-5))
    through = Projections(bias=biases(config, "attention_bias", False), norm=norm, norm_over="all")
    attention = rotary_attention(config, width, context, through)
    layer = reordered(
        attention,
        Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size")),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(names({**AFTER, **QUERY_KEY_NORMS}), "model.")


FAMILY = Family(types=("olmo2",), describe=describe)
