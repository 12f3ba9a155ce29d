"""Guesses by another model, as long as they pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from qkv.engine.scheduler import Scheduler
from qkv.engine.tasks import Text
from qkv.errors import CapacityError
from qkv.runtime import Rows

PIECE = 512  # tokens that a drafter reads at once


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
