"""Where order enters: added to the embedding, turning queries and keys, biasing the score, or on values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from qkv.errors import ConfigError
from qkv.spec.node import Node, Tensor, linear, node, part, vector
from qkv.spec.norms import Norm
from qkv.spec.rotary import Frequencies, Scaling, inverse_frequencies


@node
class Position(Node):
    """Base of the position schemes. Sizes are (width, heads, head_dim) in attention, (width,) in an input."""

    def flops(self, width: int, heads: int, head_dim: int, length: int, pairs: int) -> int:
        """Of making vectors of distances and of their products over `pairs` visible pairs."""
        return 0


@node
class Sinusoidal(Position):
    """Sines and cosines of geometrically slower angles, added to the embedding. Vaswani et al. 2017, 3.5.

    In turn, or in "halves": all sines, then all cosines.
    """

    base: float = 10_000.0
    layout: Literal["interleaved", "halves"] = "interleaved"


@node
class Learned(Position):
    """A table with one row a position, added to the embedding; position p reads row p + offset."""

    rows: int
    offset: int = 0

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", self.rows, sizes[0])


@node
class Axes(Node):
    """Pairs divided over several position axes (time, height, width): 2-D rotary and M-RoPE.

    `sections` counts the pairs of each axis. In order "blocks" they follow one another; in order
    "interleaved" they take turns, and a turn of an axis that has all its pairs goes to the first.
    A pair has the frequency of its place in the whole head, as in M-RoPE (Qwen2-VL, section 2.1),
    or, with `own`, each axis begins again with the fastest, as in vision models.
    """

    sections: tuple[int, ...]
    order: Literal["blocks", "interleaved"] = "blocks"
    own: bool = False

    def of_pairs(self) -> tuple[int, ...]:
        """The axis of each pair."""
        if self.order == "blocks":
            return tuple(axis for axis, pairs in enumerate(self.sections) for _ in range(pairs))
        count, axes = len(self.sections), []
        for pair in range(sum(self.sections)):
            turn, axis = divmod(pair, count)
            axes.append(axis if turn < self.sections[axis] else 0)
        if any(axes.count(axis) != pairs for axis, pairs in enumerate(self.sections)):
            raise ConfigError(f"Sections {self.sections} cannot take turns; the first must be the largest.")
        return tuple(axes)


@node
class Rotary(Position):
    """Queries and keys rotated, pair by pair, by an angle proportional to the position. Su et al. 2021.

    `dims` is how many leading dimensions of a head rotate (None: all). `pairs` says how a
    checkpoint pairs them: "half" (i with i + dims/2) or "interleaved" (2i with 2i + 1).
    """

    theta: float = 10_000.0
    dims: int | None = None
    pairs: Literal["half", "interleaved"] = "half"
    scaling: Scaling | None = None
    axes: Axes | None = None

    def frequencies(self, head_dim: int, length: int) -> tuple[Frequencies, float]:
        """Radians a position, one a pair, float32, and the factor on cosines and sines."""
        dims = self.dims or head_dim
        if self.axes is None or not self.axes.own:
            return self._frequencies(dims, length)
        whole, factor = np.empty(dims // 2, np.float32), 1.0
        for axis, pairs in enumerate(self.axes.sections):
            own, factor = self._frequencies(2 * pairs, length)
            whole[np.equal(self.axes.of_pairs(), axis)] = own
        return whole, factor

    def _frequencies(self, dims: int, length: int) -> tuple[Frequencies, float]:
        if self.scaling is None:
            return inverse_frequencies(self.theta, dims).astype(np.float32), 1.0
        return self.scaling.frequencies(self.theta, dims, length)


@node
class Alibi(Position):
    """A score penalty linear in the distance, one fixed slope a head. Press et al. 2022."""

    max_bias: float = 8.0

    def slopes(self, heads: int) -> tuple[float, ...]:
        """Of each head: 2^(-max_bias / n), its square, its cube, ... for n heads, a power of two.

        For other numbers the authors' code takes those of the next lower power of two, then every
        second one of twice that power.
        """
        lower = 1 << (heads.bit_length() - 1)
        whole = [2 ** (-self.max_bias * i / lower) for i in range(1, lower + 1)]
        between = [2 ** (-self.max_bias * i / (2 * lower)) for i in range(1, 2 * lower, 2)]
        return tuple(whole + between[: heads - lower])


def whole_root(value: int, degree: int) -> int:
    """The whole part of value^(1 / degree). In whole numbers: a float misses a root that is whole."""
    root = int(math.exp(math.log(value) / degree))
    while root**degree > value:
        root -= 1
    while (root + 1) ** degree <= value:
        root += 1
    return root


@node
class Buckets(Position):
    """A learned score bias for each head and each bucket of distances. Raffel et al. 2019 (T5).

    Half the buckets of a side hold one distance each, the other half grow geometrically up to
    `max_distance`; the last also holds all that are further. Looking both ways, keys after the
    query have the second half of all buckets; else they share the bucket of distance 0.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    @property
    def one_side(self) -> int:
        """How many buckets hold the distances of one direction."""
        return self.buckets // 2 if self.bidirectional else self.buckets

    def starts(self) -> tuple[int, ...]:
        """The first distance of each bucket of one side but the bucket of 0.

        Distance r is in bucket exact + floor(ln(r / exact) / ln(max_distance / exact) * growing),
        reckoned in whole numbers.
        """
        side = self.one_side
        exact, growing = side // 2, side - side // 2
        if not 0 < exact < self.max_distance:
            raise ConfigError(
                f"{self.buckets} buckets do not divide distances up to {self.max_distance}: there must be "
                "at least two a side, and a distance further than half of them."
            )
        starts = list(range(1, exact + 1))
        for step in range(1, growing):
            # the first r with r >= exact * (max_distance / exact)^(step / growing)
            power = self.max_distance**step * exact ** (growing - step)
            starts.append(whole_root(power - 1, growing) + 1)
        return tuple(starts)

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        _, heads, _ = sizes
        yield vector("weight", self.buckets, heads)


@node
class Shaw(Position):
    """A learned vector a clipped distance, added to keys and, if `values`, to values. Shaw et al. 2018."""

    clip: int
    values: bool = True
    per_head: bool = False

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        _, heads, head_dim = sizes
        shape = (2 * self.clip + 1, *((heads,) if self.per_head else ()), head_dim)
        yield vector("key.weight", *shape)
        if self.values:
            yield vector("value.weight", *shape)

    def flops(self, width: int, heads: int, head_dim: int, length: int, pairs: int) -> int:
        return 2 * heads * head_dim * pairs * (1 + self.values)


@node
class HeadBiases(Node):
    """Transformer-XL's u and v: what every query asks of contents and of distances."""

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        _, heads, head_dim = sizes
        yield vector("content", heads, head_dim)
        yield vector("distance", heads, head_dim)


@node
class RelativeSinusoidal(Position):
    """Sinusoids of the distance, projected to a key of their own, and two biases a head. Dai et al. 2019.

    All sines, then all cosines, as in the authors' code.
    """

    base: float = 10_000.0
    biases: HeadBiases = HeadBiases()

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        width, heads, head_dim = sizes
        yield from linear("key", heads * head_dim, width)
        yield from part("biases", self.biases, *sizes)

    def flops(self, width: int, heads: int, head_dim: int, length: int, pairs: int) -> int:
        return 2 * heads * head_dim * (width * length + pairs)  # a key for each distance, then the scores


@node
class RelativeTable(Node):
    """One learned vector of the stream's width for each distance bucket, normalised or not."""

    rows: int
    norm: Norm | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", self.rows, sizes[0])
        yield from part("norm", self.norm, sizes[0])


@node
class Disentangled(Position):
    """Contents against distances and distances against contents, scored apart. He et al. 2020 (DeBERTa).

    `terms` are "content_to_position" and "position_to_content". With `own=False` the table goes
    through the attention's own query and key projections (v2, v3), else through its own (v1).
    `buckets` None: every distance up to `max_distance` has its own row. Otherwise `buckets` rows a
    side: half of them for one distance each, the other half growing geometrically.
    """

    table: RelativeTable
    terms: tuple[Literal["content_to_position", "position_to_content"], ...] = (
        "content_to_position",
        "position_to_content",
    )
    max_distance: int = 512
    buckets: int | None = None
    own: bool = False

    @property
    def reach(self) -> int:
        """Rows of the table for one direction; distance 0 reads the row of this number."""
        return self.max_distance if self.buckets is None else self.buckets

    def starts(self) -> tuple[int, ...]:
        """The first distance of each bucket of one side but the bucket of 0.

        Beyond half of them, distance r is in bucket
        half + ceil(ln(r / half) / ln((max_distance - 1) / half) * (half - 1)), in whole numbers.
        """
        if self.buckets is None:
            return tuple(range(1, self.max_distance + 1))
        half = self.buckets // 2
        if self.buckets % 2 or not 1 < half < self.max_distance - 1:
            raise ConfigError(
                f"{self.buckets} buckets do not divide distances up to {self.max_distance}: they must be "
                "even, at least 4, and half of them must end before the last distance."
            )
        starts = list(range(1, half + 1))
        for step in range(half):
            # the first r with r > half * ((max_distance - 1) / half)^(step / (half - 1))
            power = (self.max_distance - 1) ** step * half ** (half - 1 - step)
            starts.append(whole_root(power, half - 1) + 1)
        return tuple(starts)

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        width, heads, head_dim = sizes
        yield from part("table", self.table, *sizes)
        if self.own and "content_to_position" in self.terms:
            yield from linear("key", heads * head_dim, width)
        if self.own and "position_to_content" in self.terms:
            yield from linear("query", heads * head_dim, width, bias=True)

    def flops(self, width: int, heads: int, head_dim: int, length: int, pairs: int) -> int:
        return 2 * heads * head_dim * (width * self.table.rows + pairs) * len(self.terms)
