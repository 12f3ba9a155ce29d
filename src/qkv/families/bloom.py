"""BLOOM: distances cost score, the embedding is normalised. Le Scao et al. 2022."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import assembled, depth_of, expected, head_sizes, renamed
from qkv.families.family import Description, Family
from qkv.families.positions import MOST_POSITIONS
from qkv.families.weights import KINDS, Place, Table, fused, layer_names
from qkv.spec import Alibi, Attention, Dense, Language, LayerNorm, Projections, Stack, Tokens, pre_norm

NAMES = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
# how its first implementation ran on many devices and in half precision
RUNNING = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
)


def describe(config: Config) -> Description:
    """From a configuration of model type bloom. Its context is the trained length, where a file says it."""
    renamed(config, NAMES)
    expected(config, apply_residual_connection_post_layernorm=False)
    config.discard(*RUNNING)
    width, vocab = config.size("hidden_size"), config.size("vocab_size")
    context = config.size("seq_length", None, most=MOST_POSITIONS)
    norm = LayerNorm(config.positive("layer_norm_epsilon", 1e-5))
    sizes = head_sizes(config, width)
    layer = pre_norm(
        Attention(*sizes, position=Alibi(), projections=Projections(bias="qkvo")),
        Dense("gelu_tanh", 4 * width),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width, norm=norm), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), context)
    return found.named(_names(sizes[0]), "transformer.")


def _names(heads: int) -> Table:
    parts: dict[str, str | Place] = {
        "attention_before": "input_layernorm",
        # each head's three in turn
        **fused(
            "self_attention.query_key_value",
            *("attention.query", "attention.key", "attention.value"),
            groups=heads,
        ),
        "attention.output": "self_attention.dense",
        "feed_forward_before": "post_attention_layernorm",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    return {
        "decoder.embedding.weight": "transformer.word_embeddings.weight",
        **{
            f"decoder.embedding.norm.{kind}": f"transformer.word_embeddings_layernorm.{kind}"
            for kind in KINDS
        },
        **layer_names("transformer.h.{layer}", parts),
        **{f"decoder.norm.{kind}": f"transformer.ln_f.{kind}" for kind in KINDS},
        "head.weight": "lm_head.weight",
        **{f"head.output.{kind}": f"score.{kind}" for kind in KINDS},
    }


FAMILY = Family(types=("bloom",), describe=describe, defaults={"bloom": {"tie_word_embeddings": True}})
