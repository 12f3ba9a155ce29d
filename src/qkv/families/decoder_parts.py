"""What the families of plain decoders have in common: keys that mean the same in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.family import Description
from qkv.families.heads import decoder_head, labels
from qkv.families.positions import MOST_POSITIONS, rotary
from qkv.spec import (
    Attention,
    Causal,
    Language,
    Mask,
    Model,
    Projections,
    Rotary,
    Stack,
    Tokens,
    Window,
    Yarn,
)

MOST_LAYERS = 4096
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# dropouts, how weights were drawn, losses: all of training; and what only generation asks for
TRAINING = (
    "activation_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "cache_implementation",
    "classifier_dropout",
    "emb_pdrop",
    "embedding_dropout",
    "gradient_checkpointing",
    "init_std",
    "layerdrop",
    "output_past",
    "router_aux_loss_coef",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "unk_token_id",
)


def renamed(config: Config, names: Mapping[str, str]) -> None:
    """Gives values the names that other families have for them; `names` is theirs to ours.

    A file may use either. Both at once must agree.
    """
    for theirs, ours in names.items():
        value = config.peek(theirs)
        config.discard(theirs)
        if value is None:
            continue
        if ours in config and config.peek(ours) != value:
            raise ConfigError(
                f"{config.at(theirs)} is {shown(value)} and {ours} is {shown(config.peek(ours))}; "
                "they mean the same and must agree."
            )
        config.put(ours, value)
        config.called = {**config.called, ours: theirs}


def expected(config: Config, **values: object) -> None:
    """Keys that have one value in every file known; with another the model would be a different one."""
    for key, value in values.items():
        found = config.take(key, type(value), value)
        if found != value:
            raise ConfigError(
                f"{config.at(key)} is {shown(found)}; for this kind of model only {shown(value)} is known. "
                f'Pass ignore=("{key}",) to load without it.'
            )


def depth_of(config: Config) -> int:
    depth: int = config.size("num_hidden_layers", most=MOST_LAYERS)
    return depth


def context_of(config: Config, default: int | None) -> int:
    context: int = config.size("max_position_embeddings", default, most=MOST_POSITIONS)
    return context


def head_sizes(config: Config, width: int) -> tuple[int, int, int]:
    """Heads, key/value heads (as many where nothing is said), and the size of one."""
    heads = config.size("num_attention_heads")
    if "head_dim" not in config and width % heads:
        raise ConfigError(
            f"{config.at('hidden_size')} {width:,} is no multiple of "
            f"{config.called.get('num_attention_heads', 'num_attention_heads')} {heads:,}."
        )
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{config.at('num_attention_heads')} {heads:,} is no multiple of "
            f"{config.called.get('num_key_value_heads', 'num_key_value_heads')} {kv_heads:,}."
        )
    return heads, kv_heads, config.size("head_dim", width // heads)


def activation_of(config: Config, key: str, default: str) -> str:
    activation: str = config.choice(key, ACTIVATIONS, default)
    return activation


def mask_of(config: Config) -> Mask:
    """A window in every layer where `sliding_window` is given."""
    window = config.size("sliding_window", None, most=MOST_POSITIONS)
    return Causal() if window is None else Causal() & Window(window)


def biases(config: Config, key: str, default: bool, which: str = "qkvo") -> str:
    """Which projections have a bias, if `key` says that they do."""
    return which if config.take(key, bool, default) else ""


def rotary_attention(
    config: Config, width: int, context: int, projections: Projections, mask: Mask = Causal()
) -> Attention:
    heads, kv_heads, head_dim = head_sizes(config, width)
    position = rotary(config, head_dim, context)
    return Attention(heads, kv_heads, head_dim, position=position, mask=mask, projections=projections)


def interleaved(attention: Attention) -> Attention:
    """The same, turning neighbouring dimensions together instead of the two halves."""
    position = attention.position
    if not isinstance(position, Rotary):
        return attention
    return replace(attention, position=replace(position, pairs="interleaved"))


def promised(attention: Attention, context: int) -> int:
    """Positions the files promise. Only YaRN multiplies a length; other scalings come with the longer one."""
    position = attention.position
    if isinstance(position, Rotary) and isinstance(position.scaling, Yarn):
        longer = min(position.scaling.original * position.scaling.factor, MOST_POSITIONS)
        return max(context, round(longer))
    return context


def assembled(config: Config, stack: Stack, language: Language, context: int | None) -> Description:
    """The whole, its head tied to the token table where the file says so, and no key left over."""
    if config.take("tie_word_embeddings", bool, False) and isinstance(stack.input, Tokens):
        stack = replace(stack, input=replace(stack.input, shared="tokens"))
        language = replace(language, shared="tokens")
    head = decoder_head(config, language)
    labels(config)  # also where no head asks for them
    config.discard(*TRAINING)
    config.finish()
    return Description(Model(decoder=stack, head=head), weights={}, context=context)
