"""ViT: an image as squares, and a class token in front. Dosovitskiy et al. 2020."""

from __future__ import annotations

from dataclasses import replace

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.encoders import ACTIVATIONS, around, shape
from qkv.families.family import Description, Family
from qkv.families.heads import head_among, labels
from qkv.families.weights import KINDS, Place, Shape, Table, layer_names
from qkv.spec import Dense, Learned, Model, Patches, Pool, Projections, SequenceClass, Stack, pre_norm

MOST_PIXELS = 1 << 16
LAYER = {
    "attention_before": "layernorm_before",
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.output": "attention.output.dense",
    "feed_forward_before": "layernorm_after",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
}
UNUSED = ("vit.pooler.*",)


def describe(config: Config) -> Description:
    """From a configuration of model type vit.

    The bare model is its hidden states; the pooler that some files hold beside it is not known.
    """
    size = shape(config)
    biased = config.take("qkv_bias", bool, True)
    attention = replace(around(config, size), projections=Projections(bias="qkvo" if biased else "o"))
    layer = pre_norm(attention, Dense(size.activation, size.hidden), norm=size.norm)
    patches = image_patches(config, size.width, bias=True, class_token=True)
    classes = SequenceClass(labels(config), Pool("first"))
    head = head_among(config, {"Model": None, "ForImageClassification": classes})
    config.choice("pooler_act", ACTIVATIONS, "tanh")
    config.discard("pooler_output_size", "encoder_stride")  # of the pooler, and of masked images
    config.finish()
    stack = Stack(patches, (layer,) * size.depth, size.norm)
    found = Description(Model(encoder=stack, head=head), {}, patches.rows(0))
    return found.named(_names(patches), "vit.", UNUSED)


def _names(patches: Patches) -> Table:
    projection, ours = "vit.embeddings.patch_embeddings.projection", "encoder.embedding"
    table = (1, patches.rows(0), patches.width)
    return {
        f"{ours}.class_token": Place("vit.embeddings.cls_token", shape=(1, 1, patches.width)),
        f"{ours}.position.weight": Place("vit.embeddings.position_embeddings", shape=table),
        f"{ours}.patch.weight": Place(f"{projection}.weight", shape=kernel(patches)),
        f"{ours}.patch.bias": f"{projection}.bias",
        **layer_names("vit.encoder.layer.{layer}", LAYER, "encoder"),
        **{f"encoder.norm.{kind}": f"vit.layernorm.{kind}" for kind in KINDS},
        **{f"head.output.{kind}": f"classifier.{kind}" for kind in KINDS},
    }


def kernel(patches: Patches) -> Shape:
    """That of the convolution as which files hold the map of a patch."""
    return patches.width, patches.channels, patches.size, patches.size


def image_patches(config: Config, width: int, *, bias: bool, class_token: bool) -> Patches:
    """Squares of an image, with a row of positions for each and for the class token."""
    height, across = _pair(config, "image_size", 224)
    size, other = _pair(config, "patch_size", 16)
    if size != other or size > min(height, across):
        raise ConfigError(
            f"{config.at('patch_size')} is {size:,} by {other:,}; patches must be square, and no larger "
            f"than the image of {height:,} by {across:,}."
        )
    channels = config.size("num_channels", 3)
    bare = Patches(size, width, (height, across), channels, bias, class_token)
    return replace(bare, position=Learned(bare.rows(0)))


def _pair(config: Config, key: str, default: int) -> tuple[int, int]:
    """Height and width: one number for both, or a list of two."""
    value = config.take(key, (int, list), default)
    both = [value, value] if isinstance(value, int) else value
    sound = len(both) == 2 and all(type(n) is int and 1 <= n <= MOST_PIXELS for n in both)
    if not sound:
        raise ConfigError(f"{config.at(key)} is {shown(value)}; it must be one or two sizes in pixels.")
    return both[0], both[1]


FAMILY = Family(types=("vit",), describe=describe)
