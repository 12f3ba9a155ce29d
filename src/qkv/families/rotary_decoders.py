"""What decoders with rotary positions read from a configuration in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.decoder_parts import (
    TRAINING,
    activation_of,
    biases,
    depth_of,
    head_sizes,
    rotary_attention,
)
from qkv.families.family import Description
from qkv.families.heads import decoder_head, labels
from qkv.families.llama import LAYER_TYPES
from qkv.families.positions import MOST_POSITIONS
from qkv.spec import (
    Attention,
    Causal,
    Experts,
    Gated,
    Language,
    Layer,
    Mask,
    Model,
    Norm,
    Position,
    Projections,
    Rotary,
    Router,
    Stack,
    Tokens,
    Window,
    Yarn,
)
from qkv.spec.heads import Head


class Sizes(NamedTuple):
    """Of the stream, the vocabulary and the stack; `context` is max_position_embeddings."""

    width: int
    vocab: int
    depth: int
    context: int


def sizes(config: Config) -> Sizes:
    return Sizes(
        config.size("hidden_size"),
        config.size("vocab_size"),
        depth_of(config),
        config.size("max_position_embeddings", most=MOST_POSITIONS),
    )


def attention(config: Config, size: Sizes, bias: str = "", position: Position | None = None) -> Attention:
    """Grouped heads whose queries and keys rotate, seeing everything before them.

    How they rotate is in the file under the usual keys, or was read to be `position`.
    """
    if position is None:
        return rotary_attention(config, size.width, size.context, Projections(bias))
    heads, kv_heads, head_dim = head_sizes(config, size.width)
    return Attention(heads, kv_heads, head_dim, position=position, projections=Projections(bias))


def optional_bias(config: Config) -> str:
    return biases(config, "attention_bias", False)


def extended(config: Config, size: Sizes, position: Position | None) -> Sizes:
    """With the positions the files promise as context: YaRN multiplies the length it started from.

    max_position_embeddings may be that length (Qwen) or the product (DeepSeek, gpt-oss); other
    scalings are in it already.
    """
    scaling = position.scaling if isinstance(position, Rotary) else None
    if not isinstance(scaling, Yarn):
        return size
    reach = scaling.original * scaling.factor
    if reach > MOST_POSITIONS:
        raise ConfigError(
            f"{config.where}: YaRN's factor {scaling.factor:g} gives more positions than can be counted."
        )
    return size._replace(context=max(size.context, int(reach)))


def masks(config: Config, window: int | None, context: int, slides: Sequence[bool]) -> list[Mask]:
    """A window in the layers that `layer_types` calls sliding; where it is absent, in those of `slides`.

    A window as long as the context hides nothing and is left out.
    """
    slides = config.each("layer_types", LAYER_TYPES, len(slides), "layers") or slides
    if window is None and any(slides):
        raise ConfigError(f"{config.at('sliding_window')} gives no window, and some layers call for one.")
    local = Causal() & Window(window) if window is not None and window < context else Causal()
    return [local if slide else Causal() for slide in slides]


def gated(config: Config, key: str = "intermediate_size") -> Gated:
    activation = activation_of(config, "hidden_act", "silu")
    return Gated(activation, config.size(key), config.take("mlp_bias", bool, False))


def experts(
    config: Config, count: str, expert: Gated, router: Router, shared: Gated | None = None
) -> Experts:
    """Under `count` is the key of how many there are."""
    many, top_k = config.size(count), config.size("num_experts_per_tok")
    if top_k > many:
        raise ConfigError(
            f"{config.at('num_experts_per_tok')} is {top_k:,}; there are only {many:,} experts ({count})."
        )
    config.discard("router_aux_loss_coef", "router_jitter_noise")  # of training
    return Experts(many, top_k, expert, router, shared)


def mixed_feed_forwards(config: Config, depth: int) -> list[Gated | Experts]:
    """Qwen's: experts in every `decoder_sparse_step`-th layer but for `mlp_only_layers`, if there are any.

    The shared expert, where there is one, has a gate of its own.
    """
    dense = gated(config)
    counts = [key for key in ("num_local_experts", "num_experts") if key in config]
    config.discard(*counts)  # transformers 5 writes the first; the second may then be the class's default
    if not counts:
        return [dense] * depth
    hidden = config.optional("shared_expert_intermediate_size")
    expert = replace(dense, hidden=config.size("moe_intermediate_size"))
    routed = experts(
        config,
        counts[0],
        expert,
        Router(normalise=config.take("norm_topk_prob", bool, False)),
        None if hidden is None else replace(dense, hidden=hidden),
    )
    routed = replace(routed, shared_gate=hidden is not None)
    every, spared = config.size("decoder_sparse_step", 1), config.take("mlp_only_layers", list, [])
    return [dense if i in spared or (i + 1) % every else routed for i in range(depth)]


def head(config: Config, language: Language) -> Head | None:
    """As of every decoder; those that see are called after what they write."""
    name = str((config.take("architectures", list, None) or [""])[0])
    return language if name.endswith("ForConditionalGeneration") else decoder_head(config, language)


def decoder(
    config: Config,
    size: Sizes,
    layers: Iterable[Layer],
    norm: Norm,
    *,
    scale: float = 1.0,
    cap: float | None = None,
    irrelevant: tuple[str, ...] = (),
) -> Description:
    """Tokens, layers, a norm and a head. It reads last: what nobody took by now is an error.

    `scale` is the embedding's, `cap` the logits'.
    """
    tied = "tokens" if config.take("tie_word_embeddings", bool, False) else None
    tokens = Tokens(size.vocab, size.width, scale=scale, shared=tied)
    answer = head(config, Language(size.vocab, cap=cap, shared=tied))
    labels(config)  # also where no head asks for them
    config.discard(*TRAINING)
    config.finish()
    model = Model(decoder=Stack(tokens, tuple(layers), norm), head=answer)
    return Description(model, {}, size.context, irrelevant)
