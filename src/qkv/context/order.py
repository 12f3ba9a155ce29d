"""The order in which extensions come out, beside the papers' order, and where the two differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev
from typing import Any

ALIKE = 0.01  # nats a token that tell nothing apart
ERRORS = 2.0  # standard errors that tell nothing apart


@dataclass(frozen=True)
class Ranks:
    """Methods as papers rank them, the best first; those of one rank they do not tell apart."""

    ranks: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        return ", then ".join(" and ".join(rank) for rank in self.ranks)

    def pairs(self, kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Of these methods: one, and one that is ranked behind it."""
        at = {kind: place for place, rank in enumerate(self.ranks) for kind in rank}
        placed = sorted((kind for kind in kinds if kind in at), key=lambda kind: at[kind])
        for place, better in enumerate(placed):
            yield from ((better, worse) for worse in placed[place + 1 :] if at[worse] > at[better])


# each paper puts its own method before the older ones
SAID_BY = {
    "linear": "Chen et al. 2023", "ntk": "bloc97 2023", "dynamic": "emozilla 2023",
    "yarn": "Peng et al. 2023", "longrope": "Ding et al. 2024",
}  # fmt: skip
UNTUNED = Ranks((("longrope",), ("ntk", "dynamic", "yarn"), ("linear",), ("none",)))
TUNED = Ranks((("longrope",), ("linear", "yarn"), ("ntk",), ("none",)))
TUNED_BY = "Peng et al. 2023, table 1; Ding et al. 2024; none: Chen et al. 2023"


@dataclass(frozen=True)
class Pair:
    """Two methods that a paper ranks: by how many nats a token the better one is below the worse here.

    `error` is the standard error of that over stretches of the text.
    """

    better: str
    worse: str
    gain: float
    error: float

    @property
    def said_by(self) -> str:
        return SAID_BY[self.better]

    @property
    def alike(self) -> bool:
        """Whether the two cannot be told apart here."""
        return abs(self.gain) <= max(ALIKE, ERRORS * self.error)

    @property
    def holds(self) -> bool:
        return self.gain > 0 and not self.alike

    @property
    def differs(self) -> bool:
        return self.gain < 0 and not self.alike

    def data(self) -> dict[str, Any]:
        verdict = "alike" if self.alike else "holds" if self.holds else "differs"
        return {**vars(self), "said_by": self.said_by, "verdict": verdict}


def pairs(losses: Mapping[str, Sequence[float]]) -> list[Pair]:
    """Each two methods that the papers rank, by the losses of the same stretches of a text with each."""
    found = []
    for better, worse in UNTUNED.pairs(list(losses)):
        gains = [w - b for b, w in zip(losses[better], losses[worse], strict=True)]
        error = stdev(gains) / sqrt(len(gains)) if len(gains) > 1 else 0.0
        found.append(Pair(better, worse, fmean(gains), error))
    return found


def verdict(losses: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """The two orders in words, and each two methods that are in another one here."""
    here = sorted(losses, key=lambda kind: fmean(losses[kind]))
    yield f"Here, the best first: {', '.join(here)}."
    yield f"The papers, without training: {UNTUNED}."
    found = pairs(losses)
    for pair in found:
        if pair.differs:
            yield (
                f"They differ: {pair.worse} is better than {pair.better} here, by {-pair.gain:.3f} +- "
                f"{pair.error:.3f} nats; in {pair.said_by} it is worse."
            )
    alike = [
        f"{pair.better} and {pair.worse} ({pair.gain:+.3f} +- {pair.error:.3f})"
        for pair in found
        if pair.alike
    ]
    if alike:
        yield f"Ranked there, and not told apart here (by how many nats): {', '.join(alike)}."
    held = sum(pair.holds for pair in found)
    yield f"In the papers' order: {held} of {len(found)} pairs that they rank."
    yield (
        f"After tuning, which was not done here, the papers have {TUNED} ({TUNED_BY}); "
        "qkv reproduce longer-rotary tunes a small model."
    )
