"""DeBERTa v2 and v3: contents and distances scored apart. He et al. 2020, 2021.

Not known: the convolution beside the first layer (v2 xlarge and larger) and distances through
projections of their own, as v1 has them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from qkv.errors import ConfigError
from qkv.families.bert import LAYERS, OLDER
from qkv.families.config import Config, shown
from qkv.families.encoders import (
    ACTIVATIONS,
    Shape,
    around,
    discard_if,
    masked_bias,
    masked_language,
    pooler,
    rows,
    shape,
    tied,
    types,
)
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, head_among
from qkv.families.weights import KINDS, Place, Table, layer_names
from qkv.spec import (
    Attention,
    Dense,
    Disentangled,
    Learned,
    Model,
    RelativeTable,
    Score,
    Stack,
    Tokens,
    post_norm,
)

Term = Literal["content_to_position", "position_to_content"]
TERMS: dict[str, Term] = {"c2p": "content_to_position", "p2c": "position_to_content"}
OFF = {"conv_kernel_size": 0, "z_steps": 0}

SELF = {f"attention.{part}": f"attention.self.{part}_proj" for part in ("query", "key", "value")}
COPIES = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
# the numbers of positions, the heads of v3's training, and a bias that is not added
UNUSED = (
    "*embeddings.position_ids",
    "lm_predictions.*",
    "mask_predictions.*",
    "cls.predictions.bias",
)


def describe(config: Config) -> Description:
    """From a configuration of model type deberta-v2, which v3 has as well."""
    size, context = shape(config, eps=1e-7), rows(config)
    first = config.take("legacy", bool, True)  # whether the masked head is the first code's
    tokens = _tokens(config, size, context, one_table=not first)
    layer = post_norm(_attention(config, size, context), Dense(size.activation, size.hidden), norm=size.norm)
    pool = pooler(
        config.size("pooler_hidden_size", size.width),
        config.choice("pooler_hidden_act", ACTIVATIONS, "gelu"),
    )
    head = head_among(
        config,
        {
            "Model": None,
            "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
            **classifiers(config, pool),
        },
    )
    discard_if(config, OFF)
    config.discard("pooler_dropout", "cls_dropout")
    config.finish()
    found = Description(Model(encoder=Stack(tokens, (layer,) * size.depth), head=head), {}, context)
    return found.named(_names(tokens, first), "deberta.", UNUSED, COPIES, OLDER)


def _names(tokens: Tokens, first: bool) -> Table:
    found: dict[str, str | Place] = {
        ours: theirs.replace("bert.", "deberta.", 1) for ours, theirs in LAYERS.items()
    }
    found |= layer_names("deberta.encoder.layer.{layer}", SELF, "encoder")
    table, masked = "encoder.layers.{layer}.attention.position.table", "lm_predictions.lm_head"
    if first:
        masked = "cls.predictions.transform"
    found[f"{table}.weight"] = "deberta.encoder.rel_embeddings.weight"
    found["encoder.embedding.widen.weight"] = "deberta.embeddings.embed_proj.weight"
    found["head.weight"] = "cls.predictions.decoder.weight"
    found["head.bias"] = masked_bias("cls.predictions", tokens) if first else f"{masked}.bias"
    for kind in KINDS:
        found[f"{table}.norm.{kind}"] = f"deberta.encoder.LayerNorm.{kind}"
        found[f"head.transform.linear.{kind}"] = f"{masked}.dense.{kind}"
        found[f"head.transform.norm.{kind}"] = f"{masked}.LayerNorm.{kind}"
        found[f"head.pool.dense.linear.{kind}"] = f"pooler.dense.{kind}"
        found[f"head.output.{kind}"] = f"classifier.{kind}"
    return found


def _tokens(config: Config, size: Shape, context: int, one_table: bool) -> Tokens:
    """`one_table`: the head has none of its own, whatever is said of tying."""
    table = config.size("embedding_size", size.width)
    position = Learned(context) if config.take("position_biased_input", bool, True) else None
    kinds = types(config, 0)
    if table != size.width and (position or kinds):
        raise ConfigError(
            f"{config.at('embedding_size')} is {table:,} and hidden_size {size.width:,}; with positions "
            "or types added to the tokens both must be the same."
        )
    return Tokens(
        config.size("vocab_size"),
        size.width,
        position=position,
        types=kinds,
        norm=size.norm,
        table_width=table if table != size.width else None,
        shared=tied(config) or ("tokens" if one_table else None),
    )


def _attention(config: Config, size: Shape, context: int) -> Attention:
    """The three kinds of score are summed, and scaled by the number there are."""
    plain = around(config, size)
    terms = _terms(config)
    scale = (plain.head_dim * (1 + len(terms))) ** -0.5
    most = config.take("max_relative_positions", int, -1)
    most = context if most < 1 else most
    buckets = config.take("position_buckets", int, -1)
    norms = [name.strip() for name in config.take("norm_rel_ebd", str, "none").lower().split("|")]
    own = not config.take("share_att_key", bool, False)
    if not config.take("relative_attention", bool, False):
        return replace(plain, score=Score(scale))
    if own and terms:
        raise ConfigError(
            f"{config.at('share_att_key')} is not true: distances through projections of their own "
            "are not known for this kind of model."
        )
    if not set(norms) <= {"none", "layer_norm"}:
        raise ConfigError(f"{config.at('norm_rel_ebd')} is not known (none, layer_norm).")
    table = RelativeTable(
        2 * (buckets if buckets > 0 else most),
        norm=size.norm if "layer_norm" in norms else None,
        shared="distances",
    )
    position = Disentangled(table, terms, max_distance=most, buckets=buckets if buckets > 0 else None)
    return replace(plain, score=Score(scale), position=position)


def _terms(config: Config) -> tuple[Term, ...]:
    """A list, or a text with bars between."""
    given = config.take("pos_att_type", (list, str), None) or []
    names = [name.strip() for name in given.lower().split("|")] if isinstance(given, str) else given
    for name in names:
        if not isinstance(name, str) or name not in TERMS:
            raise ConfigError(
                f"{config.at('pos_att_type')} holds {shown(name)}, which is not known ({', '.join(TERMS)})."
            )
    return tuple(term for name, term in TERMS.items() if name in names)


FAMILY = Family(types=("deberta-v2",), describe=describe)
