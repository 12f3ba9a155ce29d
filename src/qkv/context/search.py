"""LongRoPE's divisors for a model that brings none, searched on a text. Ding et al. 2024, section 3.

As there, the search begins with the divisors that linear interpolation, NTK and YaRN amount to, changes and
crosses the best, and never slows a fast pair more than a slower one. Each list is judged by the loss of a
whole text past the original length. It is small: a few lists, where the paper tries thousands; and like
deployed models it has no first positions that stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from qkv.context.extend import EXTENSIONS, Stretch, slowed
from qkv.errors import RequestError
from qkv.spec import Interpolation, Model, Rotary
from qkv.spec.rotary import Divided, Scaling, inverse_frequencies

KNOWN = ("linear", "ntk", "yarn")
PARENTS = 3  # of the best so far
STEP = 0.3  # of the logarithm of the factor: how far a change goes
BEYOND = 1.25  # times the factor: the most that a pair is divided by
SEED = 0


@dataclass(frozen=True)
class Divisors:
    """What pairs are divided by, the fast first, in rotary positions of one base and number of dims."""

    theta: float
    dims: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Searched:
    """The best of `tried` lists: its loss in nats on the text that was searched on, and of the known ones."""

    divisors: tuple[Divisors, ...]
    loss: float
    known: dict[str, float]
    tried: int


def search(
    model: Model,
    by: Stretch,
    tries: int,
    loss: Callable[[Model], float],
    told: Callable[[str], None] = lambda what: None,
) -> Searched:
    """The divisors, of so many lists that are tried, with which the model has the least `loss`.

    Raises RequestError for no more lists than are known, UnsupportedError as `extended` does.
    """
    check_tries(tries)
    random = np.random.default_rng(SEED)
    found: list[tuple[float, tuple[Divisors, ...]]] = []
    for number in range(tries):
        told(f"divisors {number + 1} of {tries}")
        if number < len(KNOWN):
            candidate = known(model, KNOWN[number], by)
        else:
            candidate = _next(random, [each for _, each in sorted(found, key=lambda one: one[0])], by.factor)
        found.append((loss(divided(model, candidate, by)), candidate))
    least, best = min(found, key=lambda one: one[0])
    losses = {kind: one for kind, (one, _) in zip(KNOWN, found, strict=False)}
    return Searched(best, least, losses, tries)


def check_tries(tries: int) -> None:
    if tries <= len(KNOWN):
        raise RequestError(
            f"search is {tries}; {len(KNOWN)} lists are known ({', '.join(KNOWN)}): it must be more."
        )


def known(model: Model, kind: str, by: Stretch) -> tuple[Divisors, ...]:
    """What a method amounts to, its temperature aside: one list for each base and number of dims."""
    found: dict[tuple[float, int], Divisors] = {}

    def note(position: Rotary, dims: int) -> Scaling:
        scaled, _ = EXTENSIONS[kind].make(position, dims, by).frequencies(position.theta, dims, by.length)
        values = inverse_frequencies(position.theta, dims) / scaled.astype(np.float64)
        # frequencies are fp32: their last digits are no part of a method
        found[position.theta, dims] = Divisors(position.theta, dims, tuple(values.round(6).tolist()))
        return Interpolation(1.0)

    slowed(model, note)
    return tuple(found.values())


def divided(model: Model, divisors: Sequence[Divisors], by: Stretch) -> Model:
    """The model with these divisors and LongRoPE's temperature."""
    values = {(one.theta, one.dims): one.values for one in divisors}
    return slowed(model, lambda position, dims: Divided(values[position.theta, dims], by.temperature))


def _next(random: Generator, ranked: Sequence[tuple[Divisors, ...]], factor: float) -> tuple[Divisors, ...]:
    """One of the best, or two of them crossed, changed in a run of pairs; none that was there already."""
    while True:
        one, other = random.integers(min(PARENTS, len(ranked)), size=2)
        child = [
            replace(a, values=_values(random, a.values, b.values, factor))
            for a, b in zip(ranked[one], ranked[other], strict=True)
        ]
        if tuple(child) not in ranked:
            return tuple(child)


def _values(
    random: Generator, first: Sequence[float], second: Sequence[float], factor: float
) -> tuple[float, ...]:
    count = len(first)
    cut = int(random.integers(count + 1))
    values: NDArray[np.float64] = np.array([*first[:cut], *second[cut:]])
    start, end = sorted(random.integers(count + 1, size=2).tolist())
    values[start:end] *= np.exp(STEP * np.log(factor) * random.standard_normal())
    ordered = np.maximum.accumulate(np.clip(values, 1.0, BEYOND * factor))
    return tuple(ordered.tolist())
