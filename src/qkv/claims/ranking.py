"""Judges and pictures of translators: orders of BLEU and chrF that draws of the test's sentences bear out.

Figures are those of `translators.measured`. A test is a sample of sentences, so a score above another
counts where it is above in 95 of 100 draws of those sentences, the same for both systems (Koehn 2004). A
system that diverged is below all others, and of its curve over length nothing holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from qkv.charts.pictures import Panel, Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures
from qkv.claims.judging import spread, within

SURE = 0.95
FIRST, LAST = 0, -1  # of the buckets of source length
NAMES = {"bleu": "BLEU", "chrf": "chrF"}

Draws = Float[NDArray[np.float64], " draws"]


def scores_of(figures: Sequence[Figures], system: str, metric: str = "bleu") -> list[float | None]:
    """The score of the whole test, one a seed; None where the training diverged."""
    return [each["systems"][system].get(metric, {}).get("all") for each in figures]


def draws_of(each: Figures, system: str, metric: str = "bleu", bucket: int | None = None) -> Draws:
    """The draws of one seed, of all sentences or of a bucket; a system that diverged has scores below 0."""
    held = each["systems"][system].get(metric)
    if held is None:
        return np.full(len(_any(each)[metric]["draws"]), -1.0)
    return np.array(held["draws"] if bucket is None else held["bucket draws"][bucket], np.float64)


def _any(each: Figures) -> Figures:
    """A system that did not diverge; where all did, draws that are as many as there need be."""
    nothing = {"draws": [0.0], "bucket draws": [[0.0]]}
    known = [system for system in each["systems"].values() if "bleu" in system]
    return known[0] if known else dict.fromkeys(NAMES, nothing)


def above(what: str, figures: Sequence[Figures], high: str, low: str, metric: str = "bleu") -> Check:
    """In every seed the first system scores higher than the second."""
    shares = [float((draws_of(each, high, metric) > draws_of(each, low, metric)).mean()) for each in figures]
    one, two = (spread(scores_of(figures, system, metric), ".1f") for system in (high, low))
    return Check(what, f"{NAMES[metric]} {one} against {two}; {_sure(shares, 'above')}", _all_sure(shares))


def not_below(what: str, figures: Sequence[Figures], one: str, other: str) -> Check:
    """In no seed is the first system's BLEU surely lower than the other's."""
    shares = [float((draws_of(each, one) < draws_of(each, other)).mean()) for each in figures]
    known = [score is not None for score in scores_of(figures, one)]
    scores = (spread(scores_of(figures, system), ".1f") for system in (one, other))
    measured = f"BLEU {' against '.join(scores)}; {_sure(shares, 'below')}"
    return Check(what, measured, all(known) and all(share < SURE for share in shares))


def gap_grows(what: str, figures: Sequence[Figures], high: str, low: str) -> Check:
    """In every seed the first is further above the second in the last bucket than in the first, in BLEU."""
    ends = []
    for each in figures:
        two = (draws_of(each, high, bucket=at) - draws_of(each, low, bucket=at) for at in (FIRST, LAST))
        ends.append(tuple(two))
    shares = [float((last > first).mean()) for first, last in ends]
    first, last = ([_gap(each, high, low, at) for each in figures] for at in (FIRST, LAST))
    measured = f"{spread(last, '.1f')} BLEU on the longest against {spread(first, '.1f')} on the shortest"
    holds = None not in last and _all_sure(shares)
    return Check(what, f"{measured}; {_sure(shares, 'larger')}", holds)


def keeps_more(what: str, figures: Sequence[Figures], more: str, less: str) -> Check:
    """In every seed the first keeps a larger part of its BLEU from the first bucket to the last."""
    shares = []
    for each in figures:
        parts = []
        for system in (more, less):
            first, last = (draws_of(each, system, bucket=at) for at in (FIRST, LAST))
            parts.append(np.divide(last, first, out=np.zeros_like(last), where=first > 0))
        shares.append(float((parts[0] > parts[1]).mean()))
    kept = [[_kept(each, system) for each in figures] for system in (more, less)]
    one, two = (spread(values, ".0%") for values in kept)
    measured = f"{one} of its BLEU on the shortest is left on the longest against {two}"
    holds = all(None not in values for values in kept) and _all_sure(shares)
    return Check(what, f"{measured}; {_sure(shares, 'more')}", holds)


def near(what: str, figures: Sequence[Figures], one: str, other: str, most: float) -> Check:
    """In every seed the BLEU of both differ by at most so much."""
    both = zip(scores_of(figures, one), scores_of(figures, other), strict=True)
    apart = [None if a is None or b is None else a - b for a, b in both]
    return within(what, apart, -most, most, ".1f", " BLEU apart")


def one_seed() -> Check:
    """What a claim says whose systems are trained once."""
    return Check(
        "three seeds give the same order",
        "not measured: ten minutes train every system once; an order that is said to hold does so over "
        "draws of the test's sentences, not over first weights",
        False,
    )


def _gap(each: Figures, high: str, low: str, bucket: int) -> float | None:
    one, two = (_in_bucket(each, system, bucket) for system in (high, low))
    return None if one is None or two is None else one - two


def _kept(each: Figures, system: str) -> float | None:
    first, last = (_in_bucket(each, system, bucket) for bucket in (FIRST, LAST))
    return None if first is None or last is None else last / first if first else 0.0


def _in_bucket(each: Figures, system: str, bucket: int) -> float | None:
    held = each["systems"][system].get("bleu")
    return None if held is None else held["buckets"][bucket]


def _sure(shares: Sequence[float], how: str) -> str:
    return f"{how} in {spread(shares, '.0%')} of draws"


def _all_sure(shares: Sequence[float]) -> bool:
    return all(share >= SURE for share in shares)


def draw(figures: Sequence[Figures]) -> Pictures:
    """BLEU and chrF against the source's length, one curve a system, and how each learned."""
    return {
        "length": picture(*(_by_length(figures, metric) for metric in NAMES)),
        "loss": picture(_losses(figures)),
    }


def _by_length(figures: Sequence[Figures], metric: str) -> Panel:
    first = figures[0]
    series = []
    for system in first["systems"]:
        none = [None] * len(first["lengths"])
        runs = [each["systems"][system].get(metric, {}).get("buckets", none) for each in figures]
        series.append(Series(system, first["lengths"], runs))
    return curves(f"{NAMES[metric]} by length", series, Axis("words in the source"), Axis(NAMES[metric]))


def _losses(figures: Sequence[Figures]) -> Panel:
    series = []
    for system in figures[0]["systems"]:
        each = [figure["systems"][system]["curve"] for figure in figures]
        longest = max(each, key=lambda curve: len(curve["steps"]))
        series.append(Series(system, longest["steps"], [curve["losses"] for curve in each]))
    return curves("Loss in training", series, Axis("step"), Axis("nats a token"))
