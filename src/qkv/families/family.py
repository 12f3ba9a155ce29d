"""What a family provides: how to read its configuration, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.weights import KINDS, Table
from qkv.spec import Language, Model, Span
from qkv.spec.heads import Head


@dataclass(frozen=True)
class Description:
    """A model read from files.

    `weights` says where its tensors are stored (see `qkv.families.weights`); none where that is not
    known. `context` is the number of positions the files promise. `irrelevant` are patterns of
    tensors that hold no parameter of this model. `copies` are tensors that some tools save beside
    the one they equal, and that one. `older` are endings that first files have for those of today,
    and `moved` beginnings that some files have for those in `weights`: of several, the first that fits.
    `prefix` begins the names of all tensors but the head's, and is left out where the model was
    saved without a head.
    """

    model: Model
    weights: Table
    context: int | None = None
    irrelevant: tuple[str, ...] = ()
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    moved: Mapping[str, str] = field(default_factory=dict)

    def bare(self) -> Description:
        """The same with the names of a model that was saved without a head."""

        def cut(name: str) -> str:
            return name.removeprefix(self.prefix)

        weights = {
            ours: cut(place) if isinstance(place, str) else replace(place, name=cut(place.name))
            for ours, place in self.weights.items()
        }
        return replace(
            self,
            weights=weights,
            irrelevant=tuple(map(cut, self.irrelevant)),
            copies={cut(copy): cut(first) for copy, first in self.copies.items()},
            prefix="",
        )

    def named(
        self,
        weights: Table,
        prefix: str = "",
        irrelevant: tuple[str, ...] = (),
        copies: Mapping[str, str] | None = None,
        older: Mapping[str, str] | None = None,
        moved: Mapping[str, str] | None = None,
    ) -> Description:
        """The same with the names of its tensors; what is irrelevant is added to what was."""
        if isinstance(self.model.head, Span):
            weights = {**weights, **{f"head.output.{kind}": f"qa_outputs.{kind}" for kind in KINDS}}
        return replace(
            self,
            weights=weights,
            prefix=prefix,
            irrelevant=(*self.irrelevant, *irrelevant),
            copies=copies or {},
            older=older or {},
            moved=moved or {},
        )


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
    """The head that `architectures` names: a language head, or none for the bare model.

    In lenient reading an unknown head is listed, and left out.
    """
    names = config.take("architectures", list, None) or ["ForCausalLM"]
    if isinstance(names[0], str) and names[0].endswith(("ForCausalLM", "LMHeadModel")):
        return language
    if isinstance(names[0], str) and names[0].endswith("Model") and "DoubleHeads" not in names[0]:
        return None
    if config.record is not None:  # the layers are known all the same
        config.leave("architectures")
        return None
    raise ConfigError(
        f"{config.at('architectures')} names {shown(names[0])}, whose head is not known for this model."
    )
