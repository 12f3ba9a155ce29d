"""Whether a score of tokens says what the model in fact leans on: measured, and beside chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

import numpy as np

from qkv.errors import RequestError
from qkv.explanation.intervention import Change, Replacement, measure, substituted
from qkv.explanation.metric import Metric
from qkv.explanation.parts import Part, tokens
from qkv.explanation.reading import Reading
from qkv.explanation.result import Axis, Evidence

FRACTIONS = (0.1, 0.2, 0.5)
Scores = Evidence | np.ndarray | Sequence[float]


def comprehensiveness(
    reading: Reading,
    metric: Metric,
    scores: Scores,
    by: Replacement,
    fractions: Sequence[float] = FRACTIONS,
    draws: int = 8,
    seed: int = 0,
    side: int | None = None,
) -> Evidence:
    """What the metric loses with the tokens of highest score: as it is, less without them.

    Axes (ranking, fraction): by these scores, and the mean of `draws` random orders of a fixed seed,
    without which the number says little. High for a faithful score. A fraction of the tokens is
    rounded up. `side`: only the tokens of this side are scored and taken out (0 is the source of an
    encoder-decoder). DeYoung et al. 2020 (ERASER), section 4.
    """
    rankings = _rankings(reading, scores, draws, seed, side)
    return _top(reading, metric, rankings, by, fractions, "comprehensiveness", side)


def sufficiency(
    reading: Reading,
    metric: Metric,
    scores: Scores,
    by: Replacement,
    fractions: Sequence[float] = FRACTIONS,
    draws: int = 8,
    seed: int = 0,
    side: int | None = None,
) -> Evidence:
    """What the metric loses with all tokens but those of highest score. Low for a faithful score.

    As `comprehensiveness`.
    """
    rankings = _rankings(reading, scores, draws, seed, side)
    return _top(reading, metric, rankings, by, fractions, "sufficiency", side)


def deletion(
    reading: Reading, metric: Metric, scores: Scores, by: Replacement, draws: int = 8, seed: int = 0
) -> Evidence:
    """The metric as tokens are replaced one after another, those of highest score first.

    Axes (ranking, replaced): from none to all. `facts["area"]` and `facts["random area"]` are the means
    of the curves (trapezoids); the lower, the more faithful. Petsiuk et al. 2018, section 3.2.
    """
    return _curve(reading, metric, _rankings(reading, scores, draws, seed), by, "deletion")


def insertion(
    reading: Reading, metric: Metric, scores: Scores, by: Replacement, draws: int = 8, seed: int = 0
) -> Evidence:
    """The metric as tokens come back one after another, those of highest score first, from none.

    As `deletion`, but the higher, the more faithful.
    """
    return _curve(reading, metric, _rankings(reading, scores, draws, seed), by, "insertion")


def spearman(a: Scores, b: Scores) -> float:
    """Rank correlation, -1 to 1, of equally many numbers; equal ones share the mean of their ranks.

    Pairs with a NaN are left out; NaN where one side has fewer than two different numbers.
    Spearman 1904.
    """
    x, y = (np.asarray(_values(one), dtype=np.float64).reshape(-1) for one in (a, b))
    if len(x) != len(y):
        raise RequestError(f"{len(x):,} numbers cannot be compared with {len(y):,}.")
    there = ~(np.isnan(x) | np.isnan(y))
    x, y = ranks(x[there]), ranks(y[there])
    x, y = x - x.mean() if len(x) else x, y - y.mean() if len(y) else y
    sizes = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / sizes) if sizes > 0 else float("nan")


def ranks(values: np.ndarray) -> np.ndarray:
    """From 1, smallest first; equal values share the mean of their places."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return ((2 * last - counts + 1) / 2)[where.reshape(-1)]


def agreement(evidence: Evidence, effects: Evidence) -> Evidence:
    """Spearman correlation of scores of tokens with measured effects, for each place of the other axes.

    The last axis of `evidence` must be the tokens of `effects`, as of `rollout(reading).at(query=-1)`
    beside `occlusion(...)`. Abnar and Zuidema 2020, section 4.
    """
    if len(effects.axes) != 1 or evidence.values.shape[-1:] != effects.values.shape:
        raise RequestError("The last axis of the scores must be the tokens of the effects.")
    flat = evidence.values.reshape(-1, evidence.values.shape[-1])
    found = np.array([spearman(row, effects.values) for row in flat]).reshape(evidence.values.shape[:-1])
    score = f"Spearman correlation with {effects.method}, -1 to 1"
    method = f"agreement of {evidence.method}"
    return Evidence(method, found, evidence.axes[:-1], score, effects.baseline, effects.metric)


def _values(scores: Scores) -> np.ndarray:
    return scores.values if isinstance(scores, Evidence) else np.asarray(scores, dtype=np.float64)


def _rankings(
    reading: Reading, scores: Scores, draws: int, seed: int, side: int | None = None
) -> list[np.ndarray]:
    """The order of the tokens by score, highest first, and random ones."""
    values, count = _values(scores), len(tokens(reading, side).parts)
    if values.shape != (count,) or np.isnan(values).any():
        raise RequestError(f"There must be a score for each of the {count:,} tokens; got {values.shape}.")
    if draws < 1:
        raise RequestError("At least one random order is needed to compare with.")
    chance = np.random.default_rng(seed)
    return [np.argsort(-values, kind="stable"), *(chance.permutation(count) for _ in range(draws))]


def _top(
    reading: Reading,
    metric: Metric,
    rankings: Sequence[np.ndarray],
    by: Replacement,
    fractions: Sequence[float],
    method: str,
    side: int | None,
) -> Evidence:
    if not all(0 < fraction <= 1 for fraction in fractions):
        raise RequestError("Fractions of the tokens are above 0 and at most 1.")
    before, count, removed = copy(reading.counts), len(rankings[0]), method == "comprehensiveness"
    counts = [int(np.ceil(fraction * count - 1e-9)) for fraction in fractions]
    sets = [ranking[:n] if removed else ranking[n:] for ranking in rankings for n in counts]
    own = float(reading.value(metric))
    lost = own - _without(reading, metric, sets, by, side).reshape(len(rankings), -1)
    axes = (Axis("ranking", ("given", "random")), Axis("fraction", tuple(f"{f:g}" for f in fractions)))
    facts = {"own": own, **reading.since(before)}
    which = "the" if removed else "all but the"
    score = f"{metric.name} as it is, less without {which} tokens of highest score"
    return Evidence(method, _beside(lost), axes, score, by.name, metric.name, facts)


def _curve(
    reading: Reading, metric: Metric, rankings: Sequence[np.ndarray], by: Replacement, method: str
) -> Evidence:
    before, count = copy(reading.counts), len(rankings[0])
    cut: Callable[[np.ndarray, int], np.ndarray]
    if method == "deletion":
        name, cut = "replaced", lambda ranking, n: ranking[:n]
    else:
        name, cut = "there", lambda ranking, n: ranking[n:]
    sets = [cut(ranking, n) for ranking in rankings for n in range(count + 1)]
    values = _beside(_without(reading, metric, sets, by).reshape(len(rankings), -1))
    areas = (values[:, 1:] + values[:, :-1]).mean(-1) / 2
    facts = {"area": float(areas[0]), "random area": float(areas[1]), **reading.since(before)}
    axes = (Axis("ranking", ("given", "random")), Axis(name, tuple(range(count + 1))))
    return Evidence(method, values, axes, metric.name, by.name, metric.name, facts)


def _beside(rows: np.ndarray) -> np.ndarray:
    """The first row, and the mean of the others."""
    return np.stack([rows[0], rows[1:].mean(0)])


def _without(
    reading: Reading,
    metric: Metric,
    sets: Sequence[np.ndarray],
    by: Replacement,
    side: int | None = None,
) -> np.ndarray:
    """The metric with each of these sets of tokens replaced, (sets,)."""
    whole: list[Part] = [part for group in tokens(reading, side).parts.values() for part in group]
    alternatives: list[list[Change]] = substituted(reading, whole, by)
    found = [
        measure(reading, [[changes[place] for place in some] for some in sets], metric)
        for changes in alternatives
    ]
    return np.asarray(np.mean(found, 0))
