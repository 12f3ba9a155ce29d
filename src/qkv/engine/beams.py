"""Beam search: which of all continuations are kept. Numbers only; no model, no text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

import numpy as np

from qkv.errors import RequestError
from qkv.generation_config import BEAMS, Bounds

if TYPE_CHECKING:
    from jaxtyping import Float

T = TypeVar("T")


@dataclass(frozen=True)
class BeamSearch:
    """A search for the likeliest answer, `width` unfinished ones at a time.

    An answer's score is the sum of its tokens' log-probabilities, as biases and penalties change them,
    divided by length ** length_penalty; the length counts the generated tokens, an end included,
    and never the prompt: 0 compares sums, above 0 favours long answers. `early_stopping` True stops
    once `width` answers have ended; False also when the best unfinished one would, did it end here,
    score no better than the worst of those; "never" only when it could not whatever followed, as
    far as the limit on length shows.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, value, bounds in (
            ("beams", self.width, BEAMS),
            ("length_penalty", self.length_penalty, Bounds(Real, -10, 10)),
        ):
            if not bounds.hold(value):
                raise RequestError(f"{name} is {value!r}; it must be {bounds}.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f'early_stopping is {self.early_stopping!r}; it must be true, false or "never".'
            )

    def score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty


@dataclass(frozen=True)
class Hypothesis(Generic[T]):
    """An answer, ended or not: its tokens' log-probabilities summed, and what its owner keeps with it."""

    length: int
    total: float
    kept: T


class Beams(Generic[T]):
    """The search of one request. `extend` says what becomes of an answer with one more token.

    It is given the answer, its row among `live`, and the token, and gives what to keep and whether
    the answer ends there.
    """

    def __init__(
        self,
        search: BeamSearch,
        limit: int,
        start: T,
        extend: Callable[[Hypothesis[T], int, int], tuple[T, bool]],
    ):
        self.search, self.limit, self.extend = search, limit, extend
        self.live: list[Hypothesis[T]] = [Hypothesis(0, 0.0, start)]
        self.ended: list[tuple[float, Hypothesis[T]]] = []  # the best `width`, best first

    def step(self, logprobs: Float[np.ndarray, "live vocab"]) -> list[tuple[int, int]]:
        """Continues every live answer; for each that is live now, the row it goes on from and its token.

        An answer that ends is kept only if it is among the best `width` continuations of this step,
        as one far down would otherwise fill a place. None is live any more when the search is over.
        """
        width = self.search.width
        totals = logprobs + np.array([hypothesis.total for hypothesis in self.live])[:, None]
        live: list[Hypothesis[T]] = []
        moves: list[tuple[int, int]] = []
        for rank, (row, token) in enumerate(_ranked(totals, 2 * width)):
            if len(live) == width and rank >= width:
                break
            before = self.live[row]
            kept, ends = self.extend(before, row, token)
            after = Hypothesis(before.length + 1, float(totals[row, token]), kept)
            if not ends and len(live) < width:
                live.append(after)
                moves.append((row, token))
            elif ends and rank < width:
                self.ended.append((self.search.score(after.total, after.length), after))
        self.ended = sorted(self.ended, key=lambda each: -each[0])[:width]
        over = not live or self._settled(live[0])
        self.live = [] if over else live
        return [] if over else moves

    def _settled(self, best: Hypothesis[T]) -> bool:
        """Whether what has ended is taken for the answer."""
        search = self.search
        if len(self.ended) < search.width:
            return False
        if search.early_stopping is True:
            return True
        furthest = search.early_stopping == "never" and search.length_penalty > 0
        length = self.limit if furthest else best.length
        return search.score(best.total, length) <= self.ended[-1][0]


def _ranked(totals: np.ndarray, count: int) -> Iterator[tuple[int, int]]:
    """Rows and columns of what is possible, the largest and the first among equals first."""
    flat, columns = totals.ravel(), totals.shape[1]
    at = np.arange(len(flat))
    if count < len(flat):
        at = np.flatnonzero(flat >= np.partition(flat, -count)[-count])
    for part in (at, None):
        if part is None:  # seldom: many of the best have ended
            part = np.setdiff1d(np.arange(len(flat)), at, assume_unique=True)
        for place in part[np.argsort(-flat[part], kind="stable")]:
            if flat[place] == -math.inf:
                return
            yield int(place) // columns, int(place) % columns
