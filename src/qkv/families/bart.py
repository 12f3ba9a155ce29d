"""BART and its kin: an encoder and a decoder with a bias on everything. Lewis et al. 2019.

mBART (Liu et al. 2020) and Pegasus (Zhang et al. 2020) put norms in front; Marian (Junczys-Dowmunt
et al. 2018) and Pegasus have sinusoids. The first files say so in keys, which the later classes
know by themselves: these keys are the defaults of each type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import (
    ACTIVATIONS,
    BIASED,
    MOST_LAYERS,
    discard_training,
    head_size,
    rows,
)
from qkv.families.family import Description, Family
from qkv.families.heads import head_among, labels
from qkv.families.weights import KINDS, Place, Table, layer_names
from qkv.spec import (
    Attention,
    Causal,
    CrossAttention,
    Dense,
    Everything,
    Language,
    Layer,
    LayerNorm,
    Learned,
    Model,
    Pool,
    Position,
    Project,
    SequenceClass,
    Sinusoidal,
    Span,
    Stack,
    Tokens,
    post_norm,
    pre_norm,
)

OFFSET = 2  # rows in front of position 0 that nothing reads
UNREAD = (
    "add_bias_logits",  # the class always adds them
    "extra_pos_embeddings",  # OFFSET, in the first files
    "force_bos_token_to_be_generated",  # of generation
    "hidden_size",  # the names of others for d_model, encoder_layers and encoder_attention_heads
    "num_attention_heads",
    "num_hidden_layers",
    "gradient_checkpointing",
    "save_step",
    "student_decoder_layers",  # how a distilled file was made
    "student_encoder_layers",
)
NORM = LayerNorm(1e-5)

SHARED = "model.shared.weight"
PARTS = {
    **dict.fromkeys(("attention_before", "attention_post"), "self_attn_layer_norm"),
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    **dict.fromkeys(("cross_before", "cross_post"), "encoder_attn_layer_norm"),
    "cross.query": "encoder_attn.q_proj",
    "cross.key": "encoder_attn.k_proj",
    "cross.value": "encoder_attn.v_proj",
    "cross.output": "encoder_attn.out_proj",
    **dict.fromkeys(("feed_forward_before", "feed_forward_post"), "final_layer_norm"),
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
}
# sinusoids, which are computed, and a bias that only Marian's training moved from zero
UNUSED = ("model.*coder.embed_positions.weight", "final_logits_bias")


def describe(config: Config) -> Description:
    """From a configuration of model type bart, mbart, pegasus or marian."""
    discard_training(config)
    width, context = config.size("d_model"), rows(config, 1024)
    tokens, targets = _tables(config, width, _position(config, context))
    activation = config.choice("activation_function", ACTIVATIONS, "gelu")
    first = config.take("normalize_before", bool, False)
    last = NORM if config.take("add_final_layer_norm", bool, False) else None
    around, before = (_Side.read(config, name, width, first) for name in ("encoder", "decoder"))
    model = Model(
        encoder=Stack(tokens, around.layers(activation, None), last),
        decoder=Stack(targets, before.layers(activation, width), last),
    )
    # `final_logits_bias`: only Marian's was trained, elsewhere it is zero
    tied = targets.shared if config.take("tie_word_embeddings", bool, True) else None
    language = Language(targets.vocab, bias=config.take("trained_logits_bias", bool, False), shared=tied)
    pool = Pool("last", Project(width, activation="tanh"))
    head = head_among(
        config,
        {
            "Model": None,
            "ForConditionalGeneration": language,
            "MTModel": language,
            "ForSequenceClassification": SequenceClass(labels(config, 3), pool),
            "ForQuestionAnswering": Span(),
        },
        "ForConditionalGeneration",
    )
    config.discard(*UNREAD)
    config.finish()
    found = Description(Model(model.encoder, model.decoder, head), {}, context)
    copies = {} if tokens.shared is None else {"model.encoder.embed_tokens.weight": SHARED}
    return found.named(_names(tokens.shared is not None, targets.vocab), "model.", UNUSED, copies)


def _names(one_table: bool, vocab: int) -> Table:
    found: dict[str, str | Place] = {
        "encoder.embedding.weight": SHARED if one_table else "model.encoder.embed_tokens.weight",
        "decoder.embedding.weight": "model.decoder.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "head.bias": Place("final_logits_bias", shape=(1, vocab)),
    }
    for stack in ("encoder", "decoder"):
        found |= layer_names(f"model.{stack}.layers.{{layer}}", PARTS, stack)
        found[f"{stack}.embedding.position.weight"] = f"model.{stack}.embed_positions.weight"
        for kind in KINDS:
            found[f"{stack}.embedding.norm.{kind}"] = f"model.{stack}.layernorm_embedding.{kind}"
            found[f"{stack}.norm.{kind}"] = f"model.{stack}.layer_norm.{kind}"
    for kind in KINDS:
        found[f"head.pool.dense.linear.{kind}"] = f"classification_head.dense.{kind}"
        found[f"head.output.{kind}"] = f"classification_head.out_proj.{kind}"
    return found


def _position(config: Config, context: int) -> Position:
    if config.take("static_position_embeddings", bool, False):
        return Sinusoidal(layout="halves")
    return Learned(context + OFFSET, OFFSET)


def _tables(config: Config, width: int, position: Position) -> tuple[Tokens, Tokens]:
    """One table for both sides, or one each of their own vocabularies (Marian may)."""
    vocab = config.size("vocab_size")
    second = config.size("decoder_vocab_size", vocab)
    one = config.take("share_encoder_decoder_embeddings", bool, True)
    scale = math.sqrt(width) if config.take("scale_embedding", bool, False) else 1.0
    norm = NORM if config.take("normalize_embedding", bool, True) else None
    if one and second != vocab:
        raise ConfigError(
            f"{config.at('decoder_vocab_size')} is {second:,} and vocab_size {vocab:,}; "
            "with one table for both sides they must be the same."
        )
    return (
        Tokens(vocab, width, scale, position, norm=norm, shared="tokens" if one else None),
        Tokens(second, width, scale, position, norm=norm, shared="tokens" if one else "targets"),
    )


@dataclass(frozen=True)
class _Side:
    """One of the two stacks."""

    depth: int
    heads: int
    head_dim: int
    hidden: int
    norm_first: bool

    @classmethod
    def read(cls, config: Config, name: str, width: int, norm_first: bool) -> _Side:
        heads = config.size(f"{name}_attention_heads")
        return cls(
            depth=config.size(f"{name}_layers", most=MOST_LAYERS),
            heads=heads,
            head_dim=head_size(config, width, heads),
            hidden=config.size(f"{name}_ffn_dim"),
            norm_first=norm_first,
        )

    def layers(self, activation: str, source_width: int | None) -> tuple[Layer, ...]:
        """With a width to read from: a decoder's."""
        sizes = (self.heads, self.heads, self.head_dim)
        arranged = pre_norm if self.norm_first else post_norm
        feed_forward = Dense(activation, self.hidden)
        if source_width is None:
            around = Attention(*sizes, mask=Everything(), projections=BIASED)
            return (arranged(around, feed_forward, norm=NORM),) * self.depth
        before = Attention(*sizes, mask=Causal(), projections=BIASED)
        cross = CrossAttention(*sizes, source_width=source_width, projections=BIASED)
        return (arranged(before, cross, feed_forward, norm=NORM),) * self.depth


FAMILY = Family(
    types=("bart", "mbart", "pegasus", "marian"),
    describe=describe,
    defaults={
        "mbart": {"normalize_before": True, "add_final_layer_norm": True},
        "pegasus": {
            "normalize_before": True,
            "add_final_layer_norm": True,
            "normalize_embedding": False,
            "static_position_embeddings": True,
        },
        "marian": {
            "normalize_embedding": False,
            "static_position_embeddings": True,
            "trained_logits_bias": True,
        },
    },
)
