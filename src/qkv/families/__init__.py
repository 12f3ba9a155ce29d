"""Published models: from the configuration in their files to a description. No torch.

A family is one file with a function and a table; it joins `FAMILIES` in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from qkv.errors import ConfigError
from qkv.families import (
    albert,
    bart,
    bert,
    bloom,
    clip,
    cohere,
    deberta,
    deepseek,
    distilbert,
    electra,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gguf,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    llama4,
    llava,
    mixtral,
    modernbert,
    mpt,
    mt5,
    nomic_bert,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_next,
    qwen3_vl,
    roberta,
    siglip,
    stablelm,
    starcoder2,
    t5,
    vit,
    whisper,
)
from qkv.families.config import Config, Record, shown
from qkv.families.family import Description, Family

MODULES = (
    albert,
    bart,
    bert,
    bloom,
    clip,
    cohere,
    deberta,
    deepseek,
    distilbert,
    electra,
    falcon,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    llama,
    llama4,
    llava,
    mixtral,
    modernbert,
    mpt,
    mt5,
    nomic_bert,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_next,
    qwen3_vl,
    roberta,
    siglip,
    stablelm,
    starcoder2,
    t5,
    vit,
    whisper,
)
FAMILIES: dict[str, Family] = {kind: module.FAMILY for module in MODULES for kind in module.FAMILY.types}

__all__ = ["FAMILIES", "Config", "Description", "Family", "Record", "describe", "describe_gguf", "family_of"]


def family_of(kind: Any, where: str) -> Family:
    """The family of a model type. Raises ConfigError naming those there are."""
    if kind is None:
        raise ConfigError(f"{where}: model_type is missing.")
    if not isinstance(kind, str) or kind not in FAMILIES:
        near = get_close_matches(str(kind), FAMILIES, n=3)
        hint = f"; the nearest known are {', '.join(near)}" if near else f" ({len(FAMILIES)} others are)"
        raise ConfigError(f"{where}: models of type {shown(kind)} are not known yet{hint}.")
    return FAMILIES[kind]


def describe(
    data: Mapping[str, Any],
    where: str = "config.json",
    ignore: Iterable[str] = (),
    record: Record | None = None,
) -> Description:
    """From the contents of a config.json. Every key is used, or known not to matter, or an error.

    With a `record`, keys that are not known are noted in it instead, and so are those that were used.
    """
    kind = data.get("model_type")
    family = family_of(kind, where)
    defaults = {key: value for key, value in family.defaults.get(str(kind), {}).items() if key not in data}
    config = Config({**defaults, **data}, where, ignore, record=record)
    config.hide(family.foreign(str(kind)))
    _refuse_packed(config)
    found = family.describe(config)
    if record is not None:  # a class's default is not a figure of the file
        for key in defaults:
            record.taken.pop(key, None)
    return found


def describe_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    where: str,
    ignore: Iterable[str] = (),
    record: Record | None = None,
) -> Description:
    """From the metadata and tensors of a GGUF file; `record` as for `describe`."""
    kind = gguf.architecture(metadata, where)
    family = family_of(kind, where)
    found = family.describe(gguf.configuration(metadata, tensors, where, ignore, record))
    weights = gguf.WEIGHTS if kind in gguf.LOADABLE else {}
    return replace(found, weights=weights, irrelevant=gguf.IRRELEVANT, prefix="")


def _refuse_packed(config: Config) -> None:
    packed = config.take("quantization_config", dict, None)
    if not packed:
        return
    if config.record is not None:  # how weights are stored changes nothing of the structure
        config.record.unknown["quantization_config"] = packed.get("quant_method")
        return
    raise ConfigError(
        f"{config.at('quantization_config')} says that the weights are packed as "
        f"{shown(packed.get('quant_method'))}, which cannot be read yet; "
        "use the model before it was packed, or a .gguf of it."
    )
