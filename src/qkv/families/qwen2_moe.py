"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen 2 with many small experts and a shared one behind a gate."""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.family import Description, Family
from qkv.families.llama import EXPERTS, names
from qkv.families.qwen2 import switched_window
from qkv.families.rotary_decoders import attention, decoder, extended, masks, mixed_feed_forwards, sizes
from qkv.spec import RMSNorm, pre_norm

SHARED = {
    "feed_forward.shared_gate": "mlp.shared_expert_gate",
    "feed_forward.shared_expert.gate": "mlp.shared_expert.gate_proj",
    "feed_forward.shared_expert.up": "mlp.shared_expert.up_proj",
    "feed_forward.shared_expert.down": "mlp.shared_expert.down_proj",
}


def describe(config: Config) -> Description:
    """From a configuration of model type qwen2_moe."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-6))
    config.discard("attention_bias")  # called qkv_bias here
    mixer = attention(config, size, "qkv" if config.take("qkv_bias", bool, True) else "")
    size = extended(config, size, mixer.position)
    # every other layer below this one, where windows are switched on: not Qwen 2's rule
    window, end = switched_window(config), config.take("max_window_layers", int, 28)
    slides = [window is not None and i % 2 == 0 and i < end for i in range(size.depth)]
    visible = masks(config, window, size.context, slides)
    layers = (
        pre_norm(replace(mixer, mask=mask), feed_forward, norm=norm)
        for mask, feed_forward in zip(visible, mixed_feed_forwards(config, size.depth), strict=True)
    )
    return decoder(config, size, layers, norm).named(names({**EXPERTS, **SHARED}), "model.")


FAMILY = Family(
    types=("qwen2_moe",),
    describe=describe,
    defaults={
        "qwen2_moe": {
            "num_key_value_heads": 16,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    },
)
