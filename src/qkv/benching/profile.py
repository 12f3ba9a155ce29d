"""What this machine can do, measured with the runtime itself: models of two shapes tell costs apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from qkv.benching.machine import described, read_bandwidth
from qkv.checkpoints import StoredTensor
from qkv.checkpoints.quantisers import quantise
from qkv.errors import UnsupportedError
from qkv.memory import free_memory
from qkv.planning.cache import layers
from qkv.planning.profile import Profile, Speeds, gone_through, overlapped, read_at
from qkv.planning.timing import MANY, SOME
from qkv.planning.weights import read_in_a_step, stored
from qkv.planning.workspace import ROWS, widths
from qkv.runtime import Rows
from qkv.runtime.built import missing
from qkv.runtime.lower import lower
from qkv.runtime.native import Native
from qkv.runtime.threads import default_threads
from qkv.spec import Attention, Gated, Language, Model, RMSNorm, Rotary, Stack, Tokens, pre_norm

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
LONG, SHORT = 2048, 128  # tokens of the texts that are gone on with: one long, and SOME short ones
ROUNDS, EACH = 5, 8  # rounds of all steps, and how often each round repeats those of few rows
WARM = 8  # steps until a processor's cache holds what it can of the weights
LOGITS = 1 << 16  # of an answer
STEP, ANSWER = 1.2e-4, 4e-5  # seconds of the engine in Python: 0.16 ms with one sequence, 1.4 with 32
SIZES = tuple(n << 20 for n in (32, 64, 128, 256, 512))  # bytes of memory that are read over and over
FASTEST = 4  # as times of memory's speed: how fast weights are gone through is not told apart beyond
BAND = 0.2  # what is left unexplained, and the machine's own drift

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Shape:
    """A decoder of so many layers alike."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    head_dim: int = 64

    @property
    def model(self) -> Model:
        attention = Attention(self.heads, self.kv_heads, self.head_dim, position=Rotary())
        layer = pre_norm(attention, Gated("silu", self.hidden), norm=RMSNorm())
        return Model(
            decoder=Stack(Tokens(64, self.width), (layer,) * self.layers, RMSNorm()), head=Language(64)
        )


NARROW, WIDE = Shape(24, 768, 12, 4, 2048), Shape(4, 2048, 16, 4, 5632, 128)
SMALL, SMALL_FORMAT = Shape(16, 128, 2, 1, 256), "Q8_0"  # its weights fit the caches of the cores themselves


class Random(Mapping[str, StoredTensor]):
    """Random weights of a description in one format; layers share theirs until they are packed."""

    def __init__(self, model: Model, format: str):
        self.shapes = {name: tensor.shape for name, tensor in model.weights().items()}
        self.format, self.made = format, dict[tuple[int, ...], StoredTensor]()

    def __getitem__(self, name: str) -> StoredTensor:
        shape = self.shapes[name]
        if shape not in self.made:
            values = np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32)
            plain = len(shape) < 2
            self.made[shape] = (
                StoredTensor.from_array(name, 1 + values) if plain else quantise(name, values, self.format)
            )
        return self.made[shape]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


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


def steps(format: str, threads: int, kv: str) -> tuple[Speeds, dict[Shape, Steps], float]:
    """How fast memory is; the times of both shapes; seconds of a row in SMALL.

    In turn, so that whatever the machine does meanwhile is in all of them.
    """
    small = Runner(SMALL, SMALL_FORMAT, threads, kv)
    probes: list[list[float]] = []
    runners = {shape: Runner(shape, format, threads, kv) for shape in (NARROW, WIDE)}
    for _ in range(ROUNDS):
        probes.append([read_bandwidth(threads, size) for size in SIZES])
        for runner in runners.values():
            runner.many()
            runner.few()
        small.row()
    speeds = tuple(zip(SIZES, map(median, zip(*probes, strict=True)), strict=True))
    return speeds, {shape: r.steps() for shape, r in runners.items()}, median(small.seconds["row"])


def measured(
    threads: int | None = None,
    kv: str = "bf16",
    formats: tuple[str, ...] = FORMATS,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """A profile of the native runtime on so many threads (None: one for each core).

    Two shapes of layers give, by linear equations, how fast products are and what else a row costs; a
    small one what a layer costs whatever it holds; texts of some length, attention.
    UnsupportedError where the native runtime cannot be had.
    """
    absent = missing()
    if absent:
        raise UnsupportedError(f"Only the native runtime is measured for plans: {absent}.")
    count = threads or default_threads()
    solved, readings = dict[str, Solved](), list[Speeds]()
    for done, format in enumerate(formats):
        progress(done, len(formats))
        reading, taken, small = steps(format, count, kv)
        solved[format] = solve(format, kv, reading, taken, small)
        readings.append(reading)
    all_ = list(solved.values())
    machine = described()
    return Profile(
        f"{machine['processor']}, {count} thread{'s' * (count > 1)}",
        free_memory(),
        {**{f: s.weights for f, s in solved.items()}, "": median(s.weights for s in all_)},
        {**{f: s.few for f, s in solved.items()}, "": median(s.few for s in all_)},
        {**{f: s.compute for f, s in solved.items()}, "": median(s.compute for s in all_)},
        median(s.cache for s in all_),
        median(s.attention for s in all_),
        median(s.layer for s in all_),
        pair=median(s.pair for s in all_),
        number=median(s.number for s in all_),
        logit=median(s.logit for s in all_),
        reading=tuple((size, median(dict(each)[size] for each in readings)) for size in SIZES),
        band=BAND,
        step=STEP,
        answer=ANSWER,
        details={**machine, "kv": kv, "threads": count},
    )


class Solved(NamedTuple):
    """See `Profile`."""

    weights: float
    few: float
    compute: float
    cache: float
    attention: float
    pair: float
    layer: float
    number: float
    logit: float


def solve(format: str, kv: str, reading: Speeds, taken: Mapping[Shape, Steps], small: float) -> Solved:
    """The costs that these times are made of, one by one; `small` are the seconds of a row in SMALL."""
    both, seen = (NARROW, WIDE), dict(reading)
    layer = max(0.0, small / SMALL.layers - _layer(SMALL, SMALL_FORMAT)[0] / max(seen.values()))
    size = {shape: _layer(shape, format) for shape in both}
    read = {shape: shape.layers * size[shape][0] for shape in both}
    flops = {shape: size[shape][1] for shape in both}
    attention, pair = _attention(taken)
    # what a row takes in a layer, of so many that they read weights once, and so few that they hardly attend
    each = {}
    for s in both:
        attending = s.layers * s.heads * _pairs(0, MANY) * (pair + 4 * s.head_dim / attention)
        each[s] = ((taken[s].many - attending) / s.layers - layer) / MANY
    compute, number = _row(each, flops)

    def beside(shape: Shape, rows: int) -> float:
        return shape.layers * (layer + rows * number * widths(shape.model).all)

    memory = {shape: read[shape] / read_at(reading, read[shape]) for shape in both}
    through = sum(without(taken[s].row - beside(s, 1), memory[s]) for s in both)
    weights = sum(read.values()) / max(through, sum(memory.values()) / FASTEST)
    computing = {
        s: without(taken[s].some - beside(s, SOME), gone_through(read[s], weights, reading, read[s]))
        for s in both
    }
    few = min(SOME * sum(s.layers * flops[s] for s in both) / sum(computing.values()), compute)
    # keys and values, by what rows take longer that have some: one with many, and many with some
    seconds = memory_alone = bytes = 0.0
    for shape in both:
        a_token = sum(one.per_token * one.count for one in layers(shape.model, kv))
        for tokens, took, products in (
            (LONG, taken[shape].far_row - beside(shape, 1), 0.0),
            (SOME * SHORT, taken[shape].texts - beside(shape, SOME), computing[shape]),
        ):
            held = tokens * a_token
            among = read[shape] + held
            seconds += took - overlapped(products, gone_through(read[shape], weights, reading, among))
            memory_alone += held / read_at(reading, among)
            bytes += held
    cache = bytes / max(without(seconds, memory_alone), memory_alone / FASTEST)
    logit = median(taken[s].logit for s in both)
    return Solved(weights, few, compute, cache, attention, pair, layer, number, logit)


def _attention(taken: Mapping[Shape, Steps]) -> tuple[float, float]:
    """How fast scores and mixtures are, and what a pair costs besides: by heads of two sizes."""
    more = _pairs(LONG - ROWS, LONG) - _pairs(0, ROWS)
    a_pair = {s: (taken[s].far_rows - taken[s].rows) / (more * s.layers * s.heads) for s in (NARROW, WIDE)}
    slowness = (a_pair[WIDE] - a_pair[NARROW]) / (4 * (WIDE.head_dim - NARROW.head_dim))
    pair = a_pair[NARROW] - 4 * NARROW.head_dim * slowness
    if slowness <= 0 or pair < 0:  # the machine changed meanwhile: operations alone, then
        return sum(4 * s.head_dim for s in a_pair) / max(sum(a_pair.values()), 1e-18), 0.0
    return 1 / slowness, pair


def _row(each: Mapping[Shape, float], flops: Mapping[Shape, float]) -> tuple[float, float]:
    """How fast products are, and what each number of a row costs besides: what a row takes in two layers.

    Products grow with the square of a layer's width, numbers with the width.
    """
    numbers = {shape: widths(shape.model).all for shape in (NARROW, WIDE)}
    apart = flops[WIDE] * numbers[NARROW] - flops[NARROW] * numbers[WIDE]
    number = (flops[WIDE] * each[NARROW] - flops[NARROW] * each[WIDE]) / apart
    slowness = (numbers[NARROW] * each[WIDE] - numbers[WIDE] * each[NARROW]) / apart
    if number < 0 or slowness <= 0:  # the machine changed meanwhile: products alone, then
        return sum(flops.values()) / sum(each.values()), 0.0
    return 1 / slowness, number


def without(seconds: float, other: float) -> float:
    """What overlaps with another to these seconds."""
    return max(1e-18, seconds**2 - other**2) ** 0.5


def _layer(shape: Shape, format: str) -> tuple[float, float]:
    """Bytes and operations of a row in one layer."""
    read, flops = read_in_a_step(shape.model, stored(format), 1)
    return read / shape.layers, flops / shape.layers


def _pairs(start: int, end: int) -> float:
    """Of a head: those that the rows from start to before end see."""
    return (end * (end + 1) - start * (start + 1)) / 2
