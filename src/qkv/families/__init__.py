"""Published models: from the configuration in their files to a description. No torch.

A family is one file with a function and a table; it joins `FAMILIES` in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families import gguf, llama
from qkv.families.config import Config
from qkv.families.family import Description, Family, without_prefix

FAMILIES: dict[str, Family] = {kind: family for family in (llama.FAMILY,) for kind in family.types}

__all__ = [
    "FAMILIES",
    "Config",
    "Description",
    "Family",
    "describe",
    "describe_gguf",
    "family_of",
    "without_prefix",
]


def family_of(kind: Any, where: str) -> Family:
    """The family of a model type. Raises ConfigError naming those there are."""
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"{where}: models of type {kind!r} are not known yet ({known}).")
    return FAMILIES[kind]


def describe(data: Mapping[str, Any], where: str = "config.json", ignore: Iterable[str] = ()) -> Description:
    """From the contents of a config.json. Every key is used, or known not to matter, or an error."""
    return family_of(data.get("model_type"), where).describe(Config(data, where, ignore))


def describe_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], where: str, ignore: Iterable[str] = ()
) -> Description:
    """From the metadata and tensors of a GGUF file."""
    config = gguf.configuration(metadata, tensors, where, ignore)
    found = family_of(config.peek("model_type"), where).describe(config)
    return replace(found, weights=gguf.WEIGHTS)
