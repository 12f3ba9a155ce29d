"""Other values put in the place of parts, each row of a pass with its own, and what becomes of the metric."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qkv.errors import RequestError
from qkv.explanation.footprint import Need
from qkv.explanation.metric import Metric
from qkv.explanation.parts import Part, Parts
from qkv.explanation.reading import Place, Reading
from qkv.explanation.result import gathered

Index = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Change:
    """A part, and what is put there: a value that broadcasts to it."""

    part: Part
    value: Tensor


class Replacement(Protocol):
    """What stands in for a part."""

    @property
    def name(self) -> str:
        """In words: "zero"."""
        ...

    def values(self, reading: Reading, points: Sequence[str]) -> list[Mapping[str, Tensor]]:
        """For each point what one row holds instead, or a number as a tensor without axes.

        Several of these are alternatives: effects are the mean over them.
        """
        ...


@dataclass(frozen=True)
class Zero:
    """Nothing."""

    name: str = "zero"

    def values(self, reading: Reading, points: Sequence[str]) -> list[Mapping[str, Tensor]]:
        return [dict.fromkeys(points, torch.zeros((), device=reading.device))]


@dataclass(frozen=True, eq=False)
class Mean:
    """What stands there in the mean over the rows of a reference, place by place.

    The reference reads rows as long as the prompt, with the same model.
    """

    reference: Reading

    @property
    def name(self) -> str:
        return f"mean over {self.reference.batch:,} rows"

    def values(self, reading: Reading, points: Sequence[str]) -> list[Mapping[str, Tensor]]:
        reading.alike(self.reference)
        total: dict[str, Tensor] = {}
        for piece in self.reference.pieces(points, reading.rows_of_reference(points, kept=1)):
            for point, value in piece.items():
                total[point] = total.get(point, 0) + value.sum(0)
        return [{point: value / self.reference.batch for point, value in total.items()}]


@dataclass(frozen=True, eq=False)
class Resample:
    """What stands there in each row of a reference; the effect is the mean over these.

    So no draw is needed, and the same comes out every time. Chan et al. 2022 (causal scrubbing).
    """

    reference: Reading

    @property
    def name(self) -> str:
        return f"each of {self.reference.batch:,} other rows"

    def values(self, reading: Reading, points: Sequence[str]) -> list[Mapping[str, Tensor]]:
        reading.alike(self.reference)
        batch = self.reference.batch
        at_once = reading.rows_of_reference(points, kept=batch)
        pieces = list(self.reference.pieces(points, at_once))
        return [
            {point: value[row % at_once] for point, value in pieces[row // at_once].items()}
            for row in range(batch)
        ]


@dataclass(frozen=True)
class Blank:
    """What stands there when every token of the prompt is this one: a padding or mask token, say."""

    token: int

    @property
    def name(self) -> str:
        return f"token {self.token}"

    def values(self, reading: Reading, points: Sequence[str]) -> list[Mapping[str, Tensor]]:
        return Resample(blanked(reading, self.token)).values(reading, points)


def blanked(reading: Reading, token: int) -> Reading:
    """A reading of as many tokens, all of them this one, on every side that reads tokens."""
    given = [
        side.given if side.given.is_floating_point() else torch.full_like(side.given, token)
        for side in reading.sides
    ]
    return Reading(reading.model, given[-1], given[0] if len(given) > 1 else None, types=reading.types)


def substituted(reading: Reading, parts: Iterable[Part], by: Replacement) -> list[list[Change]]:
    """The changes that put `by` in the place of all these parts at once, one list an alternative."""
    parts = list(parts)
    points = list(dict.fromkeys(part.point for part in parts))
    return [
        [Change(part, _part(values[part.point], part)) for part in parts]
        for values in by.values(reading, points)
    ]


def measure(
    reading: Reading, rows: Sequence[Sequence[Change]], metric: Metric, kept: Sequence[Tensor] = ()
) -> np.ndarray:
    """The metric where each row has its own changes, (rows,).

    Rows whose first change is in the same layer run together, from that layer on, as many at a time as
    `needed` says; later changes of a row are made to what the earlier ones led to. A row without changes
    is the model as it is. `kept` are tensors that are held meanwhile, for the reading's `memory` to count.
    """
    places, out = reading.places(metric), np.empty(len(rows))
    for start, some in _batches(reading, rows, needed(reading, rows, metric, kept).rows):
        with torch.no_grad():
            tap = reading.taps(replacements([rows[row] for row in some]))
            answer = reading.run(tap, start=start, rows=len(some), places=places)
            out[some] = metric(answer).double().cpu().numpy()
    return out


def needed(
    reading: Reading,
    rows: Sequence[Sequence[Change]],
    metric: Metric | None = None,
    kept: Sequence[Tensor] = (),
    points: Sequence[str] = (),
) -> Need:
    """What `measure` takes of memory for these rows, or `record`, which keeps what it finds at points.

    Raises RequestError where the reading's `memory` does not hold it.
    """
    held, together = list(kept), Counter[Place]()
    touched: dict[Place, set[str]] = {}
    for changes in rows:
        start = _start(reading.one(), changes)
        together[start] += 1
        touched.setdefault(start, set(points)).update(change.part.point for change in changes)
        held += [change.value for change in changes]
    most = max(together.values(), default=1)
    return reading.need(touched.values(), held, metric, most, dict.fromkeys(points, len(rows)))


def record(
    reading: Reading, rows: Sequence[Sequence[Change]], points: Sequence[str]
) -> list[dict[str, Tensor]]:
    """What each row holds at these points, with its changes; a point that none of them reaches as it is.

    Nothing behind the last of the points is computed.
    """
    last = max(map(reading.place, points))
    end = Place(last.side, max(last.layer, 0) + 1) if last.layer < reading.sides[last.side].depth else None
    out: list[dict[str, Tensor]] = [{} for _ in rows]
    own = {point: value[0] for point, value in reading.read(points).items()}
    for start, some in _batches(reading, rows, needed(reading, rows, points=points).rows):
        found = [point for point in points if reading.place(point) >= start]
        if found:
            changes = replacements([rows[row] for row in some])
            taps = reading.taps({**dict.fromkeys(found), **changes})
            with torch.no_grad():
                reading.run(taps, start=start, rows=len(some), places=(), end=end)
        for i, row in enumerate(some):
            out[row] = {point: taps[point][i] if point in found else own[point] for point in points}
    return out


def effects(
    reading: Reading, parts: Parts, by: Replacement, metric: Metric
) -> tuple[np.ndarray, float, dict[str, float]]:
    """The metric with each of the parts replaced, on the parts' axes; without; and facts of the run."""
    before = copy(reading.counts)
    base = float(reading.one().value(metric))
    points = list(dict.fromkeys(part.point for group in parts.parts.values() for part in group))
    found: dict[Index, float] = dict.fromkeys(parts.parts, 0.0)
    alternatives, need = by.values(reading, points), Need()
    kept = [value for values in alternatives for value in values.values()]
    for values in alternatives:
        rows = [[Change(p, _part(values[p.point], p)) for p in group] for group in parts.parts.values()]
        need = max(need, needed(reading, rows, metric, kept))
        for index, value in zip(found, measure(reading, rows, metric, kept), strict=True):
            found[index] += float(value) / len(alternatives)
    return gathered(found, parts.axes), base, {"own": base, **reading.since(before), **need.facts()}


def replacements(rows: Sequence[Sequence[Change]]) -> dict[str, partial[Tensor]]:
    """For a tap of a batch of these rows: what makes the changes at each point."""
    by_point: dict[str, list[tuple[int, Change]]] = {}
    for row, changes in enumerate(rows):
        for change in changes:
            by_point.setdefault(change.part.point, []).append((row, change))
    return {point: partial(_put, changes) for point, changes in by_point.items()}


def _put(changes: Sequence[tuple[int, Change]], value: Tensor) -> Tensor:
    value = value.clone()
    for row, change in changes:
        try:
            value[(row, *change.part.where)] = change.value.to(value)
        except (IndexError, RuntimeError):
            shape, got = tuple(value.shape[1:]), tuple(change.value.shape)
            raise RequestError(
                f"{change.part.point!r} holds {shape} in a row, and {change.part.where} of it cannot become "
                f"a value of shape {got}."
            ) from None
    return value


def _part(value: Tensor, part: Part) -> Tensor:
    try:
        return value if value.ndim == 0 else value[part.where]
    except IndexError:
        raise RequestError(f"{part.point!r} holds {tuple(value.shape)}, which has no {part.where}.") from None


def _start(reading: Reading, changes: Sequence[Change]) -> Place:
    """Where a row begins: at the layer of its first change, or, without any, before the last norm."""
    end = Place(len(reading.sides) - 1, reading.sides[-1].depth)
    return min((reading.place(change.part.point) for change in changes), default=end)


def _batches(
    reading: Reading, rows: Sequence[Sequence[Change]], most: int
) -> Iterator[tuple[Place, list[int]]]:
    """Rows that can begin at the same place, so many at most, in the order of these places."""
    by_start: dict[Place, list[int]] = {}
    for row, changes in enumerate(rows):
        by_start.setdefault(_start(reading, changes), []).append(row)
    for start, members in sorted(by_start.items()):
        for first in range(0, len(members), most):
            yield start, members[first : first + most]
