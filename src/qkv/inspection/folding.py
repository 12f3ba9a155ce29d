"""A stack's layers with repetition folded, in the order in which they run."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from qkv.spec import Layer, Stack


@dataclass(frozen=True)
class Run:
    """Equal layers one after another: how many, and every place in the stack where such a layer stands."""

    layer: Layer
    count: int
    at: tuple[int, ...]


@dataclass(frozen=True)
class Fold:
    """Runs in order, gone through `rounds` times, then once more for the first `rest` layers.

    `rounds` is 0 where the layers follow no such order; then a run is a kind of layer and its
    places say where it stands.
    """

    runs: tuple[Run, ...]
    rounds: int = 1
    rest: int = 0

    def words(self) -> str:
        """How the runs repeat, or nothing where they do not."""
        if self.rounds == 1:
            return ""
        if self.rounds == 0:
            return "in the order of their numbers"
        size = sum(run.count for run in self.runs)
        rest = f", then the first {self.rest} once more" if self.rest else ""
        return f"{self.rounds} rounds of {size} layers{rest}"


def folded(stack: Stack) -> Fold:
    """One run for each kind of layer if they stand in blocks; else the shortest round that repeats."""
    layers, depth = stack.layers, len(stack.layers)
    kinds = list(dict.fromkeys(layers))
    number = {layer: i for i, layer in enumerate(kinds)}
    order = [number[layer] for layer in layers]
    places = [tuple(i for i, kind in enumerate(order) if kind == wanted) for wanted in range(len(kinds))]

    def runs(part: list[int]) -> tuple[Run, ...]:
        return tuple(Run(kinds[kind], len(list(same)), places[kind]) for kind, same in groupby(part))

    if len(runs(order)) == len(kinds):
        return Fold(runs(order))
    for size in range(2, depth // 2 + 1):
        if all(kind == order[i % size] for i, kind in enumerate(order)):
            return Fold(runs(order[:size]), depth // size, depth % size)
    return Fold(tuple(Run(kind, len(at), at) for kind, at in zip(kinds, places, strict=True)), 0)
