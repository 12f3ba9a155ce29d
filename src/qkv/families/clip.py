"""CLIP's two models: a causal one for text, and one for images with a class token. Radford et al. 2021.

Which token ends the text is decided by its number; the description says the last one.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.encoders import shape
from qkv.families.family import Description, Family
from qkv.families.heads import head_among, labels
from qkv.families.pairs import (
    UNUSED,
    alone,
    half_of,
    is_pair,
    layers,
    text_names,
    text_stack,
    vision_names,
)
from qkv.families.vit import image_patches
from qkv.spec import Model, Pool, PooledEmbedding, Project, Stack
from qkv.spec.heads import Head

TEXT = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "projection_dim": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "projection_dim": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


def describe(config: Config) -> Description:
    """From a configuration of model type clip, clip_text_model or clip_vision_model."""
    if not is_pair(config):
        return _one(config)
    half, paired = half_of(config, {"text_config": TEXT, "vision_config": VISION})
    projection = config.size("projection_dim", 512)
    config.finish()
    if paired:
        half.put("projection_dim", projection)  # the halves' own say nothing within the pair
        half.put("architectures", ["WithProjection"])
    return alone(_one(half, unit_length=paired), "patch_size" in half)


def _one(config: Config, unit_length: bool = False) -> Description:
    """What has patches reads images."""
    if "patch_size" in config:
        stack = vision_stack(config)
        context, answer = stack.input.rows(0), Pool("first")
        weights, prefix, projection = vision_names(stack), "vision_model.", "visual_projection.weight"
    else:
        stack, context = text_stack(config, shape(config, eps=1e-5), causal=True)
        answer = Pool("last")
        weights, prefix, projection = text_names(), "text_model.", "text_projection.weight"
    head = _head(config, answer, unit_length)
    config.finish()
    weights["head.pool.dense.linear.weight"] = projection
    return Description(Model(encoder=stack, head=head), {}, context).named(weights, prefix, UNUSED)


def vision_stack(config: Config) -> Stack:
    """Normalised before the first layer and after the last."""
    size = shape(config, eps=1e-5)
    patches = image_patches(config, size.width, bias=False, class_token=True)
    config.discard("vocab_size")  # of a text model, in LLaVA's files
    return Stack(replace(patches, norm=size.norm), layers(config, size), size.norm)


def _head(config: Config, answer: Pool, unit_length: bool) -> Head | None:
    projection = Project(config.size("projection_dim", 512), bias=False)
    pool = replace(answer, dense=projection)
    labels(config)
    return head_among(config, {"Model": None, "WithProjection": PooledEmbedding(pool, normalise=unit_length)})


FAMILY = Family(
    types=("clip", "clip_text_model", "clip_vision_model"),
    describe=describe,
    defaults={"clip_text_model": TEXT, "clip_vision_model": VISION},
)
