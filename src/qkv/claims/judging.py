"""Checks that most judges make: orders and bounds, in every seed, with the numbers beside them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from qkv.claims.claim import Check

Values = Sequence[float | None]  # one a seed; None where the training diverged: worse than any number


def spread(values: Values, form: str = ".3g", unit: str = "", none: str = "diverged") -> str:
    """The median of the seeds and, of several, the least and the greatest: "1.2 (1.1 to 1.4)".

    `none` says what a seed without a value did.
    """
    known = [value for value in values if value is not None]
    lost = len(values) - len(known)
    if not known:
        return none
    words = f"{median(known):{form}}{unit}"
    if len(known) > 1:
        words += f" ({min(known):{form}} to {max(known):{form}})"
    return words + (f", {lost} of {len(values)} {none}" if lost else "")


def below(
    what: str, lower: Values, upper: Values, form: str = ".3g", unit: str = "", by: float = 1.0
) -> Check:
    """In every seed `lower` is below `upper`, where `by` is given below 1 / `by` of it."""
    pairs = list(zip(lower, upper, strict=True))
    holds = all(
        low is not None and (high is None or low * by < high) for low, high in pairs
    )  # a diverged run is above everything
    return Check(what, f"{spread(lower, form, unit)} against {spread(upper, form, unit)}", holds)


def within(
    what: str,
    values: Values,
    low: float = float("-inf"),
    high: float = float("inf"),
    form: str = ".3g",
    unit: str = "",
    none: str = "diverged",
) -> Check:
    """In every seed the value is from `low` to `high`, both included."""
    holds = all(value is not None and low <= value <= high for value in values)
    return Check(what, spread(values, form, unit, none), holds)
