"""Guesses of what comes next, which a step checks together: right ones are steps that need not be run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from qkv.engine.tasks import Text
from qkv.errors import CapacityError
from qkv.runtime import Rows

if TYPE_CHECKING:
    from qkv.engine.scheduler import Scheduler


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

    def close(self) -> None:
        """The text has ended, or is set aside."""
        ...


LONGEST, SHORTEST = 5, 3  # tokens of the ending that is looked up
# Guesses at once, more after all were right. Six rows go through a matrix nearly as fast as one where memory
# is what takes the time; from the seventh on it is read twice.
LENGTHS = (2, 5, 11)
PIECE = 512  # tokens that a drafter reads at once
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


@dataclass
class Paying:
    """Whether guesses pay, by the clock: tokens a second of steps with them and without, tried in turn.

    Times decide how often there are guesses, and never what the text is.
    """

    clock: Callable[[], float] = time.perf_counter
    rates: list[float | None] = field(default_factory=lambda: [None, None])  # without, with
    guesses: bool = True  # in this run of steps
    left: int = 8  # steps of it
    wait: int = 16  # steps until the other is tried again
    began: float = 0.0
    tokens: int = 0

    def ask(self, tokens: int) -> bool:
        """Whether to guess now, of a text of so many tokens."""
        now = self.clock()
        if not self.began:
            self.began, self.tokens = now, tokens
        self.left -= 1
        if self.left <= 0 and tokens > self.tokens:
            self.rates[self.guesses] = (tokens - self.tokens) / max(now - self.began, 1e-9)
            self.turn()
            self.began, self.tokens = now, tokens
        return self.guesses

    def turn(self) -> None:
        """What the next run of steps is: the better, and now and then, ever more seldom, the other."""
        without, with_ = self.rates
        if without is None or with_ is None:
            self.guesses, self.left = not self.guesses, 8
            return
        better = with_ > without
        if self.guesses == better and self.left <= -1:
            self.left = self.wait
        elif self.guesses == better:
            self.guesses, self.left, self.wait = not better, 4, min(4 * self.wait, 512)
        else:
            self.guesses, self.left = better, self.wait


class Drafted:
    """The likeliest tokens by another, smaller model of the same vocabulary (Leviathan et al. 2023)."""

    def __init__(self, drafter: Scheduler):
        self.drafter = drafter
        self.number = drafter.lend()
        self.guessed = self.right = 0
        self.length = 3
        self.held: list[int] = []  # the tokens that the drafter's cache holds
        self.paying = Paying()

    def propose(self, text: Text, most: int) -> list[int]:
        count = min(most, self.length)
        if not self.paying.ask(len(text.tokens)) or count < 1:
            return []
        try:
            return self.draft(text.tokens, count)
        except CapacityError:  # no room for guesses: there are none
            self.go_back(0)
            return []

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        same, shorter = 0, min(len(self.held), len(tokens) - 1)
        while same < shorter and self.held[same] == tokens[same]:
            same += 1
        self.go_back(same)
        found = [self.read(tokens[same:])]
        while len(found) < count:
            found.append(self.read(found[-1:]))
        return found

    def go_back(self, length: int) -> None:
        if length < len(self.held):
            self.drafter.take_back(self.number, length)
            del self.held[length:]

    def read(self, tokens: Sequence[int]) -> int:
        """What most likely follows these, which come after what is held."""
        for at in range(0, len(tokens), PIECE):
            piece = list(tokens[at : at + PIECE])
            rows = Rows.of(piece, len(self.held), self.number, wanted=[len(piece) - 1])
            logits = self.drafter.run_for(rows)
            self.held += piece
        return int(logits[0].argmax())

    def learn(self, guessed: int, right: int) -> None:
        self.guessed += guessed
        self.right += right
        self.length = min(8, self.length + 1) if right == guessed else max(1, min(self.length, right + 1))

    def close(self) -> None:
        self.drafter.end_loan(self.number)
