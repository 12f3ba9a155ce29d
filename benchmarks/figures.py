"""Figures out of measurements: medians with their spread, and the share of what the memory allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.machine import QUIET


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


@dataclass(frozen=True)
class Sample:
    """One engine in one round of one case. Speeds are tokens a second of all streams together."""

    prefill: float
    decode: float
    bandwidth: float  # bytes a second that the memory gave in this round, with the case's threads
    others: float  # share of all cores that others took meanwhile, 0 to 1

    @property
    def quiet(self) -> bool:
        return self.others <= QUIET


def chosen(samples: Sequence[Sample]) -> list[Sample]:
    """The undisturbed samples; all of them where these are fewer than three, so not to pick by luck."""
    quiet = [sample for sample in samples if sample.quiet]
    return quiet if len(quiet) >= 3 else list(samples)


def bytes_per_token(weights: float, cache: float, context: float, streams: int) -> float:
    """Bytes that the memory must give for one token of one stream.

    A step reads the weights once for all streams, and the cache of each: `cache` bytes for each of
    `context` tokens. Nothing faster is possible where neither stays in the processor's own caches.
    """
    return weights / streams + cache * context


def share_of_limit(sample: Sample, bytes_per_token: float) -> float:
    """Which share of the memory's speed in the same round the decoding used, 0 to 1 (more: from caches)."""
    return sample.decode * bytes_per_token / sample.bandwidth


def agreement(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two engines have in common before they first differ."""
    for at, (one, other) in enumerate(zip(tokens, others, strict=False)):
        if one != other:
            return at
    return min(len(tokens), len(others))
