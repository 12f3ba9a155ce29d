"""What a family provides: how to read its configuration, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.spec import Language, Model
from qkv.spec.heads import Head


@dataclass(frozen=True)
class Description:
    """A model read from files.

    `weights` maps names of the description to names in the checkpoint; "{layer}" stands for the
    number of a layer on both sides. `context` is the number of positions the files promise.
    """

    model: Model
    weights: Mapping[str, str]
    context: int | None = None


@dataclass(frozen=True)
class Family:
    """`types` are values of `model_type`; `irrelevant` are patterns of tensors that hold no parameter."""

    types: tuple[str, ...]
    describe: Callable[[Config], Description]
    irrelevant: tuple[str, ...] = ()


def head_of(config: Config, language: Language) -> Head | None:
    """The head that `architectures` names: a language head, or none for the bare model."""
    names = config.peek("architectures") or ["ForCausalLM"]
    name = str(names[0])
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return language
    if name.endswith("Model"):
        return None
    raise ConfigError(f"{config.where}: architectures names {name}, whose head is not known for this model.")


def layer_names(theirs: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Weight and bias of each part of a decoder's layer, ours to theirs."""
    return {
        f"decoder.layers.{{layer}}.{our}.{kind}": f"{theirs}.{their}.{kind}"
        for our, their in parts.items()
        for kind in ("weight", "bias")
    }


def without_prefix(description: Description, prefix: str) -> Description:
    """The same with checkpoint names as the bare model saves them, without its prefix."""
    names = {ours: theirs.removeprefix(prefix) for ours, theirs in description.weights.items()}
    return replace(description, weights=names)
