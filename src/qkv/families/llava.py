"""LLaVA: patches from before a vision model's last layer, in the place of a token. Liu et al. 2023."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families import clip, siglip
from qkv.families.config import Config, shown
from qkv.families.encoders import ACTIVATIONS, discard_training
from qkv.families.family import Description, Family
from qkv.families.heads import ending_among
from qkv.families.pairs import nested, vision_names
from qkv.families.weights import KINDS, Place, Table
from qkv.spec import Model, Project, Projector, Replace, Stack, Tower

VISION: dict[str, tuple[Mapping[str, Any], Callable[[Config], Stack]]] = {
    "clip_vision_model": (clip.VISION, clip.vision_stack),
    "siglip_vision_model": (siglip.VISION, siglip.vision_stack),
}
# of the vision models' heads, which nothing reads here
HEADS = ("projection_dim", "vision_use_head")
# sizes that the classes of language models have as defaults, and files therefore leave out
TEXT = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
ENDINGS = {"ForConditionalGeneration": "ForCausalLM", "Model": "Model"}
FIRST_ROW = {"default": 1, "full": 0}  # the first is a class token

# the other names that files have for the same parts, longest first
MOVED = {
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
# the numbers of positions, and what a vision model answers by itself
UNUSED = ("vision_tower.embeddings.position_ids", "vision_tower.head.*")


def describe(config: Config) -> Description:
    """From a configuration of model type llava."""
    text = _text(config)
    language = text.model
    vision = _vision(config)
    tower = Tower(
        vision,
        Replace(config.take("image_token_index", int, config.take("image_token_id", int, 32000))),
        _projector(config, language.trunk.width),
        take_layer=_take_layer(config, len(vision.layers)),
        first_row=config.choice("vision_feature_select_strategy", FIRST_ROW, "default"),
    )
    config.discard("image_seq_length", "ignore_index", "vocab_size")  # follow from the rest, or of training
    config.finish()
    model = Model(decoder=language.decoder, head=language.head, towers=(tower,))
    return around_text(Description(model, {}, text.context), text, _projector_names())


def _projector_names() -> Table:
    return {
        f"towers.0.projector.maps.{i}.linear.{kind}": f"multi_modal_projector.linear_{i + 1}.{kind}"
        for i in range(2)
        for kind in KINDS
    }


def around_text(found: Description, text: Description, projector: Table) -> Description:
    """With the names of its tensors: a text model's stand under their own, behind one more."""
    if not text.weights:
        return found
    inner = "language_model."
    weights: dict[str, str | Place] = {
        ours: inner + place if isinstance(place, str) else replace(place, name=inner + place.name)
        for ours, place in text.weights.items()
    }
    weights |= vision_names(found.model.towers[0].stack, "vision_tower", "towers.0.stack")
    weights |= projector
    irrelevant = (*UNUSED, *(inner + name for name in text.irrelevant))
    copies = {inner + copy: inner + first for copy, first in text.copies.items()}
    return found.named(weights, irrelevant=irrelevant, copies=copies, older=text.older, moved=MOVED)


def _text(config: Config) -> Description:
    """Whatever family the language model is of."""
    from qkv.families import family_of  # this family is one of those it knows

    values = config.take("text_config", dict, {})
    kind = values.get("model_type") or "llama"
    family = family_of(kind, config.at("text_config"))
    defaults = {**TEXT.get(str(kind), {}), **family.defaults.get(str(kind), {})}
    inner = nested(config, "text_config", defaults)
    inner.put("architectures", [ENDINGS[ending_among(config, ENDINGS, "ForConditionalGeneration")]])
    if config.take("tie_word_embeddings", bool, False):
        inner.put("tie_word_embeddings", True)
    return family.describe(inner)


def _vision(config: Config) -> Stack:
    values = config.take("vision_config", dict, {})
    kind = values.get("model_type") or "clip_vision_model"
    if not isinstance(kind, str) or kind not in VISION:
        raise ConfigError(
            f"{config.at('vision_config')}: models of type {shown(kind)} are not known here "
            f"({', '.join(VISION)})."
        )
    defaults, read = VISION[kind]
    inner = nested(config, "vision_config", defaults)
    stack = read(inner)
    inner.discard(*HEADS)
    discard_training(inner)
    inner.finish()
    return stack


def _projector(config: Config, width: int) -> Projector:
    """Two maps with an activation between."""
    bias = config.take("multimodal_projector_bias", bool, True)
    activation = config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
    return Projector((Project(width, bias, activation), Project(width, bias)))


def _take_layer(config: Config, depth: int) -> int:
    """One layer's output; the last one's is taken before the stack's norm, so it goes by its number."""
    layer = config.take("vision_feature_layer", (int, list), -2)
    if isinstance(layer, list) or not -depth - 1 <= layer <= depth:
        raise ConfigError(
            f"{config.at('vision_feature_layer')} is {shown(layer)}; "
            f"known is the number of one of {depth:,} layers."
        )
    return depth if layer == -1 else layer


FAMILY = Family(types=("llava",), describe=describe)
