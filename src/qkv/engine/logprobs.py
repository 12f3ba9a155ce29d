"""Log-probabilities: the model's own, and those a token is drawn by."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qkv.engine.sampling import Sampling, candidates, likeliest

Kind = Literal["raw", "processed"]


class Summary(NamedTuple):
    """Of a row of logits: the first of the likeliest tokens, its logit, and ln of the sum of all e^logit."""

    best: int
    top: float
    log_sum: float


class Logprobs:
    """Of one place of a text.

    "raw" are the model's own. "processed" are those of the distribution the token is drawn from,
    after biases, penalties, temperature and filters; at temperature 0, where nothing is drawn, after
    biases and penalties; in a beam search (`summed`) the numbers that it adds up.
    """

    def __init__(
        self,
        logits: np.ndarray,
        scores: np.ndarray,
        sampling: Sampling,
        kind: Kind,
        summed: bool = False,
        summary: Summary | None = None,
    ):
        self.summary = summary
        self.logits, self.scores, self.sampling, self.kind = logits, scores, sampling, kind
        self.summed = summed

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """(vocab,); -inf for what cannot be drawn."""
        if self.kind == "raw":
            return log_softmax(self.logits)
        if self.summed:
            return np.asarray(self.scores, np.float64)
        if self.sampling.temperature == 0:
            return log_softmax(self.scores)
        order, shares = candidates(np.asarray(self.scores, np.float64), self.sampling)
        values = np.full(len(self.scores), -np.inf)
        values[order] = np.log(shares / shares.sum())
        return values

    def of(self, token: int) -> float:
        if self.kind == "raw" and "values" not in vars(self):
            total = log_sum(self.logits) if self.summary is None else self.summary.log_sum
            return float(self.logits[token]) - total
        return float(self.values[token])

    def top(self, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens and theirs, falling; fewer where no more are possible."""
        if not count:
            return []
        found = likeliest(self.values, count)
        return [(int(token), self.of(token)) for token in found if np.isfinite(self.values[token])]


def log_sum(logits: np.ndarray) -> float:
    """The logarithm of the sum of exponentials, in the logits' type: a few units in its last place off."""
    top = logits.max()
    shifted = logits - top
    return float(top) + math.log(np.exp(shifted, out=shifted).sum())


def log_softmax(scores: np.ndarray) -> NDArray[np.float64]:
    shifted = np.asarray(scores, np.float64) - scores.max()
    values: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return values
