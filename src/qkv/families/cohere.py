"""Command R and Command R7B: one norm without bias feeds both branches, logits are made smaller.

Cohere 2024. The second has three layers that rotate within a window, then one that sees all and
has no positions.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import REQUIRED, Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    biases,
    context_of,
    depth_of,
    expected,
    interleaved,
    promised,
    rotary_attention,
)
from qkv.families.family import Description, Family
from qkv.families.llama import IRRELEVANT, QUERY_KEY_NORMS, names
from qkv.families.positions import MOST_POSITIONS
from qkv.spec import (
    Attention,
    Causal,
    Gated,
    Language,
    LayerNorm,
    Projections,
    Stack,
    Tokens,
    Window,
    parallel,
)

LAYER_TYPES = {"sliding_attention": True, "full_attention": False}


def describe(config: Config) -> Description:
    """From a configuration of model type cohere or cohere2."""
    _check_fixed(config)
    width, vocab, depth = config.size("hidden_size"), config.size("vocab_size"), depth_of(config)
    length = context_of(config, 8192)
    norm = LayerNorm(config.positive("layer_norm_eps", 1e-5), bias=False)
    projections = Projections(
        bias=biases(config, "attention_bias", False),
        norm=norm if config.take("use_qk_norm", bool, False) else None,
        norm_over="heads",
    )
    attention = interleaved(rotary_attention(config, width, length, projections))
    feed_forward = Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size"))
    layers = tuple(
        parallel(mixer, feed_forward, norm=norm) for mixer in _attentions(config, depth, attention)
    )
    # Command R: the first is kept small for memory's sake, the second is what it was trained for
    context = config.size("model_max_length", promised(attention, length), most=MOST_POSITIONS)
    language = Language(vocab, scale=config.positive("logit_scale", 0.0625))
    found = assembled(config, Stack(Tokens(vocab, width), layers, norm), language, context)
    return found.named(names(QUERY_KEY_NORMS), "model.", IRRELEVANT)


def _attentions(config: Config, depth: int, attention: Attention) -> list[Attention]:
    """Where layers differ: those with a window rotate, the others have no positions."""
    local = config.each("layer_types", LAYER_TYPES, depth, "layers")
    every = config.size("sliding_window_pattern", None)
    config.discard("layer_switch")  # an older name for the same number
    if local is None:
        if every is None:
            return [attention] * depth
        local = [(i + 1) % every != 0 for i in range(depth)]
    window = config.size("sliding_window", REQUIRED if any(local) else None, most=MOST_POSITIONS)
    return [
        replace(attention, mask=Causal() & Window(window)) if slides else replace(attention, position=None)
        for slides in local
    ]


def _check_fixed(config: Config) -> None:
    """What Command R7B's file says of itself, and what its class never asks."""
    expected(
        config,
        order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
        use_gated_activation=True,
        use_parallel_block=True,
    )
    # the first repeats tie_word_embeddings, the second is about devices
    config.discard("use_embedding_sharing", "use_parallel_embedding")


FAMILY = Family(
    types=("cohere", "cohere2"),
    describe=describe,
    defaults={
        "cohere": {"rope_theta": 500_000.0, "tie_word_embeddings": True},
        "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    },
)
