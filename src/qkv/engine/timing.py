"""How long requests take that are served together: for those who measure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from qkv.engine.generation import prepared, scheduler, submit
from qkv.engine.requests import Request
from qkv.loading import Loaded


class Timing(NamedTuple):
    """Seconds from the prompts to every stream's first token, then to the first stream's last; the tokens.

    Prompts are read while others are answered already, so streams end one after another: what all make
    together is what is timed. `early` are the tokens after a stream's first that were made before or later.
    Where a stream has ended before the last prompt was read, they never are together: it is then the time
    to the last stream's last.
    """

    prefill: float
    decode: float
    tokens: list[list[int]]
    early: int = 0

    def speeds(self, prompt: int) -> tuple[float, float]:
        """Tokens a second of all streams. The first new token of each is the work of its prompt's pass."""
        made = sum(len(each) - 1 for each in self.tokens) - self.early
        return prompt * len(self.tokens) / self.prefill, made / self.decode


def timed(loaded: Loaded, prompts: Sequence[Sequence[int]], new: int) -> Timing:
    """Reads prompts together, and continues each greedily by `new` tokens.

    Nothing is taken from what others have read, nor left to them. Raises RequestError or CapacityError.
    """
    requests = [Request(tuple(prompt), new, ignore_eos=True) for prompt in prompts]
    brought, serving = prepared(loaded, requests), scheduler(loaded)
    start = time.perf_counter()
    tasks = [submit(serving, request, given, False) for request, given in zip(requests, brought, strict=True)]
    try:
        while not all(task.answered for task in tasks):
            serving.step()
        read = time.perf_counter()
        before = sum(len(task.said) for task in tasks)
        until = all if any(task.finished for task in tasks) else any
        while not until(task.finished for task in tasks):
            serving.step()
        decode, made = time.perf_counter() - read, sum(len(task.said) for task in tasks) - before
        while serving.step():
            pass
    finally:
        for task in tasks:
            serving.cancel(task)
    found = [task.said[-1][2].tokens for task in tasks]
    return Timing(read - start, decode, found, sum(map(len, found)) - len(found) - made)
