"""ELECTRA: BERT over tokens kept narrow, trained to tell real tokens from made-up ones. Clark et al. 2020."""

from __future__ import annotations

from qkv.families.bert import LAYERS
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
from qkv.families.heads import classifiers, ending_among
from qkv.families.weights import KINDS, Place, Table
from qkv.spec import Learned, Model, Project, Stack, Tokens
from qkv.spec.heads import Head

SUMMARY = (  # of the multiple-choice head alone
    "summary_activation",
    "summary_first_dropout",
    "summary_last_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
)
# the numbers of positions, and the head of pretraining that tells real tokens from made-up ones
UNUSED = ("*embeddings.position_ids", "discriminator_predictions.*")


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
    heads: dict[str, Head | None] = {"Model": None, "ForMaskedLM": masked, **offers}
    ending = ending_among(config, heads)
    config.discard(*SUMMARY, "generator_size")  # the other of the two models, which made tokens up
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    found = Description(Model(encoder=stack, head=heads[ending]), {}, context)
    return found.named(_names(ending), "electra.", UNUSED)


def _names(ending: str) -> Table:
    """The sequence's classifier has the pooler's map in itself."""
    answer = "classifier.out_proj" if ending == "ForSequenceClassification" else "classifier"
    found: dict[str, str | Place] = {
        ours: theirs.replace("bert.", "electra.", 1) for ours, theirs in LAYERS.items()
    }
    for kind in KINDS:
        found[f"encoder.embedding.projection.linear.{kind}"] = f"electra.embeddings_project.{kind}"
        found[f"head.transform.linear.{kind}"] = f"generator_predictions.dense.{kind}"
        found[f"head.transform.norm.{kind}"] = f"generator_predictions.LayerNorm.{kind}"
        found[f"head.pool.dense.linear.{kind}"] = f"classifier.dense.{kind}"
        found[f"head.output.{kind}"] = f"{answer}.{kind}"
    return {**found, "head.weight": "generator_lm_head.weight", "head.bias": "generator_lm_head.bias"}


FAMILY = Family(types=("electra",), describe=describe)
