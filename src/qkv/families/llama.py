"""Llama, Mistral and what is built like them: pre-norm, rotary, grouped heads, gated feed-forward.

Touvron et al. 2023 (Llama), Jiang et al. 2023 (Mistral: a window), Hugging Face's SmolLM3 (some
layers without positions), IBM's Granite (fixed multipliers) and InternLM's first (biases).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.decoder_parts import activation_of, context_of, depth_of, promised, rotary_attention
from qkv.families.family import Description, Family, head_of
from qkv.families.positions import MOST_POSITIONS
from qkv.families.weights import KINDS, Place, layer_names
from qkv.spec import (
    Attention,
    Causal,
    Gated,
    Language,
    Mask,
    Model,
    Projections,
    RMSNorm,
    Score,
    Stack,
    Tokens,
    Window,
    pre_norm,
)

PARTS = {
    "attention_before": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_before": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def names(
    parts: Mapping[str, str | Place] = MappingProxyType({}), stack: str = "decoder"
) -> dict[str, str | Place]:
    """The table of a model called like Llama, but for these parts of a layer."""
    return {
        f"{stack}.embedding.weight": "model.embed_tokens.weight",
        **layer_names("model.layers.{layer}", {**PARTS, **parts}, stack),
        **{f"{stack}.norm.{kind}": f"model.norm.{kind}" for kind in KINDS},
        **{f"head.{kind}": f"lm_head.{kind}" for kind in KINDS},
        **{f"head.output.{kind}": f"score.{kind}" for kind in KINDS},
    }


QUERY_KEY_NORMS = {"attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm"}
EXPERTS = {
    "feed_forward.router": "mlp.gate",
    "feed_forward.expert.gate": "mlp.experts.{expert}.gate_proj",
    "feed_forward.expert.up": "mlp.experts.{expert}.up_proj",
    "feed_forward.expert.down": "mlp.experts.{expert}.down_proj",
}
WEIGHTS = names()


IRRELEVANT = (
    "*rotary_emb.inv_freq",
)  # older files keep the frequencies, which follow from the configuration
LAYER_TYPES = {"sliding_attention": True, "full_attention": False}


def describe(config: Config) -> Description:
    """From a configuration of a model type in `FAMILY`."""
    width, vocab = config.size("hidden_size"), config.size("vocab_size")
    depth = depth_of(config)
    context = context_of(config, 2048)
    norm = RMSNorm(config.positive("rms_norm_eps", 1e-6))
    rotated = _rotated_layers(config, depth)
    attention, feed_forward = _attention(config, width, context), _feed_forward(config)
    step_scale = config.take("residual_multiplier", float, 1.0)
    layers = tuple(
        pre_norm(
            replace(attention, mask=mask, position=attention.position if rotates else None),
            feed_forward,
            norm=norm,
            scale=step_scale,
        )
        for mask, rotates in zip(_masks(config, rotated), rotated, strict=True)
    )
    tied = "tokens" if config.take("tie_word_embeddings", bool, False) else None
    tokens = Tokens(vocab, width, scale=config.take("embedding_multiplier", float, 1.0), shared=tied)
    head = head_of(config, Language(vocab, scale=1 / config.positive("logits_scaling", 1.0), shared=tied))
    config.finish()
    model = Model(decoder=Stack(tokens, layers, norm), head=head)
    return Description(model, {}, promised(attention, context)).named(WEIGHTS, "model.", IRRELEVANT)


def _attention(config: Config, width: int, context: int) -> Attention:
    biased = config.take("attention_bias", bool, False) or config.take("bias", bool, False)
    attention = rotary_attention(config, width, context, Projections(bias="qkvo" if biased else ""))
    return replace(attention, score=Score(config.take("attention_multiplier", float, None)))


def _feed_forward(config: Config) -> Gated:
    activation = activation_of(config, "hidden_act", "silu")
    return Gated(activation, config.size("intermediate_size"), config.take("mlp_bias", bool, False))


def _masks(config: Config, rotated: list[bool]) -> list[Mask]:
    """A window in every layer, or in those that `layer_types` calls sliding.

    SmolLM3 switches windows with `use_sliding_window`, and has them where a layer does not rotate
    unless `layer_types` says otherwise.
    """
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    used = config.take("use_sliding_window", bool, None)
    config.discard("max_window_layers")
    slides = config.each("layer_types", LAYER_TYPES, len(rotated), "layers")
    if slides is not None and any(slides) and window is None:
        raise ConfigError(f"{config.at('sliding_window')} is missing, and layer_types calls for one.")
    if slides is not None and any(slides) and used is False:
        raise ConfigError(f"{config.at('layer_types')} has sliding layers and use_sliding_window is false.")
    if slides is None:
        slides = [used is None or not rotates for rotates in rotated]
    slides = [slide and used is not False and window is not None for slide in slides]
    return [Causal() & Window(window) if slide else Causal() for slide in slides]


def _rotated_layers(config: Config, depth: int) -> list[bool]:
    """SmolLM3: `no_rope_layers` holds 1 where a layer rotates (sic), or every n-th layer does not."""
    every = config.size("no_rope_layer_interval", None)
    listed = config.each("no_rope_layers", {1: True, 0: False}, depth, "layers")
    return listed or [every is None or (i + 1) % every != 0 for i in range(depth)]


FAMILY = Family(
    types=("llama", "mistral", "smollm3", "granite", "internlm"),
    describe=describe,
    defaults={
        "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
        "smollm3": {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        "granite": {"attention_multiplier": 1.0},
        "internlm": {"bias": True},
    },
    own={
        "llama": frozenset({"rope_interleaved"}),
        "mistral": frozenset({"sliding_window"}),
        "internlm": frozenset({"bias"}),
        "smollm3": frozenset(
            {
                *("sliding_window", "use_sliding_window", "max_window_layers"),
                *("layer_types", "no_rope_layers", "no_rope_layer_interval"),
            }
        ),
        "granite": frozenset(
            {"attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"}
        ),
        "": frozenset({"partial_rotary_factor", "rotary_dim"}),  # none of them turns only a part
    },
)
