"""GPT-NeoX and Pythia: both branches read the same stream, each through its own norm. Black et al. 2022."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    biases,
    context_of,
    depth_of,
    promised,
    renamed,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.spec import Dense, Language, LayerNorm, Projections, Stack, Tokens, parallel, pre_norm


def describe(config: Config) -> Description:
    """From a configuration of model type gpt_neox."""
    renamed(config, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    if "partial_rotary_factor" not in config:
        config.put("partial_rotary_factor", 0.25)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = LayerNorm(config.positive("layer_norm_eps", 1e-5))
    through = Projections(bias=biases(config, "attention_bias", True))
    attention = rotary_attention(config, width, context, through)
    feed_forward = Dense(activation_of(config, "hidden_act", "gelu"), config.size("intermediate_size"))
    if config.take("use_parallel_residual", bool, True):
        layer = parallel(attention, feed_forward, norm=norm, norms=2)
    else:
        layer = pre_norm(attention, feed_forward, norm=norm)
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    return assembled(config, stack, Language(vocab), promised(attention, context))


FAMILY = Family(types=("gpt_neox",), describe=describe)
