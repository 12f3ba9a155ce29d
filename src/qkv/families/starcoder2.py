"""StarCoder2: grouped heads and a window, with GPT-2's norms, biases, feed-forward. Lozhkov et al. 2024."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    context_of,
    depth_of,
    expected,
    mask_of,
    promised,
    rotary_attention,
)
from qkv.families.encoders import discard_if
from qkv.families.family import Description, Family
from qkv.families.llama import IRRELEVANT, names
from qkv.spec import Dense, Language, LayerNorm, Projections, Stack, Tokens, pre_norm

PARTS = {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}


def describe(config: Config) -> Description:
    """From a configuration of model type starcoder2."""
    expected(config, mlp_type="default", norm_type="layer_norm")
    config.discard("activation_function", "layer_norm_epsilon")  # hidden_act and norm_epsilon are read
    config.discard("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # a precision
    discard_if(config, {"scale_attn_weights": True})
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 4096)
    norm = LayerNorm(config.positive("norm_epsilon", 1e-5))
    biased = config.take("use_bias", bool, True)
    through = Projections(bias="qkvo" if biased else "")
    attention = rotary_attention(config, width, context, through, mask_of(config))
    layer = pre_norm(
        attention,
        Dense(
            activation_of(config, "hidden_act", "gelu_pytorch_tanh"),
            config.size("intermediate_size"),
            biased,
        ),
        norm=norm,
    )
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(names(PARTS), "model.", IRRELEVANT)


FAMILY = Family(
    types=("starcoder2",),
    describe=describe,
    defaults={"starcoder2": {"num_key_value_heads": 2, "tie_word_embeddings": True}},
)
