"""The base of every part of a description: a small frozen dataclass that knows its own parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, TypeVar, dataclass_transform

Shape = tuple[int, ...]


class Tensor(NamedTuple):
    """One parameter tensor of a description.

    `name` is its place ("decoder.layers.3.attention.query.weight"); `shape` is outermost first, a
    matrix as (out, in). `key` is what makes it the same tensor: its name, or for shared nodes the
    shared name, so that it is counted and stored once. `used` is how many of its values one token
    touches (fewer than all only for experts). `multiplies` says that a token is multiplied by it,
    which is what costs arithmetic; a looked-up table or a norm's scale is not.
    """

    name: str
    shape: Shape
    key: str
    used: int
    multiplies: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def vector(name: str, *shape: int) -> Tensor:
    """A tensor that is added, multiplied element by element, or looked up."""
    return Tensor(name, shape, name, math.prod(shape), False)


def matrix(name: str, *shape: int) -> Tensor:
    """A tensor each token is multiplied by."""
    return Tensor(name, shape, name, math.prod(shape), True)


def linear(name: str, out: int, into: int, bias: bool = False) -> Iterator[Tensor]:
    """The weight (out, into) and the bias (out) of an affine map."""
    yield matrix(f"{name}.weight", out, into)
    if bias:
        yield vector(f"{name}.bias", out)


def under(prefix: str, tensors: Iterable[Tensor], key: str | None = None) -> Iterator[Tensor]:
    """The same tensors, one level further out. A key that was made shared further in stays as it is."""
    for tensor in tensors:
        outer = key or prefix
        keeps = tensor.key.startswith("@")
        yield tensor._replace(
            name=f"{prefix}.{tensor.name}",
            key=tensor.key if keeps else f"{outer}.{tensor.key}",
        )


def part(name: str, node: Node | None, *sizes: int) -> Iterator[Tensor]:
    """The tensors of a node in the slot `name`, or nothing when the slot is empty."""
    if node is not None:
        for tensor in node.tensors(*sizes):
            covered = node.shared and (node.shares is None or tensor.name in node.shares)
            yield from under(name, (tensor,), f"@{node.shared}" if covered else None)


def product_flops(tensors: Iterable[Tensor]) -> int:
    """Operations of multiplying one token by all the matrices among these; a multiply-add counts 2."""
    return 2 * sum(tensor.used for tensor in tensors if tensor.multiplies)


Kind = TypeVar("Kind", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def node(kind: Kind) -> Kind:
    """Makes a class a part of descriptions: a frozen dataclass with slots.

    Equality, hash and text come from `Node`, once: made for each of a hundred classes anew they
    would be a fifth of the time a command takes to start.
    """
    return dataclass(frozen=True, slots=True, repr=False, eq=False)(kind)  # type: ignore[return-value]


@node
class Node:
    """A part of a description. Compared by value; never changed, only replaced.

    `shared="name"`: every node with this name uses one set of parameters. A kind whose parts are
    never meant by that (a token table and the positions beside it) names in `shares` its tensors
    that are.
    """

    kinds: ClassVar[dict[str, type[Node]]] = {}
    shares: ClassVar[tuple[str, ...] | None] = None

    shared: str | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # dataclass(slots=True) creates each class twice; the second, final one wins
        Node.kinds[cls.__name__] = cls

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        """The parameters of this node, given the sizes its surroundings fix."""
        yield from ()

    def children(self) -> dict[str, Any]:
        """Its fields by name: the steps of a path through the description."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    def __hash__(self) -> int:
        return hash((type(self), *(getattr(self, f.name) for f in fields(self))))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.children().items())
        return f"{type(self).__name__}({given})"

    def __str__(self) -> str:
        from qkv.spec.text import show

        return show(self)
