"""A model whose engine is tested, with its steps held where a test wants them; what has to be the same."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from qkv.engine import Completion
from qkv.engine.generation import scheduler
from qkv.engine.scheduler import Scheduler
from qkv.model import Model
from qkv.runtime.built import missing
from qkv.runtime.interpreter import Rows
from tests.engine.test_generation import random_prompt
from tests.engine.tiny import tiny

RUNTIMES = ["numpy", "torch", *(["native"] if missing() is None else [])]
BLOCKS = RUNTIMES[1:]  # those whose cache is in blocks
LONG: dict[str, Any] = {"max_new_tokens": 20_000, "ignore_eos": True}  # never ends by itself here
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "n": 3},
    {"beams": 3, "n": 2},
    {"stop": "e", "top_logprobs": 2},
    {"speculate": "ngram"},
]


def checked(runtime: str) -> Iterator[Model]:
    """A model; whatever a test did, nothing may be held of its cache."""
    made = tiny(runtime=runtime, seed=1)
    yield made
    assert_free(made)


def assert_free(model: Model) -> None:
    """Every block is free or cached, no text waits or runs, and the numbers of all sequences are spare."""
    serve = scheduler(model.loaded)
    assert serve.idle and sorted(serve._free) == list(range(serve._count))
    for pool in serve.machine.own:
        assert not any(pool.holders) and not any(pool.lengths)
        assert sorted([*pool.free, *pool.cached]) == list(range(len(pool.holders)))
    if not serve.machine.own:
        assert not serve.machine.kept.slots  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; the test's own time limit is the bound."""
    while not condition():
        time.sleep(0.001)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def requests(count: int, new: int = 12) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of many lengths, some with one beginning, and all kinds of options."""
    lengths = (3, 40, 1, 70, 17)
    return [
        (
            random_prompt(lengths[i % 5], seed=i % 7),
            {"max_new_tokens": new, "ignore_eos": True, **OPTIONS[i % len(OPTIONS)]},
        )
        for i in range(count)
    ]


def assert_same(ours: Any, theirs: Any, exact: bool) -> None:
    ours, theirs = ([each] if isinstance(each, Completion) else each for each in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
        if exact:
            assert (a.logprobs, a.top_logprobs, a.score) == (b.logprobs, b.top_logprobs, b.score)
        else:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


class Gate:
    """Lets a machine's steps through one by one, once it is closed."""

    def __init__(self, serve: Scheduler, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[Rows] = []
        self.may, self.came = threading.Semaphore(0), threading.Semaphore(0)
        self.open = True
        inner = serve.machine.run

        def run(rows: Rows) -> np.ndarray:
            self.steps.append(rows)
            if not self.open:
                self.came.release()
                self.may.acquire()
            return inner(rows)

        monkeypatch.setattr(serve.machine, "run", run)

    def step(self) -> None:
        """Waits for a step, and lets it through."""
        self.came.acquire()
        self.may.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs, the machine is in the middle of a step."""
        self.open = False
        self.came.acquire()
        try:
            yield
        finally:
            self.open = True
            self.may.release()
