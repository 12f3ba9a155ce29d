"""What the encoders after BERT have in common: sizes, the layer, the input, the head of their pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.spec import (
    Attention,
    Dense,
    Everything,
    Layer,
    LayerNorm,
    Learned,
    MaskedLanguage,
    Pool,
    Project,
    Projections,
    Tokens,
    post_norm,
)

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
TRAINING = (  # dropout, initialisation and memory: not in a forward pass
    "activation_dropout",
    "attention_probs_dropout_prob",
    "classif_dropout",
    "classifier_dropout",
    "classifier_dropout_prob",
    "decoder_layerdrop",
    "encoder_layerdrop",
    "gradient_checkpointing",
    "init_std",
    "initializer_factor",
    "layerdrop",
    "output_past",  # whether to keep a cache
)
NEUTRAL = {"position_embedding_type": "absolute"}  # what a position is, where a class once had a choice
MOST_LAYERS = 4096
MOST_POSITIONS = 1 << 24
BIASED = Projections(bias="qkvo")


class Shape(NamedTuple):
    """What the layers of an encoder are made of."""

    width: int
    heads: int
    hidden: int
    depth: int
    activation: str
    norm: LayerNorm


def shape(config: Config, eps: float = 1e-12) -> Shape:
    """Under the names that most encoders use."""
    discard_training(config)
    discard_if(config, NEUTRAL)
    return Shape(
        width=config.size("hidden_size"),
        heads=config.size("num_attention_heads"),
        hidden=config.size("intermediate_size"),
        depth=config.size("num_hidden_layers", most=MOST_LAYERS),
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        norm=LayerNorm(config.positive("layer_norm_eps", eps)),
    )


def discard_training(config: Config) -> None:
    config.discard(*TRAINING)


def discard_if(config: Config, neutral: Mapping[str, Any]) -> None:
    """Keys that say nothing with this value; with any other they stay, to be named."""
    config.discard(*(key for key, value in neutral.items() if config.peek(key) == value))


def refuse_decoder(config: Config) -> None:
    """The same classes can be made causal, and read another stack; no published encoder is."""
    for key in ("is_decoder", "add_cross_attention"):
        if config.take(key, bool, False):
            raise ConfigError(f"{config.at(key)} is true; this kind of model is known as an encoder only.")


def head_size(config: Config, width: int, heads: int) -> int:
    if width % heads:
        raise ConfigError(f"{config.where}: a width of {width:,} is no multiple of {heads:,} heads.")
    return width // heads


def around(config: Config, size: Shape) -> Attention:
    """Attention to both sides with a bias on everything."""
    head_dim = head_size(config, size.width, size.heads)
    return Attention(size.heads, size.heads, head_dim, mask=Everything(), projections=BIASED)


def bert_layer(config: Config, size: Shape) -> Layer:
    return post_norm(around(config, size), Dense(size.activation, size.hidden), norm=size.norm)


def tied(config: Config) -> str | None:
    """The name that a token table and the head over it share."""
    return "tokens" if config.take("tie_word_embeddings", bool, True) else None


def bert_tokens(config: Config, size: Shape, position: Learned) -> Tokens:
    """Tokens, positions and types at the width of the stream, normalised."""
    return Tokens(
        config.size("vocab_size"),
        size.width,
        position=position,
        types=types(config),
        norm=size.norm,
        shared=tied(config),
    )


def types(config: Config, default: int = 2) -> int:
    number = config.take("type_vocab_size", int, default)
    if not 0 <= number <= 1 << 16:
        raise ConfigError(f"{config.at('type_vocab_size')} is {number:,}; it must be from 0 to 65,536.")
    return int(number)


def rows(config: Config, default: int = 512) -> int:
    return int(config.size("max_position_embeddings", default, most=MOST_POSITIONS))


def masked_language(tokens: Tokens, activation: str, norm: LayerNorm) -> MaskedLanguage:
    """One more dense layer at the table's width, then the table itself with a bias."""
    width = tokens.table_width or tokens.width
    transform = Project(width, activation=activation, norm=norm)
    return MaskedLanguage(tokens.vocab, bias=True, transform=transform, shared=tokens.shared)


def masked_bias(theirs: str, tokens: Tokens) -> str:
    """Of a head's two stored biases the one that is added: a head with a table of its own has it there."""
    return f"{theirs}.bias" if tokens.shared else f"{theirs}.decoder.bias"


def pooler(width: int, activation: str = "tanh") -> Pool:
    """The first token through a dense layer."""
    return Pool("first", Project(width, activation=activation))
