"""gpt-oss: a sink a head, a window in every other layer, experts with a clamped swish. OpenAI 2025."""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.family import Description, Family
from qkv.families.llama import names
from qkv.families.positions import MOST_POSITIONS
from qkv.families.rotary_decoders import attention, decoder, experts, extended, masks, optional_bias, sizes
from qkv.families.weights import Place, Table, fused
from qkv.spec import ClampedSwish, Gated, RMSNorm, Router, Score, pre_norm

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def describe(config: Config) -> Description:
    """From a configuration of model type gpt_oss."""
    size, norm = sizes(config), RMSNorm(config.positive("rms_norm_eps", 1e-5))
    if not config.peek("rope_scaling") and not config.peek("rope_parameters"):
        config.put("rope_scaling", YARN)  # the class's own
    mixer = replace(attention(config, size, optional_bias(config)), score=Score(sink=True))
    size = extended(config, size, mixer.position)
    # the swish is its own, whatever hidden_act says; the others repeat num_experts_per_tok and the scaling
    config.discard("hidden_act", "experts_per_token", "initial_context_length")
    swish = ClampedSwish(config.take("swiglu_alpha", float, 1.702), config.positive("swiglu_limit", 7.0))
    expert = Gated(swish, config.size("intermediate_size"), bias=True)
    routed = experts(config, "num_local_experts", expert, Router(bias=True))
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    layers = (
        pre_norm(replace(mixer, mask=mask), routed, norm=norm)
        for mask in masks(config, window, size.context, [i % 2 == 0 for i in range(size.depth)])
    )
    return decoder(config, size, layers, norm).named(_names(expert.hidden), "model.")


def _names(hidden: int) -> Table:
    """All experts in one tensor, (expert, in, out); rows of gate and up take turns."""
    experts, ours = "model.layers.{layer}.mlp.experts", "decoder.layers.{layer}.feed_forward.expert"
    return {
        **names({"feed_forward.router": "mlp.router"}),
        "decoder.layers.{layer}.attention.sink": "model.layers.{layer}.self_attn.sinks",
        **fused(
            f"{experts}.gate_up_proj",
            *(f"{ours}.gate.weight", f"{ours}.up.weight"),
            groups=hidden,
            axis=1,
            transposed=True,
        ),
        **fused(
            f"{experts}.gate_up_proj_bias",
            *(f"{ours}.gate.bias", f"{ours}.up.bias"),
            groups=hidden,
            axis=1,
        ),
        f"{ours}.down.weight": Place(f"{experts}.down_proj", transposed=True),
        f"{ours}.down.bias": f"{experts}.down_proj_bias",
    }


FAMILY = Family(
    types=("gpt_oss",),
    describe=describe,
    defaults={
        "gpt_oss": {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131_072,
            "rope_theta": 150_000.0,
            "attention_bias": True,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    },
)
