"""Which tokens an answer leans on, by its gradient at their embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qkv.errors import RequestError
from qkv.explanation.intervention import Replacement, Zero
from qkv.explanation.metric import Metric
from qkv.explanation.parts import tokens
from qkv.explanation.reading import Reading
from qkv.explanation.result import Evidence

NODES = 8  # of Gauss and Legendre's rule, in each piece of the way
SHORTEST = 2.0**-20  # of a piece, to where it ends: what it misses is a jump, and halving would not help

States = list[Tensor]  # the embeddings of each side, (rows, length, width)


def gradient(reading: Reading, metric: Metric) -> Evidence:
    """How steep the metric is at each token's embedding: the length of its gradient. Axis (token).

    Simonyan et al. 2013, section 3.
    """
    own, slopes = _slopes(reading.one(), metric, list(reading.embeddings))
    values = _by_token([slope.norm(dim=-1) for slope in slopes])
    score = f"length of the gradient of the {metric.name}"
    axes = tokens(reading).axes
    return Evidence("gradient", values, axes, score, "", metric.name, {"own": float(own)})


def gradient_times_input(reading: Reading, metric: Metric) -> Evidence:
    """The gradient times the embedding: to first order what the metric loses with it. Axis (token).

    Shrikumar et al. 2016.
    """
    own, slopes = _slopes(reading.one(), metric, list(reading.embeddings))
    values = _by_token([(slope * x).sum(-1) for slope, x in zip(slopes, reading.embeddings, strict=True)])
    axes, score = tokens(reading).axes, f"part of the {metric.name}, to first order"
    facts = {"own": float(own)}
    return Evidence("gradient x input", values, axes, score, "zero", metric.name, facts)


def integrated_gradients(
    reading: Reading,
    metric: Metric,
    by: Replacement = Zero(),
    tolerance: float = 1e-3,
    most: int = 1024,
) -> Evidence:
    """The gradient along the straight way from a baseline to the prompt, times that way. Axis (token).

    The numbers sum to the metric less that of the baseline (completeness: Sundararajan et al. 2017,
    section 3 and proposition 1). The way is cut into pieces of eight steps, and those that miss most of
    their own difference are halved, until what all miss sums to less than `tolerance`, in the metric's
    unit, or `most` steps are taken. `facts`: `own` and `baseline`, the metric at both ends; `gap`, their
    difference less the sum; `missed`, the sum of what each piece misses; `steps`. A gap that is not
    small says that the numbers are not to be trusted: where experts are chosen the metric jumps, which no
    gradient tells.

    `by` gives the embeddings to start from: `Blank(token)`, or zeros, which are no place a model was
    trained at and where norms turn sharply.
    """
    if tolerance <= 0 or most < NODES:
        raise RequestError(f"Integrated gradients need a tolerance above 0 and at least {NODES} steps.")
    before = copy(reading.counts)
    to = list(reading.one().embeddings)
    points = [f"{side.prefix}embedding" for side in reading.sides]
    starts = by.values(reading, points)
    total, facts = np.zeros(sum(x.shape[1] for x in to)), dict.fromkeys(_FACTS, 0.0)
    for values in starts:
        away = [values[point].to(x).expand(x.shape) for point, x in zip(points, to, strict=True)]
        way = _Way(reading, metric, away, to)
        pieces = _cut(way.pieces, tolerance, most // len(starts))
        total += sum(piece.values for piece in pieces) / len(starts)
        found = (pieces[-1].after, pieces[0].before, 0.0, sum(p.missed for p in pieces), len(pieces) * NODES)
        facts = {name: facts[name] + value / len(starts) for name, value in zip(_FACTS, found, strict=True)}
    facts["gap"] = facts["own"] - facts["baseline"] - float(total.sum())
    facts |= reading.since(before)
    score = f"part of the {metric.name} that the token brings"
    axes = tokens(reading).axes
    return Evidence("integrated gradients", total, axes, score, by.name, metric.name, facts)


_FACTS = ("own", "baseline", "gap", "missed", "steps")


@dataclass(frozen=True, eq=False)
class _Piece:
    """A part of the way: what each token brings on it, and the metric at both of its ends."""

    begin: float
    end: float
    values: np.ndarray
    before: float
    after: float

    @property
    def missed(self) -> float:
        return abs(self.after - self.before - float(self.values.sum()))


@dataclass(frozen=True, eq=False)
class _Way:
    """The straight way between two sets of embeddings."""

    reading: Reading
    metric: Metric
    begin: States
    end: States

    def pieces(self, spans: Sequence[tuple[float, float]]) -> list[_Piece]:
        """Each by Gauss and Legendre's rule, and the metric at its two ends."""
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        inside = np.append((nodes + 1) / 2, [0.0, 1.0])
        steps = np.concatenate([begin + (end - begin) * inside for begin, end in spans])
        parts = np.array_split(steps, -(-len(steps) // self.reading.most_rows))
        values, slopes = (np.concatenate(found) for found in zip(*map(self._at, parts), strict=True))
        out = []
        for i, (begin, end) in enumerate(spans):
            here = slice(i * len(inside), i * len(inside) + NODES)
            brought = weights @ slopes[here] * (end - begin) / 2
            out.append(_Piece(begin, end, brought, *map(float, values[here.stop : here.stop + 2])))
        return out

    def _at(self, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The metric (steps,), and its slope along the way by token (steps, token)."""
        ways = [b - a for a, b in zip(self.begin, self.end, strict=True)]
        along = torch.as_tensor(steps, device=self.reading.device, dtype=ways[0].dtype)[:, None, None]
        states = [a + along * way for a, way in zip(self.begin, ways, strict=True)]
        values, slopes = _slopes(self.reading, self.metric, states)
        by_token = [(slope * way).sum(-1) for slope, way in zip(slopes, ways, strict=True)]
        return values.cpu().numpy(), torch.cat(by_token, 1).double().cpu().numpy()


def _cut(
    make: Callable[[Sequence[tuple[float, float]]], list[_Piece]], tolerance: float, most: int
) -> list[_Piece]:
    """Pieces from 0 to 1, in order, all that miss much halved, round by round, until they miss little."""
    pieces = make([(0.0, 1.0)])
    while sum(piece.missed for piece in pieces) > tolerance:
        room = most // NODES - len(pieces)
        long = [piece for piece in pieces if piece.end - piece.begin > SHORTEST * piece.end]
        long = [piece for piece in long if piece.missed > tolerance / (2 * len(pieces))]
        worst = sorted(long, key=lambda piece: -piece.missed)[: max(room, 0)]
        if not worst:
            break
        middles = [(piece.begin + piece.end) / 2 for piece in worst]
        spans = [
            span
            for piece, middle in zip(worst, middles, strict=True)
            for span in ((piece.begin, middle), (middle, piece.end))
        ]
        kept = [piece for piece in pieces if piece not in worst]
        pieces = sorted(kept + make(spans), key=lambda piece: piece.begin)
    return pieces


def _slopes(reading: Reading, metric: Metric, states: States) -> tuple[Tensor, States]:
    """The metric (rows,) and its gradient at these embeddings."""
    leaves = [x.detach().clone().requires_grad_() for x in states]
    places = reading.places(metric)
    with torch.enable_grad():
        values = metric(reading.run(inputs=leaves, places=places))
        slopes = torch.autograd.grad(values.sum(), leaves)
    return values.detach().double(), [slope.detach() for slope in slopes]


def _by_token(sides: Sequence[Tensor]) -> np.ndarray:
    """(1, length) of each side, one behind the other."""
    return torch.cat([side[0].double() for side in sides]).cpu().numpy()
