"""Falcon: 7B has one norm and one key/value head, 40B two norms and eight. Almazrouei et al. 2023."""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    context_of,
    depth_of,
    expected,
    promised,
    renamed,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.families.weights import KINDS, Place, Table, fused, layer_names
from qkv.spec import (
    Attention,
    Dense,
    Language,
    Layer,
    LayerNorm,
    Projections,
    Stack,
    Tokens,
    parallel,
    pre_norm,
)


def describe(config: Config) -> Description:
    """From a configuration of model type falcon."""
    _refuse_alibi(config)
    renamed(config, {"n_embed": "hidden_size", "num_kv_heads": "num_key_value_heads"})
    expected(config, apply_residual_connection_post_layernorm=False)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = LayerNorm(config.positive("layer_norm_epsilon", 1e-5))
    new = config.take("new_decoder_architecture", bool, False)
    one = config.take("multi_query", bool, False) and not new
    if one:  # the key beside it is not asked then
        config.put("num_key_value_heads", 1)
    biased = config.take("bias", bool, False)
    if "ffn_hidden_size" in config:
        config.discard("ff_factor")  # what it was made from
    attention = rotary_attention(config, width, context, Projections(bias="qkvo" if biased else ""))
    activation = activation_of(config, "activation", "gelu")
    feed_forward = Dense(activation, config.size("ffn_hidden_size", 4 * width), biased)
    layer = _layer(config, new, attention, feed_forward, norm)
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    # a group's queries, its key, its value; with one key for all, all queries first
    groups = 1 if one else attention.kv_heads
    return found.named(_names(groups), "transformer.")


def _names(groups: int) -> Table:
    parts: dict[str, str | Place] = {
        "attention_before": "input_layernorm",
        "attention_norm": "ln_attn",
        "feed_forward_before": "post_attention_layernorm",
        "feed_forward_norm": "ln_mlp",
        **fused(
            "self_attention.query_key_value",
            *("attention.query", "attention.key", "attention.value"),
            groups=groups,
        ),
        "attention.output": "self_attention.dense",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    return {
        "decoder.embedding.weight": "transformer.word_embeddings.weight",
        **layer_names("transformer.h.{layer}", parts),
        **{f"decoder.norm.{kind}": f"transformer.ln_f.{kind}" for kind in KINDS},
        "head.weight": "lm_head.weight",
        **{f"head.output.{kind}": f"score.{kind}" for kind in KINDS},
    }


def _layer(config: Config, new: bool, attention: Attention, feed_forward: Dense, norm: LayerNorm) -> Layer:
    """Side by side with one norm or two, or one after the other; the newer kind is always side by side."""
    norms = config.size("num_ln_in_parallel_attn", 2 if new else 1, most=2)
    if config.take("parallel_attn", bool, False) or new:
        return parallel(attention, feed_forward, norm=norm, norms=norms)
    return pre_norm(attention, feed_forward, norm=norm)


def _refuse_alibi(config: Config) -> None:
    """Falcon-RW. Its bias is slope * position rounded to bfloat16, and scaled by 1 / sqrt(head_dim)
    together with the scores: neither the rounding nor the scale is that of `Alibi`."""
    if config.take("alibi", bool, False):
        raise ConfigError(
            f"{config.at('alibi')} is True; Falcon's own ALiBi, rounded to bfloat16 and scaled with the "
            "scores, cannot be described yet; only files where it is false can."
        )


FAMILY = Family(
    types=("falcon",),
    describe=describe,
    # a null in their place counts as false
    defaults={"falcon": {"multi_query": True, "parallel_attn": True, "tie_word_embeddings": True}},
)
