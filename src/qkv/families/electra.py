"""ELECTRA: BERT over tokens kept narrow, trained to tell real tokens from made-up ones. Clark et al. 2020."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.encoders import (
    bert_layer,
    masked_language,
    pooler,
    refuse_decoder,
    rows,
    shape,
    tied,
    types,
)
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, head_among
from qkv.spec import Learned, Model, Project, Stack, Tokens

SUMMARY = (  # of the multiple-choice head alone
    "summary_activation",
    "summary_first_dropout",
    "summary_last_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)


def describe(config: Config) -> Description:
    """From a configuration of model type electra."""
    refuse_decoder(config)
    size, context = shape(config), rows(config)
    table = config.size("embedding_size", 128)
    tokens = Tokens(
        config.size("vocab_size"),
        table,
        position=Learned(context),
        types=types(config),
        norm=size.norm,
        projection=Project(size.width) if table != size.width else None,
        shared=tied(config),
    )
    # both activations are fixed in the class
    offers = classifiers(config, pooler(size.width, "gelu"))
    del offers["ForMultipleChoice"]  # reads a summary of its own
    masked = masked_language(tokens, "gelu", size.norm)
    head = head_among(config, {"Model": None, "ForMaskedLM": masked, **offers})
    config.discard(*SUMMARY)
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    return Description(Model(encoder=stack, head=head), {}, context)


FAMILY = Family(types=("electra",), describe=describe)
