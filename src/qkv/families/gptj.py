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
from qkv.families.gpt2 import NAMES
from qkv.families.positions import rotary
from qkv.spec import Attention, Dense, Language, LayerNorm, Stack, Tokens, parallel


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
    return assembled(config, stack, Language(vocab, bias=True), context)


FAMILY = Family(types=("gptj",), describe=describe, defaults={"gptj": {"rotary_dim": 64}})
