"""Figures out of measurements: medians with their spread, and the share of what the memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

QUIET = 0.05  # share of all cores that others may have without a figure counting as disturbed
ENOUGH = 3  # quiet rounds that are taken alone
Name = TypeVar("Name")


def number(value: float) -> str:
    """Three digits that matter, and thousands in full."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Spread:
    """The median of so many values, and the least and greatest of them."""

    median: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None where there is no value."""
        return Spread(median(values), min(values), max(values), len(values)) if values else None

    def __str__(self) -> str:
        between = f" ({number(self.low)}-{number(self.high)})" if self.count > 1 else ""
        return f"{number(self.median)}{between}"


@dataclass(frozen=True)
class Sample:
    """One engine in one round of one case. Speeds are tokens a second of all streams together."""

    prefill: float
    decode: float
    bandwidth: float  # bytes a second that the memory gave in this round, with the case's threads
    others: float | None  # share of all cores that others took meanwhile, 0 to 1; None: not known

    @property
    def quiet(self) -> bool:
        return self.others is None or self.others <= QUIET


def chosen(samples: Sequence[Sample]) -> list[Sample]:
    """The undisturbed samples; all of them where these are fewer than three, so not to pick by luck."""
    quiet = [sample for sample in samples if sample.quiet]
    return quiet if len(quiet) >= ENOUGH else list(samples)


def bytes_per_token(weights: float, cache: float, context: float, streams: int) -> float:
    """Bytes that the memory must give for one token of one stream.

    A step reads the weights once for all streams, and the cache of each: `cache` bytes for each of
    `context` tokens. Nothing faster is possible where neither stays in the processor's own caches.
    """
    return weights / streams + cache * context


def share_of_limit(sample: Sample, bytes_per_token: float) -> float:
    """Which share of the memory's speed in the same round the decoding used, 0 to 1 (more: from caches)."""
    return sample.decode * bytes_per_token / sample.bandwidth


def rotated(names: list[Name], round: int) -> list[Name]:
    """The order of what takes turns in a round: each comes first once in so many rounds.

    What follows a busy one finds a warmer and slower processor; that falls on each in turn.
    """
    start = round % len(names) if names else 0
    return names[start:] + names[:start]
