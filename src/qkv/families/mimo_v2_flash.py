"""MiMo-V2-Flash: five layers with a short window and sinks, then one that sees all; values scaled down.

Xiaomi 2025. Keys are longer than values, and layers with a window share keys and values among fewer heads.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.decoder_parts import biases, expected, renamed
from qkv.families.deepseek import routed_experts, sparse_layers
from qkv.families.family import Description, Family
from qkv.families.gemma3 import local_rotation
from qkv.families.llama import EXPERTS, names
from qkv.families.positions import MOST_POSITIONS, rotary
from qkv.families.rotary_decoders import Sizes, decoder, gated, sizes
from qkv.spec import Attention, Causal, Projections, RMSNorm, Score, Window, pre_norm

WEIGHTS = {
    **names(EXPERTS),
    "decoder.layers.{layer}.attention.sink": "model.layers.{layer}.self_attn.attention_sink_bias",
    "decoder.layers.{layer}.feed_forward.router.balance": (
        "model.layers.{layer}.mlp.gate.e_score_correction_bias"
    ),
}
OLDER_NAMES = {
    "layernorm_epsilon": "rms_norm_eps",
    "swa_rope_theta": "rope_local_base_freq",
    "hybrid_layer_pattern": "layer_types",
    "moe_layer_freq": "mlp_layer_types",
}
SLIDES: dict[str | int, bool] = {"sliding_attention": True, "full_attention": False, 1: True, 0: False}


def describe(config: Config) -> Description:
    """From a configuration of model type mimo_v2_flash."""
    renamed(config, OLDER_NAMES)
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-5))
    local, full = _attentions(config, size)
    slides = config.each("layer_types", SLIDES, size.depth, "layers")
    slides = slides or [i != 0 and (i + 1) % 6 != 0 for i in range(size.depth)]
    config.discard("attention_chunk_size")  # repeats the window
    dense = gated(config)
    routed, sparse = routed_experts(config, dense), sparse_layers(config, size.depth)
    layers = (
        pre_norm(local if near else full, routed if routes else dense, norm=norm)
        for near, routes in zip(slides, sparse, strict=True)
    )
    return decoder(config, size, layers, norm, irrelevant=("model.mtp.*",)).named(WEIGHTS, "model.")


def _attentions(config: Config, size: Sizes) -> tuple[Attention, Attention]:
    """That of layers with a window, and that of the others."""
    near = local_rotation(config)
    heads, kv_heads = config.size("num_attention_heads"), config.size("num_key_value_heads")
    head_dim, value_dim = config.size("head_dim"), config.size("v_head_dim")
    through = Projections(
        biases(config, "attention_bias", False, "qkv"),
        value_scale=config.positive("attention_value_scale", None) or 1.0,
    )
    full = Attention(
        heads,
        kv_heads,
        head_dim,
        score=Score(sink=config.take("add_full_attention_sink_bias", bool, False)),
        position=rotary(config, head_dim, size.context),
        projections=through,
        value_dim=value_dim,
    )
    # one key counts what is before a token, the other the token as well
    before = config.size("sliding_window_size", None, most=MOST_POSITIONS)
    window = config.size("sliding_window", 129, most=MOST_POSITIONS)
    expected(config, swa_num_attention_heads=heads, swa_head_dim=head_dim, swa_v_head_dim=value_dim)
    local = replace(
        full,
        kv_heads=config.size("swa_num_key_value_heads", 2 * kv_heads),
        score=Score(sink=config.take("add_swa_attention_sink_bias", bool, True)),
        position=rotary(near, head_dim, size.context),
        mask=Causal() & Window(window if before is None else before + 1),
    )
    for attention in (full, local):
        if heads % attention.kv_heads:
            raise ConfigError(
                f"{config.at('num_attention_heads')} {heads:,} is no multiple of "
                f"{attention.kv_heads:,} key/value heads."
            )
    return local, full


FAMILY = Family(
    types=("mimo_v2_flash",),
    describe=describe,
    defaults={
        "mimo_v2_flash": {
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "max_position_embeddings": 131_072,
            "rope_theta": 5_000_000.0,
            "partial_rotary_factor": 0.334,
            "attention_value_scale": 0.707,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 1,
        },
    },
)
