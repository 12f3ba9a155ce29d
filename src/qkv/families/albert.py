"""ALBERT: a few layers used again and again, over tokens kept narrow. Lan et al. 2019."""

from __future__ import annotations

from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import (
    MOST_LAYERS,
    bert_layer,
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
from qkv.spec import Learned, Model, Project, Stack, Tokens

# switches of the first code, which released models leave off
OFF = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0}

LAYER = {
    "attention.query": "attention.query",
    "attention.key": "attention.key",
    "attention.value": "attention.value",
    "attention.output": "attention.dense",
    "attention_post": "attention.LayerNorm",
    "feed_forward.up": "ffn",
    "feed_forward.down": "ffn_output",
    "feed_forward_post": "full_layer_layer_norm",
}
COPIES = {"predictions.decoder.bias": "predictions.bias"}
# the numbers of positions, what other heads read, and a bias that is not added
UNUSED = ("*embeddings.position_ids", "albert.pooler.*", "sop_classifier.*", "predictions.bias")


def describe(config: Config) -> Description:
    """From a configuration of model type albert."""
    size, context = shape(config), rows(config)
    tokens = Tokens(
        config.size("vocab_size"),
        config.size("embedding_size", 128),
        position=Learned(context),
        types=types(config),
        norm=size.norm,
        projection=Project(size.width),
        shared=tied(config),
    )
    head = head_among(
        config,
        {
            "Model": None,
            "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
            **classifiers(config, pooler(size.width)),
        },
    )
    places = _places(config, size.depth)
    layer = bert_layer(config, size)
    layers = tuple(replace(layer, shared=f"group {group} layer {j}") for group, j in places)
    discard_if(config, OFF)
    config.finish()
    found = Description(Model(encoder=Stack(tokens, layers), head=head), {}, context)
    return found.named(_names(places, masked_bias("predictions", tokens)), "albert.", UNUSED, COPIES)


def _places(config: Config, depth: int) -> list[tuple[int, int]]:
    """The group of each layer and its place there. The depth is divided over groups; a step is all of one."""
    groups, inner = config.size("num_hidden_groups", 1), config.size("inner_group_num", 1)
    if groups > depth or inner * depth > MOST_LAYERS:
        raise ConfigError(
            f"{config.at('num_hidden_groups')} is {groups:,} and inner_group_num {inner:,}, "
            f"for {depth:,} layers."
        )
    return [(int(i / (depth / groups)), j) for i in range(depth) for j in range(inner)]


def _names(places: list[tuple[int, int]], bias: str) -> Table:
    """Layers by number: several are stored as one."""
    embeddings, ours = "albert.embeddings", "encoder.embedding"
    found: dict[str, str | Place] = {
        f"{ours}.weight": f"{embeddings}.word_embeddings.weight",
        f"{ours}.position.weight": f"{embeddings}.position_embeddings.weight",
        f"{ours}.types.weight": f"{embeddings}.token_type_embeddings.weight",
        "head.weight": "predictions.decoder.weight",
        "head.bias": bias,
    }
    for kind in KINDS:
        found[f"{ours}.norm.{kind}"] = f"{embeddings}.LayerNorm.{kind}"
        found[f"{ours}.projection.linear.{kind}"] = f"albert.encoder.embedding_hidden_mapping_in.{kind}"
        found[f"head.transform.linear.{kind}"] = f"predictions.dense.{kind}"
        found[f"head.transform.norm.{kind}"] = f"predictions.LayerNorm.{kind}"
        found[f"head.pool.dense.linear.{kind}"] = f"albert.pooler.{kind}"
        found[f"head.output.{kind}"] = f"classifier.{kind}"
    for i, (group, j) in enumerate(places):
        one = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{j}"
        parts = layer_names(one, LAYER, "encoder")
        found |= {name.replace("{layer}", str(i)): place for name, place in parts.items()}
    return found


FAMILY = Family(types=("albert",), describe=describe, defaults={"albert": {"hidden_act": "gelu_new"}})
