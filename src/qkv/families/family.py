"""What a family provides: how to read its configuration, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.spec import Language, Model
from qkv.spec.heads import Head


@dataclass(frozen=True)
class Description:
    """A model read from files.

    `weights` maps names of the description to names in the checkpoint; "{layer}" stands for the
    number of a layer on both sides. `context` is the number of positions the files promise.
    `irrelevant` are patterns of tensors that hold no parameter. `prefix` begins the names of all
    tensors but the head's, and is left out where the model was saved without a head.
    """

    model: Model
    weights: Mapping[str, str]
    context: int | None = None
    irrelevant: tuple[str, ...] = ()
    prefix: str = ""

    def bare(self) -> Description:
        """The same with the names of a model that was saved without a head."""
        names = {ours: theirs.removeprefix(self.prefix) for ours, theirs in self.weights.items()}
        return replace(self, weights=names, prefix="")


@dataclass(frozen=True)
class Family:
    """`types` are values of `model_type`.

    `defaults` are, by type, the values of keys that a config.json may leave out because the class
    that wrote it has them; a null in the file stays a null. `own` are, by type, keys that only this
    type of the family has: with another type they are unknown, not obeyed.
    """

    types: tuple[str, ...]
    describe: Callable[[Config], Description]
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    own: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def foreign(self, kind: str) -> frozenset[str]:
        """Keys of the family's other types."""
        return frozenset().union(*self.own.values()) - self.own.get(kind, frozenset())


def head_of(config: Config, language: Language) -> Head | None:
    """The head that `architectures` names: a language head, or none for the bare model."""
    names = config.take("architectures", list, None) or ["ForCausalLM"]
    if isinstance(names[0], str) and names[0].endswith(("ForCausalLM", "LMHeadModel")):
        return language
    if isinstance(names[0], str) and names[0].endswith("Model") and "DoubleHeads" not in names[0]:
        return None
    raise ConfigError(
        f"{config.at('architectures')} names {shown(names[0])}, whose head is not known for this model."
    )


def layer_names(theirs: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Weight and bias of each part of a decoder's layer, ours to theirs."""
    return {
        f"decoder.layers.{{layer}}.{our}.{kind}": f"{theirs}.{their}.{kind}"
        for our, their in parts.items()
        for kind in ("weight", "bias")
    }
