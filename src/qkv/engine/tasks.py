"""What the scheduler works on: requests, and the texts that are made for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from qkv.engine.answers import Answers, Said
from qkv.engine.logprobs import Summary
from qkv.engine.requests import Request


@dataclass(eq=False)
class Text:
    """The tokens of one row, of which `computed` are in the cache, under a sequence's number."""

    number: int
    tokens: list[int]
    prompt: int  # how many of the tokens were given
    computed: int = 0
    published: int = 0  # blocks that others may begin with
    parent: int = 0  # the node that the next of them comes after
    logits: np.ndarray | None = None  # after the last token and each guess, once they are computed
    summaries: list[Summary] | None = None  # of the logits
    draft: list[int] = field(default_factory=list)  # guesses of what comes next

    @property
    def left(self) -> int:
        """Tokens that are not in the cache yet."""
        return len(self.tokens) - self.computed


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
        """The text has ended."""
        ...


@dataclass(eq=False)
class Task:
    """A request on its way. `said` is what came of it and was not fetched yet."""

    request: Request
    answers: Answers
    start: tuple[int, ...]  # what each text begins with
    source: tuple[int, ...] = ()  # what an encoder reads
    brought: dict[str, Any] = field(default_factory=dict)  # images or audio, for the first pass
    salt: str = ""
    shares: bool = True  # whether beginnings are taken from others, and left to them
    speculation: Speculation | None = None
    texts: list[Text | None] = field(default_factory=list)  # of each row; several may be one and the same
    running: bool = False
    finished: bool = False
    answered: bool = False  # whether the first token of its answers is there
    problem: BaseException | None = None  # what ended it before its answers did
    said: deque[tuple[int, str, Any]] = field(default_factory=deque)
    read: int = 0  # tokens of the prompt that were read, or found
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    heard: Callable[[Task], None] = lambda task: None  # told when there is something new

    @property
    def rows(self) -> int:
        return self.request.rows

    def alive(self) -> Iterator[Text]:
        """Each of its texts, once."""
        seen: set[int] = set()
        for text in self.texts:
            if text is not None and id(text) not in seen:
                seen.add(id(text))
                yield text

    def charge(self, seconds: float) -> None:
        """Time that a step took, or its answers."""
        if self.answered:
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds

    def say(self, said: Said) -> None:
        for which, text, completion in said:
            completion.prefill_seconds, completion.decode_seconds = self.prefill_seconds, self.decode_seconds
            self.said.append((which, text, completion))
        if said:
            self.heard(self)
