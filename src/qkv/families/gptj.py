"""GPT-J: one norm feeds both branches, part of a head turns in adjacent pairs. Wang and Komatsuzaki 2021."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    context_of,
    depth_of,
    expected,
    head_sizes,
    renamed,
)
from qkv.families.family import Description, Family
from qkv.families.gpt2 import MASKS, NAMES
from qkv.families.positions import rotary
from qkv.families.weights import KINDS, layer_names
from qkv.spec import Attention, Dense, Language, LayerNorm, Stack, Tokens, parallel

PARTS = {
    "attention_before": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.output": "attn.out_proj",
    "feed_forward.up": "mlp.fc_in",
    "feed_forward.down": "mlp.fc_out",
}
WEIGHTS = {
    "decoder.embedding.weight": "transformer.wte.weight",
    **layer_names("transformer.h.{layer}", PARTS),
    **{f"decoder.norm.{kind}": f"transformer.ln_f.{kind}" for kind in KINDS},
    **{f"head.{kind}": f"lm_head.{kind}" for kind in KINDS},
    **{f"head.output.{kind}": f"score.{kind}" for kind in KINDS},
}


def describe(config: Config) -> Description:
    """From a configuration of model type gptj."""
    renamed(config, NAMES)
    expected(config, rotary=True, scale_attn_weights=True)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    norm = LayerNorm(config.positive("layer_norm_epsilon", 1e-5))
    heads, kv_heads, head_dim = head_sizes(config, width)
    # the base is not the file's to choose: of its keys only this one is about rotation
    turning = {"rotary_dim": config.size("rotary_dim", head_dim), "rope_interleaved": True}
    position = rotary(Config(turning, config.where), head_dim, context)
    layer = parallel(
        Attention(heads, kv_heads, head_dim, position=position),
        Dense(
            activation_of(config, "activation_function", "gelu_new"),
            config.size("n_inner", 4 * width),
        ),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab, bias=True), context)
    return found.named(WEIGHTS, "transformer.", MASKS)


FAMILY = Family(types=("gptj",), describe=describe, defaults={"gptj": {"rotary_dim": 64}})
