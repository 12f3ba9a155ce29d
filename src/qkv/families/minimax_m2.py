"""MiniMax-M2: grouped heads normalised over all at once, and many experts with a bias that only chooses.

MiniMax 2025.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.decoder_parts import expected
from qkv.families.encoders import discard_if
from qkv.families.family import Description, Family
from qkv.families.llama import QUERY_KEY_NORMS, names
from qkv.families.mixtral import EXPERTS
from qkv.families.rotary_decoders import attention, decoder, experts, extended, gated, sizes
from qkv.spec import Projections, RMSNorm, Router, pre_norm

WEIGHTS = {
    **names({**QUERY_KEY_NORMS, **EXPERTS}),
    "decoder.layers.{layer}.feed_forward.router.balance": (
        "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"
    ),
}


def describe(config: Config) -> Description:
    """From a configuration of model type minimax_m2."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-6))
    mixer = attention(config, size)
    mixer = replace(mixer, projections=Projections(norm=norm, norm_over="all"))
    size = extended(config, size, mixer.position)
    # what the class has, in words of its authors
    expected(config, qk_norm_type="per_layer", use_qk_norm=True, use_routing_bias=True)
    expected(config, scoring_func="sigmoid", shared_intermediate_size=0)
    discard_if(config, {"attn_type_list": [1] * size.depth})  # 1: softmax attention
    config.discard("use_mtp", "mtp_transformer_layers", "num_mtp_modules")  # layers that guess ahead
    routed = experts(config, "num_local_experts", gated(config), Router("sigmoid", balance=True))
    layers = (pre_norm(mixer, routed, norm=norm) for _ in range(size.depth))
    found = decoder(config, size, layers, norm, irrelevant=("*.mtp_modules.*",))
    return found.named(WEIGHTS, "model.")


FAMILY = Family(
    types=("minimax_m2",),
    describe=describe,
    defaults={
        "minimax_m2": {
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 196_608,
            "rope_theta": 5_000_000.0,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
    },
)
