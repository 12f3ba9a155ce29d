"""StableLM: LayerNorm around gated feed-forwards, a quarter of a head turns. Bellagente et al. 2024."""

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
from qkv.families.llama import IRRELEVANT, names
from qkv.spec import Gated, Language, LayerNorm, Projections, Stack, Tokens, parallel, pre_norm

NORMS = {
    "attention.query_norm": "self_attn.q_layernorm.norms.{head}",
    "attention.key_norm": "self_attn.k_layernorm.norms.{head}",
}


def describe(config: Config) -> Description:
    """From a configuration of model type stablelm."""
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 4096)
    eps = config.positive("layer_norm_eps", 1e-5)
    norm = LayerNorm(eps)
    projections = Projections(
        bias=biases(config, "use_qkv_bias", False, "qkv"),
        norm=LayerNorm(eps, bias=False) if config.take("qk_layernorm", bool, False) else None,
        norm_over="heads",
    )
    attention = rotary_attention(config, width, context, projections)
    feed_forward = Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size"))
    arranged = parallel if config.take("use_parallel_residual", bool, False) else pre_norm
    layer = arranged(attention, feed_forward, norm=norm)
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(names(NORMS), "model.", IRRELEVANT)


FAMILY = Family(
    types=("stablelm",),
    describe=describe,
    defaults={"stablelm": {"num_key_value_heads": 32, "partial_rotary_factor": 0.25}},
)
