"""RoBERTa: BERT trained longer. Liu et al. 2019. Its positions begin behind the padding token's row."""

from __future__ import annotations

from qkv.errors import ConfigError
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
from qkv.families.heads import classifiers, head_among
from qkv.spec import Learned, Model, Stack


def describe(config: Config) -> Description:
    """From a configuration of model type roberta."""
    refuse_decoder(config)
    size, table = shape(config), rows(config)
    offset = config.take("pad_token_id", int, 1) + 1  # position 0 is the row after padding's
    if not 0 <= offset < table:
        raise ConfigError(
            f"{config.at('pad_token_id')} is {offset - 1:,}, and positions begin behind that row "
            f"of a table of {table:,}."
        )
    tokens = bert_tokens(config, size, Learned(table, offset))
    head = head_among(
        config,
        {
            "Model": None,
            # its activation is fixed in the class
            "ForMaskedLM": masked_language(tokens, "gelu", size.norm),
            **classifiers(config, pooler(size.width)),
        },
    )
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    return Description(Model(encoder=stack, head=head), {}, table - offset)


FAMILY = Family(types=("roberta",), describe=describe)
