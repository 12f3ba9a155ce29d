"""RoBERTa: BERT trained longer. Liu et al. 2019. Its positions begin behind the padding token's row.

XLM-R (Conneau et al. 2019) and CamemBERT (Martin et al. 2019) are the same with other vocabularies.
"""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.bert import LAYERS, OLDER
from qkv.families.config import Config
from qkv.families.encoders import (
    bert_layer,
    bert_tokens,
    masked_language,
    pooler,
    refuse_decoder,
    rows,
    shape,
)
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, ending_among
from qkv.families.weights import KINDS, Place, Table
from qkv.spec import Learned, Model, Stack
from qkv.spec.heads import Head

COPIES = {"lm_head.decoder.bias": "lm_head.bias"}
UNUSED = ("*embeddings.position_ids", "roberta.pooler.*")


def describe(config: Config) -> Description:
    """From a configuration of model type roberta, xlm-roberta or camembert."""
    refuse_decoder(config)
    size, table = shape(config), rows(config)
    offset = config.take("pad_token_id", int, 1) + 1  # position 0 is the row after padding's
    if not 0 <= offset < table:
        raise ConfigError(
            f"{config.at('pad_token_id')} is {offset - 1:,}, and positions begin behind that row "
            f"of a table of {table:,}."
        )
    tokens = bert_tokens(config, size, Learned(table, offset))
    heads: dict[str, Head | None] = {
        "Model": None,
        # its activation is fixed in the class
        "ForMaskedLM": masked_language(tokens, "gelu", size.norm),
        **classifiers(config, pooler(size.width)),
    }
    ending = ending_among(config, heads)
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    found = Description(Model(encoder=stack, head=heads[ending]), {}, table - offset)
    return found.named(_names(ending), "roberta.", UNUSED, COPIES, OLDER)


def _names(ending: str) -> Table:
    """The sequence's classifier has the pooler's map in itself."""
    inside = ending == "ForSequenceClassification"
    pool, answer = (
        ("classifier.dense", "classifier.out_proj") if inside else ("roberta.pooler.dense", "classifier")
    )
    found: dict[str, str | Place] = {
        ours: theirs.replace("bert.", "roberta.", 1) for ours, theirs in LAYERS.items()
    }
    for kind in KINDS:
        found[f"head.transform.linear.{kind}"] = f"lm_head.dense.{kind}"
        found[f"head.transform.norm.{kind}"] = f"lm_head.layer_norm.{kind}"
        found[f"head.pool.dense.linear.{kind}"] = f"{pool}.{kind}"
        found[f"head.output.{kind}"] = f"{answer}.{kind}"
    return {**found, "head.weight": "lm_head.decoder.weight", "head.bias": "lm_head.bias"}


FAMILY = Family(types=("roberta", "xlm-roberta", "camembert"), describe=describe)
