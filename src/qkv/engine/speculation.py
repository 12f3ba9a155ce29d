"""Guesses of what comes next, which a step checks together: right ones are steps that need not be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qkv.engine.tasks import Text


class Speculation(Protocol):
    """Guesses for one text. A guess is kept where it is what would have been chosen anyway.

    Each place is chosen from the model's own distribution, with the draw it would have had, and
    compared: so the text is the same with and without guesses, whatever they are (for a guesser that
    is sure of itself this is Leviathan et al. 2023's rule).
    """

    guessed: int
    right: int

    def propose(self, text: Text, most: int) -> list[int]:
        """At most so many tokens that may follow."""
        ...

    def learn(self, guessed: int, right: int) -> None:
        """How many of the last proposal were right, from the first on."""
        ...


LONGEST, SHORTEST = 4, 2  # tokens of the ending that is looked up
MOST = 8  # guesses at once
PATIENCE = 64  # steps without guesses, at most, after they were wrong again and again


@dataclass
class NGrams:
    """What followed the last time that the text had this ending (Saxena 2023, "prompt lookup").

    Wrong guesses cost the time of their rows: after a proposal of which nothing was right, twice as
    many steps pass without one as the time before.
    """

    guessed: int = 0
    right: int = 0
    length: int = 3
    misses: int = 0
    resting: int = 0
    indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)  # where what follows an ending stands

    def propose(self, text: Text, most: int) -> list[int]:
        tokens = text.tokens
        self.index(tokens)
        if self.resting:
            self.resting -= 1
            return []
        for size in range(LONGEST, SHORTEST - 1, -1):
            at = self.after.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if at is not None:
                count = min(most, self.length, MOST)
                return tokens[at : at + count] if count > 0 else []
        return []

    def index(self, tokens: Sequence[int]) -> None:
        """All endings but the text's own."""
        for end in range(max(self.indexed, SHORTEST), len(tokens)):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self.after[tuple(tokens[end - size : end])] = end
        self.indexed = len(tokens)

    def learn(self, guessed: int, right: int) -> None:
        self.guessed += guessed
        self.right += right
        if right == 0:
            self.misses += 1
            self.length = max(1, self.length // 2)
            self.resting = min(2**self.misses, PATIENCE)
        else:
            self.misses = 0
            self.length = min(MOST, 2 * self.length) if right == guessed else max(1, right)
