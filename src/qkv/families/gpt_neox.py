"""GPT-NeoX and Pythia: both branches read the same stream, each through its own norm. Black et al. 2022."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    biases,
    context_of,
    depth_of,
    promised,
    renamed,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.families.weights import KINDS, Place, Table, fused, layer_names
from qkv.spec import Dense, Language, LayerNorm, Projections, Stack, Tokens, parallel, pre_norm

# older files keep the causal mask and the frequencies
UNUSED = ("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq")


def describe(config: Config) -> Description:
    """From a configuration of model type gpt_neox."""
    renamed(config, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})
    if "partial_rotary_factor" not in config:
        config.put("partial_rotary_factor", 0.25)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = LayerNorm(config.positive("layer_norm_eps", 1e-5))
    through = Projections(bias=biases(config, "attention_bias", True))
    attention = rotary_attention(config, width, context, through)
    feed_forward = Dense(activation_of(config, "hidden_act", "gelu"), config.size("intermediate_size"))
    if config.take("use_parallel_residual", bool, True):
        layer = parallel(attention, feed_forward, norm=norm, norms=2)
    else:
        layer = pre_norm(attention, feed_forward, norm=norm)
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(_names(attention.heads), "gpt_neox.", UNUSED)


def _names(heads: int) -> Table:
    parts: dict[str, str | Place] = {
        # side by side, or one after the other
        **dict.fromkeys(("attention_norm", "attention_before"), "input_layernorm"),
        **dict.fromkeys(("feed_forward_norm", "feed_forward_before"), "post_attention_layernorm"),
        **fused(
            "attention.query_key_value",
            *("attention.query", "attention.key", "attention.value"),
            groups=heads,
        ),
        "attention.output": "attention.dense",
        "feed_forward.up": "mlp.dense_h_to_4h",
        "feed_forward.down": "mlp.dense_4h_to_h",
    }
    return {
        "decoder.embedding.weight": "gpt_neox.embed_in.weight",
        **layer_names("gpt_neox.layers.{layer}", parts),
        **{f"decoder.norm.{kind}": f"gpt_neox.final_layer_norm.{kind}" for kind in KINDS},
        "head.weight": "embed_out.weight",
        **{f"head.output.{kind}": f"score.{kind}" for kind in KINDS},
    }


FAMILY = Family(types=("gpt_neox",), describe=describe)
