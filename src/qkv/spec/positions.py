"""Where order enters: added to the embedding, turning queries and keys, biasing the score, or on values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

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

    `sections` counts the pairs of each axis; in order "blocks" they follow one another, in order
    "interleaved" they alternate until a section is used up.
    """

    sections: tuple[int, ...]
    order: Literal["blocks", "interleaved"] = "blocks"


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
        if self.scaling is None:
            return inverse_frequencies(self.theta, dims).astype(np.float32), 1.0
        return self.scaling.frequencies(self.theta, dims, length)


@node
class Alibi(Position):
    """A score penalty linear in the distance, one fixed slope a head. Press et al. 2022."""

    max_bias: float = 8.0


@node
class Buckets(Position):
    """A learned score bias for each head and each bucket of distances. Raffel et al. 2019 (T5)."""

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

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
    """Sinusoids of the distance, projected to a key of their own, and two biases a head. Dai et al. 2019."""

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
    `buckets` None: every distance up to `max_distance` has its own row.
    """

    table: RelativeTable
    terms: tuple[Literal["content_to_position", "position_to_content"], ...] = (
        "content_to_position",
        "position_to_content",
    )
    max_distance: int = 512
    buckets: int | None = None
    own: bool = False

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        width, heads, head_dim = sizes
        yield from part("table", self.table, *sizes)
        if self.own and "content_to_position" in self.terms:
            yield from linear("key", heads * head_dim, width)
        if self.own and "position_to_content" in self.terms:
            yield from linear("query", heads * head_dim, width, bias=True)

    def flops(self, width: int, heads: int, head_dim: int, length: int, pairs: int) -> int:
        return 2 * heads * head_dim * (width * self.table.rows + pairs) * len(self.terms)
