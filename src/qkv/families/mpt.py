"""MPT: ALiBi, and not one bias anywhere. MosaicML 2023."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import assembled, depth_of, expected, head_sizes, renamed
from qkv.families.family import Description, Family
from qkv.families.positions import MOST_POSITIONS
from qkv.families.weights import Place, fused, layer_names
from qkv.spec import Alibi, Attention, Dense, Language, LayerNorm, Projections, Score, Stack, Tokens, pre_norm

NAMES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
NORMS = {"low_precision_layernorm": LayerNorm, "layernorm": LayerNorm}  # a precision, not another norm

PARTS: dict[str, str | Place] = {
    "attention_before": "norm_1",
    **fused("attn.Wqkv", "attention.query", "attention.key", "attention.value"),
    "attention.output": "attn.out_proj",
    "feed_forward_before": "norm_2",
    "feed_forward.up": "ffn.up_proj",
    "feed_forward.down": "ffn.down_proj",
}
WEIGHTS = {
    "decoder.embedding.weight": "transformer.wte.weight",
    **layer_names("transformer.blocks.{layer}", PARTS),
    "decoder.norm.weight": "transformer.norm_f.weight",
    "head.weight": "lm_head.weight",
    "head.output.weight": "score.weight",
}


def describe(config: Config) -> Description:
    """From a configuration of model type mpt. Its context is the trained length, not a limit."""
    renamed(config, NAMES)
    expected(config, no_bias=True)
    width, vocab = config.size("hidden_size"), config.size("vocab_size")
    context = config.size("max_seq_len", 2048, most=MOST_POSITIONS)
    kind = config.choice("norm_type", NORMS, "low_precision_layernorm")
    norm = kind(config.positive("layer_norm_epsilon", 1e-5), bias=False)
    hidden = config.size("expansion_ratio", 4, most=1024) * width
    layer = pre_norm(_attention(config, width), Dense("gelu", hidden, bias=False), norm=norm)
    # there is no table of positions beside ALiBi; the fraction is of gradients
    config.discard("learned_pos_emb", "embedding_fraction")
    config.discard("init_config", "init_device", "verbose", "tokenizer_name")
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    return assembled(config, stack, Language(vocab), context).named(WEIGHTS, "transformer.")


def _attention(config: Config, width: int) -> Attention:
    inner = config.inside("attn_config") or Config({}, config.at("attn_config"))
    expected(
        inner,
        alibi=True,
        attn_type="multihead_attention",
        attn_uses_sequence_id=False,
        prefix_lm=False,
        qk_ln=False,
    )
    inner.discard("attn_pdrop", "attn_impl")
    attention = Attention(
        *head_sizes(config, width),
        score=Score(inner.positive("softmax_scale", None)),
        # the authors' code follows this key; transformers 5.24 takes 8 whatever it says
        position=Alibi(inner.positive("alibi_bias_max", 8.0)),
        projections=Projections(clip=inner.positive("clip_qkv", None)),
    )
    inner.finish()
    return attention


FAMILY = Family(types=("mpt",), describe=describe, defaults={"mpt": {"tie_word_embeddings": True}})
