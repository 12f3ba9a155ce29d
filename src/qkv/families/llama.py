"""Llama, Mistral and what is built like them: pre-norm, rotary, grouped heads, gated feed-forward.

Touvron et al. 2023 (Llama), Jiang et al. 2023 (Mistral: a window), Hugging Face's SmolLM3 (some
layers without positions) and IBM's Granite (fixed multipliers).
"""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.family import Description, Family, head_of, layer_names
from qkv.families.positions import rotary
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
WEIGHTS = {
    "decoder.embedding.weight": "model.embed_tokens.weight",
    **layer_names("model.layers.{layer}", PARTS),
    "decoder.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def describe(config: Config) -> Description:
    """From a configuration of model type llama, mistral, smollm3 or granite."""
    width, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if "head_dim" not in config and width % heads:
        raise ConfigError(
            f"{config.where}: hidden_size {width} is not a multiple of num_attention_heads {heads}."
        )
    head_dim, kv_heads = config.size("head_dim", width // heads), config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}."
        )
    depth, context = config.size("num_hidden_layers"), config.size("max_position_embeddings", 2048)
    norm = RMSNorm(config.take("rms_norm_eps", float, 1e-6))
    position = rotary(config, head_dim, context)
    masks, rotated = _masks(config, depth), _rotated_layers(config, depth)
    attention_bias = config.take("attention_bias", bool, False)
    scale = config.take("attention_multiplier", float, None)
    feed_forward = Gated(
        _activation(config), config.size("intermediate_size"), config.take("mlp_bias", bool, False)
    )
    step_scale = config.take("residual_multiplier", float, 1.0)
    layers = tuple(
        pre_norm(
            Attention(
                heads,
                kv_heads,
                head_dim,
                score=Score(scale),
                position=position if rotated[i] else None,
                mask=masks[i],
                projections=Projections(bias="qkvo" if attention_bias else ""),
            ),
            feed_forward,
            norm=norm,
            scale=step_scale,
        )
        for i in range(depth)
    )
    vocab = config.size("vocab_size")
    tied = "tokens" if config.take("tie_word_embeddings", bool, False) else None
    tokens = Tokens(vocab, width, scale=config.take("embedding_multiplier", float, 1.0), shared=tied)
    head = Language(vocab, scale=1 / config.take("logits_scaling", float, 1.0), shared=tied)
    config.finish()
    model = Model(decoder=Stack(tokens, layers, norm), head=head_of(config, head))
    return Description(model, WEIGHTS, context)


def _activation(config: Config) -> str:
    names = {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
    }
    name = config.take("hidden_act", str, "silu")
    if name not in names:
        raise ConfigError(f"{config.where}: hidden_act {name!r} is not known ({', '.join(names)}).")
    return names[name]


def _masks(config: Config, depth: int) -> list[Mask]:
    """A window in every layer, or only in those that `layer_types` calls sliding."""
    window = config.take("sliding_window", int, None)
    if config.take("use_sliding_window", bool, True) is False:
        window = None
    kinds = config.take("layer_types", list, ["sliding_attention"] * depth)
    config.discard("max_window_layers")
    if len(kinds) != depth:
        raise ConfigError(f"{config.where}: layer_types has {len(kinds)} entries for {depth} layers.")
    return [
        Causal() & Window(window) if window and kind == "sliding_attention" else Causal() for kind in kinds
    ]


def _rotated_layers(config: Config, depth: int) -> list[bool]:
    """SmolLM3: `no_rope_layers` holds 1 where a layer rotates (sic), or every n-th layer does not."""
    every = config.take("no_rope_layer_interval", int, None)
    listed = config.take("no_rope_layers", list, None)
    if listed is not None and len(listed) != depth:
        raise ConfigError(f"{config.where}: no_rope_layers has {len(listed)} entries for {depth} layers.")
    if listed is not None:
        return [bool(rotates) for rotates in listed]
    return [every is None or (i + 1) % every != 0 for i in range(depth)]


FAMILY = Family(
    types=("llama", "mistral", "smollm3", "granite"),
    describe=describe,
    irrelevant=("model.layers.*.self_attn.rotary_emb.inv_freq",),
)
