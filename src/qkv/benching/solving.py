"""What steps cost, solved from times: those of two shapes tell costs apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from qkv.benching.shapes import SMALL, SMALL_FORMAT, Shape
from qkv.benching.steps import LONG, SHORT, Steps
from qkv.planning.cache import layers
from qkv.planning.profile import Speeds, gone_through, overlapped, read_at
from qkv.planning.timing import MANY, SOME
from qkv.planning.weights import read_in_a_step, stored
from qkv.planning.workspace import ROWS, widths

FASTEST = 4  # as times of memory's speed: how fast weights are gone through is not told apart beyond


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
    """The costs that these times are made of, one by one.

    `taken` are the times of a narrow shape and of a wide one, `small` the seconds of a row in SMALL.
    """
    layer = max(0.0, small / SMALL.layers - _layer(SMALL, SMALL_FORMAT)[0] / max(dict(reading).values()))
    read = {shape: shape.layers * _layer(shape, format)[0] for shape in taken}
    flops = {shape: _layer(shape, format)[1] for shape in taken}
    attention, pair = _attention(taken)
    # what a row takes in a layer, of so many that they read weights once, and so few that they hardly attend
    each = {}
    for s in taken:
        attending = s.layers * s.heads * _pairs(0, MANY) * (pair + 4 * s.head_dim / attention)
        each[s] = ((taken[s].many - attending) / s.layers - layer) / MANY
    compute, number = _row(each, flops)

    def beside(shape: Shape, rows: int) -> float:
        return shape.layers * (layer + rows * number * widths(shape.model).all)

    memory = {shape: read[shape] / read_at(reading, read[shape]) for shape in taken}
    through = sum(without(taken[s].row - beside(s, 1), memory[s]) for s in taken)
    weights = sum(read.values()) / max(through, sum(memory.values()) / FASTEST)
    computing = {
        s: without(taken[s].some - beside(s, SOME), gone_through(read[s], weights, reading, read[s]))
        for s in taken
    }
    few = min(SOME * sum(s.layers * flops[s] for s in taken) / sum(computing.values()), compute)
    texts = [
        _Text(s, tokens, took - beside(s, rows), products, read[s])
        for s in taken
        for tokens, rows, took, products in (
            (LONG, 1, taken[s].far_row, 0.0),
            (SOME * SHORT, SOME, taken[s].texts, computing[s]),
        )
    ]
    logit = median(times.logit for times in taken.values())
    cache = _cache(texts, weights, reading, kv)
    return Solved(weights, few, compute, cache, attention, pair, layer, number, logit)


class _Text(NamedTuple):
    """A step that goes on with so many tokens: seconds, those of its products, bytes of weights."""

    shape: Shape
    tokens: int
    took: float
    products: float
    read: float


def _cache(texts: Sequence[_Text], weights: float, reading: Speeds, kv: str) -> float:
    """How fast keys and values are gone through: by what rows take longer that have some."""
    seconds = memory_alone = bytes = 0.0
    for text in texts:
        held = text.tokens * sum(one.per_token * one.count for one in layers(text.shape.model, kv))
        among = text.read + held
        seconds += text.took - overlapped(text.products, gone_through(text.read, weights, reading, among))
        memory_alone += held / read_at(reading, among)
        bytes += held
    return bytes / max(without(seconds, memory_alone), memory_alone / FASTEST)


def _attention(taken: Mapping[Shape, Steps]) -> tuple[float, float]:
    """How fast scores and mixtures are, and what a pair costs besides: by heads of two sizes."""
    narrow, wide = taken
    more = _pairs(LONG - ROWS, LONG) - _pairs(0, ROWS)
    a_pair = {s: (taken[s].far_rows - taken[s].rows) / (more * s.layers * s.heads) for s in taken}
    slowness = (a_pair[wide] - a_pair[narrow]) / (4 * (wide.head_dim - narrow.head_dim))
    pair = a_pair[narrow] - 4 * narrow.head_dim * slowness
    if slowness <= 0 or pair < 0:  # the machine changed meanwhile: operations alone, then
        return sum(4 * s.head_dim for s in a_pair) / max(sum(a_pair.values()), 1e-18), 0.0
    return 1 / slowness, pair


def _row(each: Mapping[Shape, float], flops: Mapping[Shape, float]) -> tuple[float, float]:
    """How fast products are, and what each number of a row costs besides: what a row takes in two layers.

    Products grow with the square of a layer's width, numbers with the width.
    """
    narrow, wide = each
    numbers = {shape: widths(shape.model).all for shape in each}
    apart = flops[wide] * numbers[narrow] - flops[narrow] * numbers[wide]
    number = (flops[wide] * each[narrow] - flops[narrow] * each[wide]) / apart
    slowness = (numbers[narrow] * each[wide] - numbers[wide] * each[narrow]) / apart
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
