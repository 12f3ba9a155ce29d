"""Published models: from the configuration in their files to a description. No torch.

A family is one file with a function and a table; it joins `FAMILIES` in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families import gguf, llama
from qkv.families.config import Config, shown
from qkv.families.family import Description, Family

FAMILIES: dict[str, Family] = {kind: family for family in (llama.FAMILY,) for kind in family.types}

__all__ = ["FAMILIES", "Config", "Description", "Family", "describe", "describe_gguf", "family_of"]


def family_of(kind: Any, where: str) -> Family:
    """The family of a model type. Raises ConfigError naming those there are."""
    if kind is None:
        raise ConfigError(f"{where}: model_type is missing.")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{where}: models of type {shown(kind)} are not known yet ({known}).")
    return FAMILIES[kind]


def describe(data: Mapping[str, Any], where: str = "config.json", ignore: Iterable[str] = ()) -> Description:
    """From the contents of a config.json. Every key is used, or known not to matter, or an error."""
    kind = data.get("model_type")
    family = family_of(kind, where)
    config = Config({**family.defaults.get(str(kind), {}), **data}, where, ignore)
    _refuse_packed(config)
    return family.describe(config)


def describe_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, ignore: Iterable[str] = ()
) -> Description:
    """From the metadata and tensors of a GGUF file."""
    family = family_of(gguf.architecture(metadata, where), where)
    found = family.describe(gguf.configuration(metadata, tensors, where, ignore))
    return replace(found, weights=gguf.WEIGHTS, irrelevant=gguf.IRRELEVANT, prefix="")


def _refuse_packed(config: Config) -> None:
    packed = config.take("quantization_config", dict, None)
    if packed:
        raise ConfigError(
            f"{config.at('quantization_config')} says that the weights are packed as "
            f"{shown(packed.get('quant_method'))}, which cannot be read yet; "
            "use the model before it was packed, or a .gguf of it."
        )
