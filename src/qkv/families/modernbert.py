"""ModernBERT: a pre-norm encoder, rotary and gated, most layers with a window. Warner et al. 2024."""

from __future__ import annotations

from typing import Any

from qkv.families.config import Config
from qkv.families.encoders import (
    ACTIVATIONS,
    MOST_LAYERS,
    discard_if,
    discard_training,
    head_size,
    rows,
    tied,
)
from qkv.families.family import Description, Family
from qkv.families.heads import head_among, labels
from qkv.families.positions import rotary
from qkv.families.weights import KINDS, Table, fused
from qkv.spec import (
    Attention,
    Everything,
    Gated,
    Layer,
    LayerNorm,
    MaskedLanguage,
    Model,
    Pool,
    Project,
    Projections,
    Rotary,
    SequenceClass,
    Stack,
    Tokens,
    Window,
    step,
)
from qkv.spec.heads import Head

LAYER_TYPES = {"full_attention": True, "sliding_attention": False}
QKV = ("query", "key", "value")
PARTS = (
    "attention_before",
    *(f"attention.{part}" for part in (*QKV, "output")),
    "feed_forward_before",
    *(f"feed_forward.{part}" for part in ("gate", "up", "down")),
)
BEFORE = ("transform", "pool.dense")  # of the heads' outputs
POOLING = {"cls": "first", "mean": "mean"}
UNREAD = (
    "cls_token_id",
    "deterministic_flash_attn",
    "embedding_dropout",
    "initializer_cutoff_factor",
    "layer_norm_eps",  # beside norm_eps, which is the one that is read
    "mlp_dropout",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_pred_ignore_index",
    "sparse_prediction",  # leaves out logits in training
)


def _names() -> Table:
    theirs = "model.layers.{layer}"
    found: Table = {
        "encoder.embedding.weight": "model.embeddings.tok_embeddings.weight",
        "head.weight": "decoder.weight",
        "head.bias": "decoder.bias",
    }
    for kind in KINDS:
        ours = {part: f"encoder.layers.{{layer}}.{part}.{kind}" for part in PARTS}
        found = {
            **found,
            f"encoder.embedding.norm.{kind}": f"model.embeddings.norm.{kind}",
            f"encoder.norm.{kind}": f"model.final_norm.{kind}",
            ours["attention_before"]: f"{theirs}.attn_norm.{kind}",
            ours["feed_forward_before"]: f"{theirs}.mlp_norm.{kind}",
            **fused(f"{theirs}.attn.Wqkv.{kind}", *(ours[f"attention.{part}"] for part in QKV)),
            ours["attention.output"]: f"{theirs}.attn.Wo.{kind}",
            **fused(f"{theirs}.mlp.Wi.{kind}", ours["feed_forward.gate"], ours["feed_forward.up"]),
            ours["feed_forward.down"]: f"{theirs}.mlp.Wo.{kind}",
            **{f"head.{part}.linear.{kind}": f"head.dense.{kind}" for part in BEFORE},
            **{f"head.{part}.norm.{kind}": f"head.norm.{kind}" for part in BEFORE},
            f"head.output.{kind}": f"classifier.{kind}",
        }
    return found


def describe(config: Config) -> Description:
    """From a configuration of model type modernbert."""
    discard_training(config)
    discard_if(config, {"position_embedding_type": "absolute"})
    config.discard(*UNREAD)
    width, context = config.size("hidden_size"), rows(config, 8192)
    norm = LayerNorm(config.positive("norm_eps", 1e-5), bias=config.take("norm_bias", bool, False))
    tokens = Tokens(config.size("vocab_size"), width, norm=norm, shared=tied(config))
    layers = _layers(config, width, context, norm)
    head = _head(config, tokens, norm)
    config.finish()
    found = Description(Model(encoder=Stack(tokens, layers, norm), head=head), {}, context)
    return found.named(_names(), "model.")


def _layers(config: Config, width: int, context: int, norm: LayerNorm) -> tuple[Layer, ...]:
    heads, bias = config.size("num_attention_heads"), config.take("attention_bias", bool, False)
    head_dim = head_size(config, width, heads)
    half = config.size("local_attention", 128) // 2
    positions = _positions(config, head_dim, context)
    gated = Gated(
        config.choice("hidden_activation", ACTIVATIONS, "gelu"),
        config.size("intermediate_size"),
        config.take("mlp_bias", bool, False),
    )

    def layer(i: int, everywhere: bool) -> Layer:
        attention = Attention(
            heads,
            heads,
            head_dim,
            position=positions[everywhere],
            mask=Everything() if everywhere else Window(half + 1, half),
            projections=Projections(bias="qkvo" if bias else ""),
        )
        # the embedding is normalised already: the first attention has no norm of its own
        return Layer((step(attention, before=norm if i else None), step(gated, before=norm)))

    return tuple(layer(i, everywhere) for i, everywhere in enumerate(_everywhere(config)))


def _everywhere(config: Config) -> list[bool]:
    """By layer, whether it sees everything: `layer_types`, or every n-th from the first."""
    depth = config.size("num_hidden_layers", most=MOST_LAYERS)
    every = config.size("global_attn_every_n_layers", 3)
    listed = config.each("layer_types", LAYER_TYPES, depth, "layers")
    return listed or [i % every == 0 for i in range(depth)]


def _positions(config: Config, head_dim: int, context: int) -> dict[bool, Rotary]:
    """`rope_parameters` holds an object for each kind of layer; older files have two thetas."""
    everywhere = config.positive("global_rope_theta", 160_000.0)
    local = config.positive("local_rope_theta", None) or everywhere  # null: the same in all layers
    scaling = config.take("rope_scaling", dict, None)
    nested = config.inside("rope_parameters")
    found = {}
    for kind, theta in (("full_attention", everywhere), ("sliding_attention", local)):
        values: dict[str, Any] = {"rope_theta": theta}
        if nested is not None:
            values["rope_parameters"] = nested.take(kind, dict, None)
        if scaling is not None:
            values["rope_scaling"] = scaling
        called = {"rope_parameters": f"rope_parameters.{kind}"}
        one = config.again(values, called=called, made=("rope_theta",))
        found[LAYER_TYPES[kind]] = rotary(one, head_dim, context)
    if nested is not None:
        nested.finish()
    return found


def _head(config: Config, tokens: Tokens, norm: LayerNorm) -> Head | None:
    """One more layer before each answer; those for every token have it only over a vocabulary here."""
    transform = Project(
        tokens.width,
        bias=config.take("classifier_bias", bool, False),
        activation=config.choice("classifier_activation", ACTIVATIONS, "gelu"),
        norm=norm,
    )
    bias = config.take("decoder_bias", bool, True)
    how = config.choice("classifier_pooling", POOLING, "cls")
    pool, classes = Pool(how, transform), labels(config)
    return head_among(
        config,
        {
            "Model": None,
            "ForMaskedLM": MaskedLanguage(tokens.vocab, bias=bias, transform=transform, shared=tokens.shared),
            "ForSequenceClassification": SequenceClass(classes, pool),
            "ForMultipleChoice": SequenceClass(1, pool),
        },
    )


FAMILY = Family(
    types=("modernbert",),
    describe=describe,
    defaults={"modernbert": {"local_rope_theta": 10_000.0}},
)
