"""Extensions side by side on one text: the loss by position with each, and with the model as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from qkv.context.extend import EXTENSIONS, Stretch, extended
from qkv.context.reading import reader_of
from qkv.context.result import Extended
from qkv.context.search import Searched, check_tries, divided, search
from qkv.context.tasks import SPAN, by_position
from qkv.errors import RequestError
from qkv.loading import Loaded
from qkv.spec import Model

Told = Callable[[str], None]


@dataclass(frozen=True)
class Methods:
    """What is compared: methods, by what they stretch, and how many lists LongRoPE may try (0: none)."""

    kinds: Sequence[str]
    by: Stretch
    tries: int = 0

    @property
    def needed(self) -> int:
        """Tokens of text: a search has a stretch of its own, that nothing else is measured on."""
        return self.by.length * (2 if self.tries else 1) if self.kinds else 0

    def check(self, model: Model) -> None:
        """Raises, before anything is measured, what `extended` would raise of any method."""
        if self.tries and "longrope" not in self.kinds:
            raise RequestError("search looks for LongRoPE's divisors: it goes with extend longrope, or all.")
        if self.tries:
            check_tries(self.tries)
        if self.kinds and self.by.length <= self.by.original + 1:
            raise RequestError(
                f"factor is {self.by.factor:g}; nothing is longer with it: it must be above 1."
            )
        for kind in self.kinds:
            extended(model, kind, self.by.factor, self.by.original, self.by.length)

    def compare(self, loaded: Loaded, tokens: Sequence[int], told: Told) -> list[Extended]:
        """Each on the first of the tokens; a search on those that follow."""
        text, elsewhere = tokens[: self.by.length], tokens[self.by.length : self.needed]
        found = []
        for kind in ["none", *self.kinds] if self.kinds else []:
            if kind == "longrope" and self.tries:
                best = self._searched(loaded, elsewhere, told)
                model, words = divided(loaded.spec, best.divisors, self.by), self._words(best)
                made = Extended(kind, self.by.factor, words=words, searched=best)
            elif kind == "none":
                model, made = loaded.spec, Extended(kind, self.by.factor, words="as it is")
            else:
                by, one = self.by, EXTENSIONS[kind]
                model = extended(loaded.spec, kind, by.factor, by.original, by.length)
                made = Extended(kind, by.factor, words=one.words(by), stands_in=one.stands_in)
            told(f"a text of {len(text):,} tokens, {kind}")
            losses = reader_of(loaded, model).losses(text)
            found.append(made.measured(by_position(losses), stretches(losses[self.by.original :])))
        return found

    def _searched(self, loaded: Loaded, tokens: Sequence[int], told: Told) -> Searched:
        def loss(model: Model) -> float:
            return float(reader_of(loaded, model).losses(tokens)[self.by.original :].mean())

        return search(loaded.spec, self.by, self.tries, loss, told)

    def _words(self, best: Searched) -> str:
        kind = min(best.known, key=best.known.__getitem__)
        return (
            f"the best of {best.tried} lists of divisors on {self.by.length:,} other tokens: {best.loss:.3f} "
            f"nats there, {kind}'s list {best.known[kind]:.3f}"
        )


def stretches(losses: np.ndarray) -> tuple[float, ...]:
    """Mean losses of consecutive stretches of SPAN tokens or a little more."""
    parts = np.array_split(losses, max(1, len(losses) // SPAN))
    return tuple(float(part.mean()) for part in parts)
