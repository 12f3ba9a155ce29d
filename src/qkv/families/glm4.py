"""GLM-4 (0414): norms around every branch, half of a head turns in adjacent pairs. Z.ai 2025."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    biases,
    context_of,
    depth_of,
    interleaved,
    promised,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.families.llama import names
from qkv.families.weights import Place, fused
from qkv.spec import Gated, Language, Projections, RMSNorm, Stack, Tokens, sandwich

PARTS: dict[str, str | Place] = {
    "attention_after": "post_self_attn_layernorm",
    "feed_forward_after": "post_mlp_layernorm",
    **fused("mlp.gate_up_proj", "feed_forward.gate", "feed_forward.up"),
}


def describe(config: Config) -> Description:
    """From a configuration of model type glm4."""
    width, vocab = config.size("hidden_size"), config.size("vocab_size")
    context = context_of(config, 131_072)
    norm = RMSNorm(config.positive("rms_norm_eps", 1.5625e-7))
    through = Projections(bias=biases(config, "attention_bias", True, "qkv"))
    attention = interleaved(rotary_attention(config, width, context, through))
    layer = sandwich(
        attention,
        Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size")),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(names(PARTS), "model.")


FAMILY = Family(
    types=("glm4",),
    describe=describe,
    defaults={"glm4": {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}},
)
