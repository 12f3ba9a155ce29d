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
from qkv.planning.profile import Profile
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
LONG = 2048
ROUNDS, EACH = 5, 4  # rounds of all steps, and how often each round repeats those of few rows
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
    """Seconds: a row at the beginning of a text and far into it, a few rows, many; 512 at both places."""

    row: float
    far_row: float
    some: float
    many: float
    rows: float
    far_rows: float


class Runner:
    """A model of one shape: one text that begins, sequence 0, and one of LONG tokens, sequence 1."""

    def __init__(self, shape: Shape, format: str, threads: int, kv: str):
        self.run = Native(lower(shape.model), Random(shape.model, format), threads, kv)
        self.tokens = list(np.random.default_rng(1).integers(0, 64, ROWS))
        self.seconds: dict[str, list[float]] = {name: [] for name in Steps._fields}
        for start in range(0, LONG, ROWS):
            self._step(ROWS, start, 1)

    def _step(self, rows: int, start: int, sequence: int) -> float:
        self.run.forget(sequence, start)
        given = Rows.of(self.tokens[:rows], start=start, sequence=sequence, wanted=[rows - 1])
        began = time.perf_counter()
        self.run.step(given)
        return time.perf_counter() - began

    def few(self) -> None:
        """Steps that wait for memory, each several times in a row, as texts are written."""
        for name, rows, start, sequence in (("row", 1, 0, 0), ("far_row", 1, LONG, 1), ("some", SOME, 0, 0)):
            self.seconds[name] += [self._step(rows, start, sequence) for _ in range(EACH)]

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


def steps(format: str, threads: int, kv: str) -> tuple[dict[Shape, Steps], float]:
    """Both shapes in turn, so that whatever the machine does meanwhile is in both; and the bandwidth then."""
    probes: list[float] = []
    runners = {shape: Runner(shape, format, threads, kv) for shape in (NARROW, WIDE)}
    for _ in range(ROUNDS):
        probes.append(read_bandwidth(threads))
        for runner in runners.values():
            runner.many()
            runner.few()
    return {shape: runner.steps() for shape, runner in runners.items()}, max(probes)


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
    solved, bandwidths = dict[str, Solved](), list[float]()
    for done, format in enumerate(formats):
        progress(done, len(formats))
        taken, bandwidth = steps(format, count, kv)
        solved[format] = solve(format, kv, bandwidth, taken)
        bandwidths.append(bandwidth)
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
        band=BAND,
        details={**machine, "kv": kv, "threads": count, "read_bandwidth": max(bandwidths)},
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


def solve(format: str, kv: str, bandwidth: float, taken: Mapping[Shape, Steps]) -> Solved:
    """The costs that these times are made of.

    A step of one row is layers * `layer` + bytes / `weights`: two shapes for two unknowns, of which
    weights are read no faster than memory is. The others follow one by one.
    """
    narrow, wide = taken[NARROW], taken[WIDE]
    size = {shape: _layer(shape, format) for shape in (NARROW, WIDE)}
    read = {shape: shape.layers * size[shape][0] for shape in (NARROW, WIDE)}
    apart = NARROW.layers * read[WIDE] - WIDE.layers * read[NARROW]
    layer = max(0.0, (narrow.row * read[WIDE] - wide.row * read[NARROW]) / apart)
    weights = min(read[WIDE] / max(wide.row - WIDE.layers * layer, 1e-9), bandwidth)
    attention = _mixing(LONG - ROWS, LONG) / (narrow.far_rows - narrow.rows + wide.far_rows - wide.rows)
    # what products of many rows take, so few that they hardly attend: by both shapes, as above
    each = {
        shape: (taken[shape].many - _mixing(0, MANY, shape) / attention) / shape.layers - layer
        for shape in (NARROW, WIDE)
    }
    compute = MANY * (size[WIDE][1] - size[NARROW][1]) / max(each[WIDE] - each[NARROW], 1e-9)
    row = max(0.0, each[NARROW] / MANY - size[NARROW][1] / compute)
    computing = 0.0
    for shape in (NARROW, WIDE):
        products = taken[shape].some - shape.layers * (layer + row * SOME)
        computing += max(1e-15, products**3 - (read[shape] / weights) ** 3) ** (1 / 3)
    flops = sum(shape.layers * size[shape][1] for shape in (NARROW, WIDE))
    few = min(SOME * flops / computing, compute)
    held = sum(one.per_token * one.count for s in (NARROW, WIDE) for one in layers(s.model, kv))
    cache = LONG * held / (narrow.far_row - narrow.row + wide.far_row - wide.row)
    return Solved(weights, few, compute, cache, attention, layer, row)


def _layer(shape: Shape, format: str) -> tuple[float, float]:
    """Bytes and operations of a row in one layer."""
    read, flops = read_in_a_step(shape.model, stored(format), 1)
    return read / shape.layers, flops / shape.layers


def _mixing(start: int, end: int, *shapes: Shape) -> float:
    """Operations of scores and mixtures of the rows from start to end that rows from 0 do not have."""
    pairs = [n * (n + 1) / 2 for n in (start, end)]
    beyond = pairs[1] - pairs[0] - (ROWS * (ROWS + 1) / 2 if start else 0)
    return sum(4.0 * shape.heads * 64 * shape.layers * beyond for shape in shapes or (NARROW, WIDE))
