"""Guesses from a text itself: what followed the last time that it had this ending."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from qkv.engine.tasks import Text

LONGEST, SHORTEST = 5, 3  # tokens of the ending that is looked up
# Guesses at once, more after all were right. Six rows go through a matrix nearly as fast as one where memory
# is what takes the time; from the seventh on it is read twice.
LENGTHS = (2, 5, 11)
PATIENCE = 64  # steps without guesses, at most, after they were wrong again and again


@dataclass
class NGrams:
    """What followed the last time that the text had this ending (Saxena 2023, "prompt lookup").

    A proposal of which nothing is right costs the time of its rows: then some steps pass without one,
    twice as many each time, and half as many after one that paid.
    """

    guessed: int = 0
    right: int = 0
    level: int = 0
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
                return tokens[at : at + max(0, min(most, LENGTHS[self.level]))]
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
        if right == guessed:
            self.level = min(self.level + 1, len(LENGTHS) - 1)
        elif right < LENGTHS[self.level] // 2:
            self.level = max(0, self.level - 1)
        if right:
            self.misses = max(0, self.misses - 1)
        else:
            self.misses += 1
            self.resting = min(2**self.misses, PATIENCE)

    def close(self) -> None:
        """It holds nothing but what it has read."""
