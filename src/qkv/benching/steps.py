"""Steps of the runtime, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from qkv.benching.machine import read_bandwidth
from qkv.benching.shapes import SMALL, SMALL_FORMAT, Random, Shape
from qkv.planning.profile import Speeds
from qkv.planning.timing import MANY, SOME
from qkv.planning.workspace import ROWS
from qkv.runtime import Rows
from qkv.runtime.lower import lower
from qkv.runtime.native import Native

LONG, SHORT = 2048, 128  # tokens of the texts that are gone on with: one long, and SOME short ones
ROUNDS, EACH = 5, 8  # rounds of all steps, and how often each round repeats those of few rows
WARM = 8  # steps until a processor's cache holds what it can of the weights
LOGITS = 1 << 16  # of an answer
SIZES = tuple(n << 20 for n in (32, 64, 128, 256, 512))  # bytes of memory that are read over and over


class Steps(NamedTuple):
    """Seconds: a row at the beginning of a text and far into it; a few rows of one, and of a text each;
    many; 512 at the beginning and far into a text; a number of an answer, which is chosen from.
    """

    row: float
    far_row: float
    some: float
    texts: float
    many: float
    rows: float
    far_rows: float
    logit: float


class Runner:
    """A model of one shape: a text that begins, sequence 0; one of LONG tokens, 1; the short ones, from 2."""

    def __init__(self, shape: Shape, format: str, threads: int, kv: str):
        self.run = Native(lower(shape.model), Random(shape.model, format), threads, kv)
        self.answers = np.random.default_rng(2).normal(0, 3, (SOME, LOGITS)).astype(np.float32)
        self.tokens = list(np.random.default_rng(1).integers(0, 64, ROWS))
        self.seconds: dict[str, list[float]] = {name: [] for name in Steps._fields}
        for start in range(0, LONG, ROWS):
            self._step(ROWS, start, 1)
        for text in range(SOME):
            self._step(SHORT, 0, 2 + text)

    def _step(self, rows: int, start: int, sequence: int) -> float:
        self.run.forget(sequence, start)
        return self._timed(Rows.of(self.tokens[:rows], start=start, sequence=sequence, wanted=[rows - 1]))

    def _texts(self) -> float:
        texts = np.arange(2, 2 + SOME)
        for text in texts:
            self.run.forget(int(text), SHORT)
        return self._timed(
            Rows(np.array(self.tokens[:SOME]), texts, np.full(SOME, SHORT), np.array([SOME - 1]))
        )

    def _timed(self, given: Rows) -> float:
        began = time.perf_counter()
        self.run.step(given)
        return time.perf_counter() - began

    def _logit(self) -> float:
        began = time.perf_counter()
        self.run.summarised(self.answers)
        return (time.perf_counter() - began) / self.answers.size

    def row(self) -> None:
        for _ in range(WARM):
            self._step(1, 0, 0)
        self.seconds["row"] += [self._step(1, 0, 0) for _ in range(EACH)]

    def few(self) -> None:
        """Steps that wait for memory, each several times in a row, as texts are written."""
        self.row()
        for name, rows, start, sequence in (("far_row", 1, LONG, 1), ("some", SOME, 0, 0)):
            self.seconds[name] += [self._step(rows, start, sequence) for _ in range(EACH)]
        self.seconds["texts"] += [self._texts() for _ in range(EACH)]
        self.seconds["logit"] += [self._logit() for _ in range(EACH)]

    def many(self) -> None:
        """Steps that compute."""
        for name, rows, start, sequence in (
            ("many", MANY, 0, 0),
            ("rows", ROWS, 0, 0),
            ("far_rows", ROWS, LONG - ROWS, 1),
        ):
            self.seconds[name].append(self._step(rows, start, sequence))

    def steps(self) -> Steps:
        return Steps(**{name: median(seconds) for name, seconds in self.seconds.items()})


def steps(
    shapes: Sequence[Shape], format: str, threads: int, kv: str
) -> tuple[Speeds, dict[Shape, Steps], float]:
    """How fast memory is; the times of these shapes; seconds of a row in SMALL.

    In turn, so that whatever the machine does meanwhile is in all of them.
    """
    small = Runner(SMALL, SMALL_FORMAT, threads, kv)
    probes: list[list[float]] = []
    runners = {shape: Runner(shape, format, threads, kv) for shape in shapes}
    for _ in range(ROUNDS):
        probes.append([read_bandwidth(threads, size) for size in SIZES])
        for runner in runners.values():
            runner.many()
            runner.few()
        small.row()
    speeds = tuple(zip(SIZES, map(median, zip(*probes, strict=True)), strict=True))
    return speeds, {shape: r.steps() for shape, r in runners.items()}, median(small.seconds["row"])
