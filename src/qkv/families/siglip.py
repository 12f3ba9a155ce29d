"""SigLIP's two models, both seeing everything. Zhai et al. 2023.

The image's answer is what one learned query reads from the patches: a decoder of one layer whose
only token is that query.
"""

from __future__ import annotations

from dataclasses import replace

from qkv.families.config import Config
from qkv.families.encoders import BIASED, Shape, head_size, shape
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
from qkv.families.weights import KINDS, Place, fused
from qkv.spec import (
    CrossAttention,
    Dense,
    Layer,
    Model,
    Pool,
    PooledEmbedding,
    Project,
    Stack,
    Tokens,
    step,
)

TEXT = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
VISION = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
    "vision_use_head": True,
}


def describe(config: Config) -> Description:
    """From a configuration of model type siglip, siglip_text_model or siglip_vision_model."""
    if not is_pair(config):
        return _one(config)
    half, paired = half_of(config, {"text_config": TEXT, "vision_config": VISION})
    config.finish()
    return alone(_one(half, unit_length=paired), "patch_size" in half)


def _one(config: Config, unit_length: bool = False) -> Description:
    """What has patches reads images."""
    if "patch_size" in config:
        stack = vision_stack(config)
        context = stack.input.rows(0)
        asks = config.take("vision_use_head", bool, True)
        model = Model(encoder=stack, decoder=_query(config, stack) if asks else None)
        pool = Pool("first") if asks else None
        weights, prefix = vision_names(stack) | _query_names(stack.width), "vision_model."
    else:
        stack, context = text_stack(config, shape(config, eps=1e-6), causal=False)
        model = Model(encoder=stack)
        pool = Pool("last", Project(config.size("projection_size", stack.width)))
        weights, prefix = text_names(), "text_model."
        weights |= {f"head.pool.dense.linear.{kind}": f"text_model.head.{kind}" for kind in KINDS}
    labels(config)
    head = PooledEmbedding(pool, normalise=unit_length) if pool is not None else None
    model = replace(model, head=head_among(config, {"Model": head}))
    config.finish()
    return Description(model, {}, context).named(weights, prefix, UNUSED)


def _query_names(width: int) -> dict[str, str | Place]:
    head, ours = "vision_model.head", "decoder.layers.0"
    found: dict[str, str | Place] = {
        "decoder.embedding.weight": Place(f"{head}.probe", shape=(1, 1, width)),
    }
    for kind in KINDS:
        parts = (f"{ours}.cross.{part}.{kind}" for part in ("query", "key", "value"))
        found |= fused(f"{head}.attention.in_proj_{kind}", *parts)
        found[f"{ours}.cross.output.{kind}"] = f"{head}.attention.out_proj.{kind}"
        found[f"{ours}.feed_forward_before.{kind}"] = f"{head}.layernorm.{kind}"
        found[f"{ours}.feed_forward.up.{kind}"] = f"{head}.mlp.fc1.{kind}"
        found[f"{ours}.feed_forward.down.{kind}"] = f"{head}.mlp.fc2.{kind}"
    return found


def vision_stack(config: Config) -> Stack:
    """Patches and their positions, no class token."""
    size = shape(config, eps=1e-6)
    patches = image_patches(config, size.width, bias=True, class_token=False)
    return Stack(patches, layers(config, size), size.norm)


def _query(config: Config, stack: Stack) -> Stack:
    """What the query reads takes its place (no step beside it), then a feed-forward as in the layers."""
    size: Shape = shape(config, eps=1e-6)
    read = CrossAttention(
        size.heads,
        size.heads,
        head_size(config, size.width, size.heads),
        source_width=stack.width,
        projections=BIASED,
    )
    layer = Layer((step(read, skip=0.0), step(Dense(size.activation, size.hidden), before=size.norm)))
    return Stack(Tokens(1, size.width), (layer,))


FAMILY = Family(
    types=("siglip", "siglip_text_model", "siglip_vision_model"),
    describe=describe,
    defaults={"siglip_text_model": TEXT, "siglip_vision_model": VISION},
)
