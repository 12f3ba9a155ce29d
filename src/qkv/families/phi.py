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
from qkv.families.llama import names
from qkv.families.weights import KINDS
from qkv.spec import Dense, Language, LayerNorm, Projections, Stack, Tokens, parallel

PARTS = {
    "attention.output": "self_attn.dense",
    "attention.query_norm": "self_attn.q_layernorm",
    "attention.key_norm": "self_attn.k_layernorm",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}
WEIGHTS = {**names(PARTS), **{f"decoder.norm.{kind}": f"model.final_layernorm.{kind}" for kind in KINDS}}


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
    found = assembled(config, stack, Language(vocab, bias=True), promised(attention, context))
    return found.named(WEIGHTS, "model.")


FAMILY = Family(types=("phi",), describe=describe, defaults={"phi": {"partial_rotary_factor": 0.5}})
