"""Qwen3-Next: three layers that keep a state of fixed size, then one of gated attention; experts in all.

Yang et al. 2024 (gated delta rule).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.decoder_parts import expected
from qkv.families.family import Description, Family
from qkv.families.llama import EXPERTS, QUERY_KEY_NORMS, names
from qkv.families.qwen2_moe import SHARED
from qkv.families.rotary_decoders import Sizes, attention, decoder, extended, mixed_feed_forwards, sizes
from qkv.families.weights import Place, Table, fused
from qkv.spec import Attention, GatedDelta, Layer, Projections, RMSNorm, pre_norm

LAYER_TYPES = {"linear_attention": False, "full_attention": True}


def describe(config: Config) -> Description:
    """From a configuration of model type qwen3_next."""
    size = sizes(config)
    mixer = attention(config, size)
    size = extended(config, size, mixer.position)
    layers, norm, delta = hybrid(config, size, mixer)
    found = decoder(config, size, layers, norm, irrelevant=("mtp.*",))
    # of each key head what belongs to it
    maps = {
        **fused(
            "linear_attn.in_proj_qkvz",
            *("mixer.query", "mixer.key", "mixer.value", "mixer.gate"),
            groups=delta.key_heads,
        ),
        **fused("linear_attn.in_proj_ba", "mixer.beta", "mixer.decay", groups=delta.key_heads),
    }
    return found.named(table(mixer.heads, delta, maps), "model.")


def hybrid(config: Config, size: Sizes, mixer: Attention) -> tuple[list[Layer], RMSNorm, GatedDelta]:
    """The layers, and their norm: `mixer`, gated, in every fourth or where the file says, else a state."""
    eps = config.positive("rms_norm_eps", 1e-6)
    norm = RMSNorm(eps, offset=1.0)
    mixer = replace(mixer, projections=Projections(norm=norm, gate="sigmoid"))
    # a bias on the gate is not described; the state's gate keeps silu whatever hidden_act says
    expected(config, attention_bias=False, hidden_act="silu", use_sliding_window=False)
    delta = _delta(config, RMSNorm(eps))
    every = config.size("full_attention_interval", 4)
    full = config.each("layer_types", LAYER_TYPES, size.depth, "layers")
    full = full or [(i + 1) % every == 0 for i in range(size.depth)]
    layers = [
        pre_norm(mixer if attends else delta, feed_forward, norm=norm)
        for attends, feed_forward in zip(full, mixed_feed_forwards(config, size.depth), strict=True)
    ]
    return layers, norm, delta


def table(heads: int, delta: GatedDelta, maps: Mapping[str, str | Place]) -> Table:
    """`maps` are those that a state's queries, keys, values, gate, step and decay are made by."""
    parts: dict[str, str | Place] = {
        **QUERY_KEY_NORMS,
        # of each head its query and its gate
        **fused("self_attn.q_proj", "attention.query", "attention.gate", groups=heads),
        "mixer_before": "input_layernorm",
        **maps,
        "mixer.convolution": Place("linear_attn.conv1d", shape=(delta.channels, 1, delta.convolution)),
        "mixer.norm": "linear_attn.norm",
        "mixer.output": "linear_attn.out_proj",
        **EXPERTS,
        **SHARED,
    }
    return {
        **names(parts),
        "decoder.layers.{layer}.mixer.decay_bias": "model.layers.{layer}.linear_attn.dt_bias",
        "decoder.layers.{layer}.mixer.decay_log": "model.layers.{layer}.linear_attn.A_log",
    }


def _delta(config: Config, norm: RMSNorm) -> GatedDelta:
    keys, values = config.size("linear_num_key_heads"), config.size("linear_num_value_heads")
    if values % keys:
        raise ConfigError(
            f"{config.at('linear_num_value_heads')} {values:,} is no multiple of "
            f"linear_num_key_heads {keys:,}."
        )
    return GatedDelta(
        keys,
        values,
        config.size("linear_key_head_dim"),
        config.size("linear_value_head_dim"),
        config.size("linear_conv_kernel_dim"),
        norm,
    )


FAMILY = Family(
    types=("qwen3_next",),
    describe=describe,
    defaults={
        "qwen3_next": {
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32_768,
            "partial_rotary_factor": 0.25,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    },
)
