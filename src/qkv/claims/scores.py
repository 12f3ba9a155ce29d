"""How good translations are: BLEU and chrF of a whole corpus, from counts that add up over sentences.

Counts of a sentence are a row, so that the score of any set of sentences (a bucket of lengths, a draw
of a bootstrap) is the score of the sum of their rows. Scores are from 0 to 100.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qkv.errors import RequestError

ORDER = 4  # BLEU: n-grams of 1 to 4 symbols
CHARACTERS, BETA = 6, 2  # chrF: n-grams of 1 to 6 characters; recall counts twice as much as precision

Row = NDArray[np.int64]
Score = Callable[[Row], float]  # of the sum of rows


def bleu_row(said: Sequence[str], reference: Sequence[str]) -> Row:
    """(10,): the n-grams of 1 to 4 that match, as many as were said, the length said, and the reference's.

    An n-gram matches at most as often as the reference has it: the modified precision of Papineni et al.
    2002, section 2.1.
    """
    matches, totals = [], []
    for n in range(1, ORDER + 1):
        mine, theirs = _grams(said, n), _grams(reference, n)
        matches.append((mine & theirs).total())
        totals.append(mine.total())
    return np.array([*matches, *totals, len(said), len(reference)], np.int64)


def bleu(row: Row) -> float:
    """Of summed `bleu_row`s: the geometric mean of four precisions, times the brevity penalty.

    Papineni et al. 2002, section 2.3. The first precision without a match counts as half a match, the
    next as a quarter, and so on, as mteval-v13a and sacreBLEU do it; without any match, or
    where nothing is as long as four symbols, it is 0.
    """
    matches, totals = row[:ORDER], row[ORDER : 2 * ORDER]
    said, reference = int(row[-2]), int(row[-1])
    if not matches.any() or not totals.all():
        return 0.0
    logs, less = 0.0, 1.0
    for match, total in zip(matches.tolist(), totals.tolist(), strict=True):
        if match == 0:
            less /= 2
        logs += math.log((match or less) / total)
    brevity = 1.0 if said >= reference else math.exp(1 - reference / said)
    return 100 * brevity * math.exp(logs / ORDER)


def chrf_row(said: str, reference: str) -> Row:
    """(18,): for n of 1 to 6 the n-grams of characters said, those of the reference, and the matches.

    White space does not count. What was said counts only for n that the reference is long enough for, as
    in sacreBLEU.
    """
    mine, theirs = "".join(said.split()), "".join(reference.split())
    row = []
    for n in range(1, CHARACTERS + 1):
        one, two = _grams(mine, n), _grams(theirs, n)
        row += [one.total() if two else 0, two.total(), (one & two).total()]
    return np.array(row, np.int64)


def chrf(row: Row) -> float:
    """Of summed `chrf_row`s: F of the mean precision and the mean recall, beta 2. Popović 2015, equation 1.

    The means are over the n for which both sides have any.
    """
    said, reference, match = row.reshape(CHARACTERS, 3).T
    both = (said > 0) & (reference > 0)
    if not match.any():
        return 0.0
    precision = float((match[both] / said[both]).mean())
    recall = float((match[both] / reference[both]).mean())
    return 100 * (1 + BETA**2) * precision * recall / (BETA**2 * precision + recall)


def corpus(rows: Sequence[Row] | NDArray[np.int64], score: Score) -> float:
    """The score of all these sentences together. Raises RequestError for none."""
    if not len(rows):
        raise RequestError("There are no sentences to score; give at least one.")
    return score(np.sum(rows, axis=0))


def resampled(rows: NDArray[np.int64], score: Score, draws: int, seed: int) -> list[float]:
    """The score of so many draws, with replacement, of as many sentences as there are. Koehn 2004, section 4.

    Systems with equal numbers of sentences get the same draws from the same seed: compare them draw by draw.
    """
    generator = np.random.default_rng(seed)
    places = generator.integers(len(rows), size=(draws, len(rows)))
    return [corpus(rows[chosen], score) for chosen in places]


def _grams(symbols: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(symbols[i : i + n]) for i in range(len(symbols) - n + 1))
