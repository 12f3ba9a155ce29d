"""How our tensors lie in a checkpoint: a family's table of names, read either way. No torch.

A table maps names of the description to places in the files; "{layer}" stands for a layer's number
on both sides. What `WeightMap.read` takes apart `WeightMap.write` puts together again, bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from qkv.errors import CheckpointError

Shape = tuple[int, ...]
Fetch = Callable[[str], np.ndarray]
KINDS = ("weight", "bias")
COUNTED = re.compile(r"\{(expert|head)\}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of ours is stored, and how.

    "{expert}" or "{head}" in the name counts our first axis: each index is a tensor of its own
    there. `part`: several of ours lie in one of theirs, one after the other along `axis` within
    each of `groups` equal groups (1: whole blocks; as many as heads: each head's query, key and
    value in turn). `transposed`: a matrix stands there as (in, out). `shape`: the values are there in
    this shape, in the same order (kernels of convolutions).
    """

    name: str
    part: int | None = None
    groups: int = 1
    axis: int = 0
    transposed: bool = False
    shape: Shape | None = None


Table = Mapping[str, str | Place]


def fused(
    name: str, *ours: str, groups: int = 1, axis: int = 0, transposed: bool = False
) -> dict[str, Place]:
    """Several of ours in one tensor, in this order."""
    return {our: Place(name, part, groups, axis, transposed) for part, our in enumerate(ours)}


def layer_names(
    theirs: str, parts: Mapping[str, str | Place], stack: str = "decoder"
) -> dict[str, str | Place]:
    """Weight and bias of each part of a stack's layers, ours to theirs."""
    found: dict[str, str | Place] = {}
    for our, their in parts.items():
        place = Place(their) if isinstance(their, str) else their
        ours = f"{stack}.layers.{{layer}}.{our}"
        found[f"{ours}.weight"] = replace(place, name=f"{theirs}.{place.name}.weight")
        # a vector has no second axis to exchange
        found[f"{ours}.bias"] = replace(
            place, name=f"{theirs}.{place.name}.bias", transposed=False, shape=None
        )
    return found


class Piece(NamedTuple):
    """A tensor of ours, or one item of its first axis, within a tensor of theirs."""

    ours: str
    item: int | None
    place: Place
    shape: Shape


def pieces(ours: Mapping[str, Shape], table: Table) -> Iterator[Piece]:
    """What the files hold of these tensors, one at a time: a configuration may call for any number."""
    for name, shape in ours.items():
        place = _place(name, table)
        if not COUNTED.search(place.name):
            yield Piece(name, None, place, shape)
            continue
        for index in range(shape[0]):
            counted = replace(place, name=COUNTED.sub(str(index), place.name))
            yield Piece(name, index, counted, shape[1:])


def _place(ours: str, table: Table) -> Place:
    number = re.search(r"layers\.(\d+)\.", ours)
    general = ours.replace(f"layers.{number[1]}.", "layers.{layer}.", 1) if number else ours
    found = table.get(ours, table.get(general))
    if found is None:
        raise CheckpointError(f"No checkpoint name is known for {ours}.")
    place = Place(found) if isinstance(found, str) else found
    return replace(place, name=place.name.replace("{layer}", number[1] if number else ""))


class WeightMap:
    """Tensors of ours, and those of a checkpoint that hold the same values."""

    def __init__(self, ours: Mapping[str, Shape], table: Table):
        self.ours: dict[str, list[Piece]] = {}
        self.theirs: dict[str, list[Piece]] = {}
        for piece in pieces(ours, table):
            self.ours.setdefault(piece.ours, []).append(piece)
            self.theirs.setdefault(piece.place.name, []).append(piece)
        for together in self.theirs.values():
            together.sort(key=lambda piece: piece.place.part or 0)

    def shape(self, theirs: str) -> Shape:
        """That of a tensor in the files."""
        together = self.theirs[theirs]
        _, _, place, first = together[0]
        if place.shape is not None:
            return place.shape
        whole = list(first)
        if place.part is not None:
            whole[place.axis] = sum(piece.shape[place.axis] for piece in together)
        if place.transposed:
            whole[-2], whole[-1] = whole[-1], whole[-2]
        return tuple(whole)

    def read(self, ours: str, fetch: Fetch) -> np.ndarray:
        """A tensor of ours, from theirs by name; a view where the values lie there as here."""
        found = [self._taken(piece, fetch(piece.place.name)) for piece in self.ours[ours]]
        return found[0] if self.ours[ours][0].item is None else np.stack(found)

    def write(self, theirs: str, fetch: Fetch) -> np.ndarray:
        """A tensor of theirs, from ours by name; a view where the values lie here as there."""
        together = self.theirs[theirs]
        values = [
            fetch(piece.ours) if piece.item is None else fetch(piece.ours)[piece.item] for piece in together
        ]
        place = together[0].place
        whole = values[0] if place.part is None else _joined(values, place)
        if place.transposed:
            whole = whole.swapaxes(-1, -2)
        return whole if place.shape is None else whole.reshape(place.shape)

    def _taken(self, piece: Piece, whole: np.ndarray) -> np.ndarray:
        place = piece.place
        if place.shape is not None:
            whole = whole.reshape(piece.shape)
        if place.transposed:
            whole = whole.swapaxes(-1, -2)
        if place.part is None:
            return whole
        before = [p for p in self.theirs[place.name] if (p.place.part or 0) < place.part]
        start = sum(p.shape[place.axis] for p in before) // place.groups
        size = piece.shape[place.axis] // place.groups
        outer = (slice(None),) * (place.axis + 1)
        return _grouped(whole, place)[(*outer, slice(start, start + size))].reshape(piece.shape)


def _grouped(values: np.ndarray, place: Place) -> np.ndarray:
    """With the axis of the parts as two: the groups, and what stands in each."""
    shape, axis = values.shape, place.axis
    return values.reshape(*shape[:axis], place.groups, -1, *shape[axis + 1 :])


def _joined(values: Sequence[np.ndarray], place: Place) -> np.ndarray:
    axis = place.axis
    whole = np.concatenate([_grouped(each, place) for each in values], axis + 1)
    return whole.reshape(*whole.shape[:axis], -1, *whole.shape[axis + 2 :])
