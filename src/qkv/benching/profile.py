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
from qkv.planning.workspace import ROWS
from qkv.runtime import Rows
from qkv.runtime.built import missing
from qkv.runtime.lower import lower
from qkv.runtime.native import Native
from qkv.runtime.threads import default_threads
from qkv.spec import Attention, Gated, Language, Model, RMSNorm, Rotary, Stack, Tokens, pre_norm

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
LONG, SHORT = 2048, 128  # tokens of the texts that are gone on with: one long, and SOME short ones
ROUNDS, EACH = 5, 8  # rounds of all steps, and how often each round repeats those of few rows
SIZES = tuple(n << 20 for n in (32, 64, 128, 256, 512))  # bytes of memory that are read over and over
FASTEST = 4  # as times of memory's speed: how fast weights are gone through is not told apart beyond
BAND = 0.2  # what is left unexplained, and the machine's own drift

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Shape:
    """A decoder of so many layers alike, of a size that does not fit a processor's cache."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int

    @property
    def model(self) -> Model:
        attention = Attention(self.heads, self.kv_heads, 64, position=Rotary())
        layer = pre_norm(attention, Gated("silu", self.hidden), norm=RMSNorm())
        return Model(
            decoder=Stack(Tokens(64, self.width), (layer,) * self.layers, RMSNorm()), head=Language(64)
        )


NARROW, WIDE = Shape(24, 768, 12, 4, 2048), Shape(4, 2048, 32, 8, 5632)


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
    many; 512 at the beginning and far into a text.
    """

    row: float
    far_row: float
    some: float
    texts: float
    many: float
    rows: float
    far_rows: float


class Runner:
    """A model of one shape: a text that begins, sequence 0; one of LONG tokens, 1; the short ones, from 2."""

    def __init__(self, shape: Shape, format: str, threads: int, kv: str):
        self.run = Native(lower(shape.model), Random(shape.model, format), threads, kv)
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

    def few(self) -> None:
        """Steps that wait for memory, each several times in a row, as texts are written."""
        for name, rows, start, sequence in (("row", 1, 0, 0), ("far_row", 1, LONG, 1), ("some", SOME, 0, 0)):
            self.seconds[name] += [self._step(rows, start, sequence) for _ in range(EACH)]
        self.seconds["texts"] += [self._texts() for _ in range(EACH)]

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


def steps(format: str, threads: int, kv: str) -> tuple[dict[Shape, Steps], Speeds]:
    """Both shapes in turn, so that whatever the machine does meanwhile is in both; how fast memory is."""
    probes: list[list[float]] = []
    runners = {shape: Runner(shape, format, threads, kv) for shape in (NARROW, WIDE)}
    for _ in range(ROUNDS):
        probes.append([read_bandwidth(threads, size) for size in SIZES])
        for runner in runners.values():
            runner.many()
            runner.few()
    speeds = tuple(zip(SIZES, map(median, zip(*probes, strict=True)), strict=True))
    return {shape: runner.steps() for shape, runner in runners.items()}, speeds


def measured(
    threads: int | None = None,
    kv: str = "bf16",
    formats: tuple[str, ...] = FORMATS,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """A profile of the native runtime on so many threads (None: one for each core).

    Two shapes of layers give, by linear equations, how fast weights are read and multiplied and what a
    layer costs beside that; a long text gives attention.
    UnsupportedError where the native runtime cannot be had.
    """
    absent = missing()
    if absent:
        raise UnsupportedError(f"Only the native runtime is measured for plans: {absent}.")
    count = threads or default_threads()
    solved, readings = dict[str, Solved](), list[Speeds]()
    for done, format in enumerate(formats):
        progress(done, len(formats))
        taken, reading = steps(format, count, kv)
        solved[format] = solve(format, kv, reading, taken)
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
        row=median(s.row for s in all_),
        reading=tuple((size, median(dict(each)[size] for each in readings)) for size in SIZES),
        band=BAND,
        details={**machine, "kv": kv, "threads": count},
    )


class Solved(NamedTuple):
    """See `Profile`."""

    weights: float
    few: float
    compute: float
    cache: float
    attention: float
    layer: float
    row: float


def solve(format: str, kv: str, reading: Speeds, taken: Mapping[Shape, Steps]) -> Solved:
    """The costs that these times are made of.

    A step of one row is layers * `layer` and its weights, which are read from memory as fast as that is
    and gone through: two shapes for two unknowns. The others follow one by one.
    """
    narrow, wide = taken[NARROW], taken[WIDE]
    size = {shape: _layer(shape, format) for shape in (NARROW, WIDE)}
    read = {shape: shape.layers * size[shape][0] for shape in (NARROW, WIDE)}
    weights, layer = _alone(reading, read, taken)
    attention = _mixing(LONG - ROWS, LONG) / (narrow.far_rows - narrow.rows + wide.far_rows - wide.rows)
    # what products of many rows take, so few that they hardly attend: by both shapes, as above
    each = {
        shape: (taken[shape].many - _mixing(0, MANY, shape) / attention) / shape.layers - layer
        for shape in (NARROW, WIDE)
    }
    compute = MANY * (size[WIDE][1] - size[NARROW][1]) / max(each[WIDE] - each[NARROW], 1e-9)
    row = max(0.0, each[NARROW] / MANY - size[NARROW][1] / compute)
    some = {shape: taken[shape].some - shape.layers * (layer + row * SOME) for shape in (NARROW, WIDE)}
    computing = {
        shape: without(some[shape], gone_through(read[shape], weights, reading, read[shape]))
        for shape in (NARROW, WIDE)
    }
    few = min(SOME * sum(s.layers * size[s][1] for s in (NARROW, WIDE)) / sum(computing.values()), compute)
    found = Solved(weights, few, compute, 0.0, attention, layer, row)
    return found._replace(cache=_cache(kv, reading, read, taken, found, computing))


def _alone(reading: Speeds, read: Mapping[Shape, float], taken: Mapping[Shape, Steps]) -> tuple[float, float]:
    """How fast a row goes through weights, and what a layer costs beside: the same by both shapes."""

    def beside(shape: Shape, rate: float) -> float:
        return (taken[shape].row - gone_through(read[shape], rate, reading, read[shape])) / shape.layers

    low, high = 1e-3 * reading[-1][1], FASTEST * max(speed for _, speed in reading)
    for _ in range(60):  # the wide shape has fewer layers: the slower weights are, the less is left to them
        rate = (low * high) ** 0.5
        low, high = (low, rate) if beside(WIDE, rate) > beside(NARROW, rate) else (rate, high)
    return high, max(0.0, beside(NARROW, high))


def _cache(
    kv: str,
    reading: Speeds,
    read: Mapping[Shape, float],
    taken: Mapping[Shape, Steps],
    found: Solved,
    computing: Mapping[Shape, float],
) -> float:
    """How fast keys and values are gone through: by what rows take longer that have some.

    `computing` are the seconds that SOME rows compute while weights are read.
    """
    seconds = memory = bytes = 0.0
    for shape in (NARROW, WIDE):
        a_token = sum(one.per_token * one.count for one in layers(shape.model, kv))
        for tokens, rows, took, products in (
            (LONG, 0, taken[shape].far_row, 0.0),
            (SOME * SHORT, SOME, taken[shape].texts, computing[shape]),
        ):
            held = tokens * a_token
            among = read[shape] + held
            weights = overlapped(products, gone_through(read[shape], found.weights, reading, among))
            seconds += took - shape.layers * (found.layer + found.row * rows) - weights
            memory += held / read_at(reading, among)
            bytes += held
    return bytes / max(without(seconds, memory), memory / FASTEST)


def without(seconds: float, other: float) -> float:
    """What overlaps with another to these seconds."""
    return max(1e-15, seconds**3 - other**3) ** (1 / 3)


def _layer(shape: Shape, format: str) -> tuple[float, float]:
    """Bytes and operations of a row in one layer."""
    read, flops = read_in_a_step(shape.model, stored(format), 1)
    return read / shape.layers, flops / shape.layers


def _mixing(start: int, end: int, *shapes: Shape) -> float:
    """Operations of scores and mixtures of the rows from start to end that rows from 0 do not have."""
    pairs = [n * (n + 1) / 2 for n in (start, end)]
    beyond = pairs[1] - pairs[0] - (ROWS * (ROWS + 1) / 2 if start else 0)
    return sum(4.0 * shape.heads * 64 * shape.layers * beyond for shape in shapes or (NARROW, WIDE))
