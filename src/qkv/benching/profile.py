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
from qkv.planning.weights import read_in_a_step, stored
from qkv.runtime import Rows
from qkv.runtime.built import missing
from qkv.runtime.lower import lower
from qkv.runtime.native import Native
from qkv.runtime.threads import default_threads
from qkv.spec import Attention, Gated, Language, Model, RMSNorm, Rotary, Stack, Tokens, pre_norm

FORMATS = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
LONG, SOME, ROWS, ROUNDS = 2048, 16, 512, 5
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
HALF = Shape(12, 768, 12, 4, 2048)


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
    """Seconds: a row at the beginning of a text and far into it, 16 rows; 512 rows likewise."""

    row: float
    far_row: float
    some: float
    rows: float
    far_rows: float


def steps(shape: Shape, format: str, threads: int, kv: str) -> Steps:
    model = shape.model
    run = Native(lower(model), Random(model, format), threads, kv)
    many = list(np.random.default_rng(1).integers(0, 64, ROWS))

    def timed(tokens: list[int], start: int) -> float:
        seconds = []
        for _ in range(ROUNDS if len(tokens) > 1 else 4 * ROUNDS):
            run.forget(0, start)
            rows = Rows.of(tokens, start=start, wanted=[len(tokens) - 1])
            began = time.perf_counter()
            run.step(rows)
            seconds.append(time.perf_counter() - began)
        return median(seconds)

    row, some, rows = timed(many[:1], 0), timed(many[:SOME], 0), timed(many, 0)
    for start in range(0, LONG, ROWS):
        run.step(Rows.of(many, start=start, wanted=[ROWS - 1]))
    return Steps(row, timed(many[:1], LONG), some, rows, timed(many, LONG - ROWS))


def measured(
    threads: int | None = None,
    kv: str = "bf16",
    formats: tuple[str, ...] = FORMATS,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """A profile of the native runtime on so many threads (None: one for each core).

    Two shapes of layers and two depths give, by linear equations, how fast weights are read and
    multiplied, what a layer costs beside that, and what a step does; a long text gives attention.
    UnsupportedError where the native runtime cannot be had.
    """
    absent = missing()
    if absent:
        raise UnsupportedError(f"Only the native runtime is measured for plans: {absent}.")
    count = threads or default_threads()
    bandwidth, solved = read_bandwidth(count), dict[str, Solved]()
    for done, format in enumerate(formats):
        progress(done, len(formats))
        taken = {shape: steps(shape, format, count, kv) for shape in (HALF, NARROW, WIDE)}
        solved[format] = solve(format, kv, bandwidth, taken)
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
        median(s.step for s in all_),
        median(s.row for s in all_),
        BAND,
        details={**machine, "kv": kv, "threads": count, "read_bandwidth": bandwidth},
    )


class Solved(NamedTuple):
    """See `Profile`."""

    weights: float
    few: float
    compute: float
    cache: float
    attention: float
    layer: float
    step: float
    row: float


def solve(format: str, kv: str, bandwidth: float, taken: Mapping[Shape, Steps]) -> Solved:
    """The costs that these times are made of.

    A step of one row is `step` + layers * (`layer` + bytes / `weights`): three shapes for three
    unknowns, of which weights are read no faster than memory is. The others follow one by one.
    """
    half, narrow, wide = (taken[shape] for shape in (HALF, NARROW, WIDE))
    size = {shape: _layer(shape, format) for shape in (NARROW, WIDE)}
    small = (narrow.row - half.row) / (NARROW.layers - HALF.layers)  # a layer, with all it costs
    step = max(0.0, half.row - HALF.layers * small)
    large = (wide.row - step) / WIDE.layers
    weights = min((size[WIDE][0] - size[NARROW][0]) / max(large - small, 1e-9), bandwidth)
    layer = max(0.0, (small - size[NARROW][0] / weights + large - size[WIDE][0] / weights) / 2)
    attention = _mixing(LONG - ROWS, LONG) / (narrow.far_rows - narrow.rows + wide.far_rows - wide.rows)
    # what products of 512 rows take: by the wide shape, then what rows cost beside by the narrow one
    each = {
        shape: (taken[shape].rows - step - _mixing(0, ROWS, shape) / attention) / shape.layers - layer
        for shape in (NARROW, WIDE)
    }
    compute = ROWS * (size[WIDE][1] - size[NARROW][1]) / max(each[WIDE] - each[NARROW], 1e-9)
    row = max(0.0, each[NARROW] / ROWS - size[NARROW][1] / compute)
    added = sum(taken[s].some - taken[s].row - s.layers * row * (SOME - 1) for s in (NARROW, WIDE))
    flops = sum(shape.layers * size[shape][1] for shape in (NARROW, WIDE))
    few = min((SOME - 1) * flops / max(added, 1e-9), compute)
    held = sum(one.per_token * one.count for s in (NARROW, WIDE) for one in layers(s.model, kv))
    cache = LONG * held / (narrow.far_row - narrow.row + wide.far_row - wide.row)
    return Solved(weights, few, compute, cache, attention, layer, step, row)


def _layer(shape: Shape, format: str) -> tuple[float, float]:
    """Bytes and operations of a row in one layer."""
    read, flops = read_in_a_step(shape.model, stored(format), 1)
    return read / shape.layers, flops / shape.layers


def _mixing(start: int, end: int, *shapes: Shape) -> float:
    """Operations of scores and mixtures of the rows from start to end that rows from 0 do not have."""
    pairs = [n * (n + 1) / 2 for n in (start, end)]
    beyond = pairs[1] - pairs[0] - (ROWS * (ROWS + 1) / 2 if start else 0)
    return sum(4.0 * shape.heads * 64 * shape.layers * beyond for shape in shapes or (NARROW, WIDE))
