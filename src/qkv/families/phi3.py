"""Phi-3 and Phi-4: Llama's block; the long variants divide each pair's frequency by a searched number.

Abdin et al. 2024.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    context_of,
    depth_of,
    expected,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.families.llama import names
from qkv.families.positions import MOST_POSITIONS
from qkv.families.weights import fused
from qkv.spec import Causal, Gated, Language, Mask, Projections, RMSNorm, Stack, Tokens, Window, pre_norm

PARTS = {
    **fused("self_attn.qkv_proj", "attention.query", "attention.key", "attention.value"),
    **fused("mlp.gate_up_proj", "feed_forward.gate", "feed_forward.up"),
}


def describe(config: Config) -> Description:
    """From a configuration of model type phi3."""
    expected(config, attention_bias=False, mlp_bias=False, lm_head_bias=False)
    expected(config, full_attn_mod=1, interpolate_factor=1)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 4096)
    norm = RMSNorm(config.positive("rms_norm_eps", 1e-5))
    _call_longrope(config)
    attention = rotary_attention(config, width, context, Projections(), _mask(config, context))
    config.discard("original_max_position_embeddings")  # says nothing without a scaling
    layer = pre_norm(
        attention,
        Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size")),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), context)
    return found.named(names(PARTS), "model.")


def _mask(config: Config, context: int) -> Mask:
    """A window no smaller than the context (mini-128k: 262,144) hides nothing, so it is none."""
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    return Causal() if window is None or window >= context else Causal() & Window(window)


def _call_longrope(config: Config) -> None:
    """The first files call their LongRoPE "yarn", which has no lists of divisors."""
    for key in ("rope_scaling", "rope_parameters"):
        given = config.peek(key)
        if isinstance(given, dict) and given.get("rope_type", given.get("type")) == "yarn":
            config.put(key, {**given, "rope_type": "longrope"})


FAMILY = Family(
    types=("phi3",),
    describe=describe,
    defaults={"phi3": {"original_max_position_embeddings": 4096}},
)
