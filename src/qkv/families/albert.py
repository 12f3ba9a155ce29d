"""ALBERT: a few layers used again and again, over tokens kept narrow. Lan et al. 2019."""

from __future__ import annotations

from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import (
    Shape,
    bert_layer,
    discard_if,
    masked_language,
    pooler,
    rows,
    shape,
    tied,
    types,
)
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, head_among
from qkv.spec import Layer, Learned, Model, Project, Stack, Tokens

# switches of the first code, which released models leave off
OFF = {"down_scale_factor": 1, "gap_size": 0, "net_structure_type": 0, "num_memory_blocks": 0}


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
    layers = _layers(config, size)
    discard_if(config, OFF)
    config.finish()
    return Description(Model(encoder=Stack(tokens, layers), head=head), {}, context)


def _layers(config: Config, size: Shape) -> tuple[Layer, ...]:
    """The depth divided over `groups` of equal layers; each step of a group is `inner` layers."""
    groups, inner = config.size("num_hidden_groups", 1), config.size("inner_group_num", 1)
    if groups > size.depth or inner * size.depth > 1 << 16:
        raise ConfigError(
            f"{config.at('num_hidden_groups')} is {groups:,} and inner_group_num {inner:,}, "
            f"for {size.depth:,} layers."
        )
    layer = bert_layer(config, size)
    return tuple(
        replace(layer, shared=f"group {int(i / (size.depth / groups))} layer {j}")
        for i in range(size.depth)
        for j in range(inner)
    )


FAMILY = Family(types=("albert",), describe=describe, defaults={"albert": {"hidden_act": "gelu_new"}})
