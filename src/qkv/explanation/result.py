"""One kind of result for every method: numbers, what each axis counts, and what a number means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from qkv.errors import RequestError

Label = str | int


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis counts, and the name of each place on it.

    Labels that are numbers (layers, heads) are what one asks by; labels that are texts (tokens) may
    repeat, and are asked by their place.
    """

    name: str
    labels: tuple[Label, ...]

    def place(self, key: Label) -> int:
        """Of a label, or of a place where the labels are texts; negative places count from the end.

        Raises RequestError for what is not on the axis.
        """
        if self.labels.count(key) == 1:
            return self.labels.index(key)
        numbered = all(isinstance(label, int) for label in self.labels)
        if isinstance(key, int) and -len(self.labels) <= key < (0 if numbered else len(self.labels)):
            return key % len(self.labels)
        kind = "stands more than once" if key in self.labels else "is not"
        raise RequestError(f"{key!r} {kind} on the axis {self.name} ({len(self.labels):,} places).")


@dataclass(frozen=True, slots=True)
class Ranked:
    """One number of an Evidence: its labels by axis, its index, and the number."""

    labels: Mapping[str, Label]
    index: tuple[int, ...]
    value: float


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a method found.

    `values` has one axis for each of `axes`; NaN stands where there is nothing to measure, such as the
    ninth head of a layer of eight. `score` says what one number means and in which unit, `baseline`
    against what it was measured, `metric` what of the model's answer was looked at ("" for what looks at
    none, as attention weights do). `facts` are numbers about the whole: the metric with nothing changed,
    the gap of an identity that should hold, and how much was run (`passes` calls of the model, `layers`
    the layers those computed, counted for each row).
    """

    method: str
    values: np.ndarray
    axes: tuple[Axis, ...]
    score: str
    baseline: str = ""
    metric: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = np.array(self.values)
        values = values.astype(np.result_type(values, np.float32))
        sizes = tuple(len(axis.labels) for axis in self.axes)
        if values.shape != sizes:
            raise RequestError(f"The values are {values.shape}, and the labels of their axes {sizes}.")
        values.setflags(write=False)
        object.__setattr__(self, "values", values)

    def __repr__(self) -> str:
        axes = ", ".join(f"{axis.name} {len(axis.labels)}" for axis in self.axes)
        return f"<{self.method} ({axes}): {self.score}>"

    def at(self, **places: Label) -> Evidence:
        """The part at one place of each axis named, without these axes: `at(layer=3, head=1)`.

        Raises RequestError for an axis or a place that is not there.
        """
        names = [axis.name for axis in self.axes]
        for name in places:
            if name not in names:
                raise RequestError(f"There is no axis {name!r}: {', '.join(names) or 'none is left'}.")
        index = tuple(
            axis.place(places[axis.name]) if axis.name in places else slice(None) for axis in self.axes
        )
        left = tuple(axis for axis in self.axes if axis.name not in places)
        return replace(self, values=self.values[index], axes=left)

    def __getitem__(self, key: Label | tuple[Label, ...]) -> Evidence:
        """The part at places of the first axes, in their order: `evidence[3, 1]`."""
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) > len(self.axes):
            raise RequestError(f"{len(keys)} places are asked for, and there are {len(self.axes)} axes.")
        return self.at(**{axis.name: one for axis, one in zip(self.axes, keys, strict=False)})

    def __float__(self) -> float:
        """The number, where one is left."""
        if self.values.size != 1:
            raise RequestError(f"These are {self.values.size:,} numbers, not one: {self!r}.")
        return float(self.values.item())

    def top(self, n: int = 10, key: Callable[[np.ndarray], np.ndarray] = np.abs) -> list[Ranked]:
        """The n numbers of largest `key`, largest first; equal ones in the order of the axes.

        `key` is the size of a number unless given: `np.positive` ranks by the signed number,
        `np.negative` the other way round.
        """
        flat = self.values.reshape(-1)
        there = np.flatnonzero(~np.isnan(flat))
        order = there[np.argsort(-key(flat[there]), kind="stable")][: max(n, 0)]
        return [self._ranked(int(place)) for place in order]

    def _ranked(self, place: int) -> Ranked:
        index = tuple(int(i) for i in np.unravel_index(place, self.values.shape))
        labels = {axis.name: axis.labels[i] for axis, i in zip(self.axes, index, strict=True)}
        return Ranked(labels, index, float(self.values[index]))

    def data(self) -> dict[str, Any]:
        """All of it for JSON: numbers as nested lists, None where there is nothing."""
        return {
            "method": self.method,
            "metric": self.metric,
            "score": self.score,
            "baseline": self.baseline,
            "facts": {name: _number(value) for name, value in self.facts.items()},
            "axes": [{"name": axis.name, "labels": list(axis.labels)} for axis in self.axes],
            "values": _plain(self.values.tolist()),
        }


def numbered(name: str, count: int) -> Axis:
    return Axis(name, tuple(range(count)))


def gathered(found: Mapping[tuple[int, ...], float], axes: Sequence[Axis]) -> np.ndarray:
    """An array with these numbers at their places, and NaN elsewhere."""
    values = np.full([len(axis.labels) for axis in axes], np.nan)
    for index, value in found.items():
        values[index] = value
    return values


def stacked(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Arrays of the same number of axes as one, NaN where one is shorter than the longest."""
    arrays = list(arrays)
    longest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    out = np.full([len(arrays), *longest], np.nan)
    for row, array in zip(out, arrays, strict=True):
        row[tuple(map(slice, array.shape))] = array
    return out


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, list) else _number(value)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
