"""OLMoE: sixty-four small experts of which a token takes eight, weighed as the softmax over all has them.

Muennighoff et al. 2024.
"""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
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
from qkv.families.llama import EXPERTS, QUERY_KEY_NORMS, names
from qkv.spec import Experts, Gated, Language, Projections, RMSNorm, Router, Stack, Tokens, pre_norm


def describe(config: Config) -> Description:
    """From a configuration of model type olmoe."""
    renamed(config, {"num_local_experts": "num_experts"})
    _refuse_clip(config)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 4096)
    norm = RMSNorm(config.positive("rms_norm_eps", 1e-5))
    through = Projections(bias=biases(config, "attention_bias", False), norm=norm, norm_over="all")
    attention = rotary_attention(config, width, context, through)
    layer = pre_norm(attention, _experts(config), norm=norm)
    stack = Stack(Tokens(vocab, width), (layer,) * depth_of(config), norm)
    found = assembled(config, stack, Language(vocab), promised(attention, context))
    return found.named(names({**QUERY_KEY_NORMS, **EXPERTS}), "model.")


def _experts(config: Config) -> Experts:
    count = config.size("num_experts", 64)
    top_k = config.size("num_experts_per_tok", 8, most=count)
    expert = Gated(activation_of(config, "hidden_act", "silu"), config.size("intermediate_size"))
    return Experts(count, top_k, expert, Router(normalise=config.take("norm_topk_prob", bool, False)))


def _refuse_clip(config: Config) -> None:
    """Here the clip follows the norm on queries and keys; that of `Projections` comes before it."""
    clip = config.take("clip_qkv", float, None)
    if clip is not None:
        raise ConfigError(
            f"{config.at('clip_qkv')} is {shown(clip)}; clipping behind the norm of queries and keys cannot "
            'be described yet, so it must be null. Pass ignore=("clip_qkv",) to load without it.'
        )


FAMILY = Family(types=("olmoe",), describe=describe)
