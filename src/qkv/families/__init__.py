"""Published models: from the configuration in their files to a description. No torch.

A family is one file with a function and a table; it joins `FILES` in a line for each model type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config, Record, shown
from qkv.families.family import Description, Family

# the file of each model type: one is imported when it is asked for, as all would take a while
FILES = {
    "albert": "albert",
    "bart": "bart",
    "mbart": "bart",
    "pegasus": "bart",
    "marian": "bart",
    "bert": "bert",
    "bloom": "bloom",
    "clip": "clip",
    "clip_text_model": "clip",
    "clip_vision_model": "clip",
    "cohere": "cohere",
    "cohere2": "cohere",
    "deberta-v2": "deberta",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "kimi_k2": "deepseek",
    "kimi_k25": "kimi_k25",
    "distilbert": "distilbert",
    "electra": "electra",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "glm4": "glm4",
    "glm_moe_dsa": "deepseek",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt_bigcode",
    "gpt_neox": "gpt_neox",
    "gpt_oss": "gpt_oss",
    "gptj": "gptj",
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "mistral3": "mistral3",
    "internlm": "llama",
    "smollm3": "llama",
    "granite": "llama",
    "llama4": "llama4",
    "llama4_text": "llama4",
    "llava": "llava",
    "minimax_m2": "minimax_m2",
    "mixtral": "mixtral",
    "modernbert": "modernbert",
    "mpt": "mpt",
    "mt5": "mt5",
    "nemotron_h": "nemotron_h",
    "nomic_bert": "nomic_bert",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "opt": "opt",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "mimo": "qwen2",
    "mimo_v2_flash": "mimo_v2_flash",
    "qwen2_moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_next": "qwen3_next",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "roberta": "roberta",
    "camembert": "roberta",
    "xlm-roberta": "roberta",
    "siglip": "siglip",
    "siglip_text_model": "siglip",
    "siglip_vision_model": "siglip",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
    "t5": "t5",
    "vit": "vit",
    "whisper": "whisper",
}

__all__ = ["FILES", "Config", "Description", "Family", "Record", "describe", "describe_gguf", "family_of"]


def family_of(kind: Any, where: str) -> Family:
    """The family of a model type. Raises ConfigError naming those there are."""
    if kind is None:
        raise ConfigError(f"{where}: model_type is missing.")
    if not isinstance(kind, str) or kind not in FILES:
        near = get_close_matches(str(kind), FILES, n=3)
        hint = f"; the nearest known are {', '.join(near)}" if near else f" ({len(FILES)} others are)"
        raise ConfigError(f"{where}: models of type {shown(kind)} are not known yet{hint}.")
    family: Family = import_module(f"qkv.families.{FILES[kind]}").FAMILY
    return family


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
    from qkv.families import gguf  # a configuration does not wait for it
    from qkv.families.architectures import ARCHITECTURES, whole_norms

    kind = gguf.architecture(metadata, where)
    told = gguf.known(kind)
    found = family_of(told.family, where).describe(
        gguf.configuration(metadata, tensors, where, ignore, record)
    )
    if told.whole_norms:
        found = replace(found, model=whole_norms(found.model))
    weights = told.weights(found.model.trunk.width) if kind in ARCHITECTURES else {}
    return replace(found, weights=weights, irrelevant=gguf.IRRELEVANT, prefix="", copies={}, older={})


def _refuse_packed(config: Config) -> None:
    """MLX writes `quantization`, and the other beside it."""
    packed = {key: config.take(key, dict, None) for key in ("quantization_config", "quantization")}
    found = next((key for key, said in packed.items() if said), None)
    if found is None:
        return
    said = packed[found]
    method = said.get("quant_method") or said.get("quant_algo") or f"{said.get('bits')} bits"
    if config.record is not None:  # how weights are stored changes nothing of the structure
        config.record.unknown[found] = method
        return
    raise ConfigError(
        f"{config.at(found)} says that the weights are packed as {shown(method)}, which cannot be read yet; "
        "use the model before it was packed, or a .gguf of it."
    )
