"""What feeds a stack from beside it: images and audio, made into rows of its own width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.nn.build import build, build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.inputs import Frames, Patches, Put
from qkv.nn.layers import Stack
from qkv.nn.layout import Layout, Source
from qkv.nn.taps import NoTap, Tap

Grid = tuple[int, int] | None
Features = Tensor | Sequence[Tensor | None]


@implements(spec.Projector)
class Projector(nn.Module):
    """maps(norm(merged(pooled(x)))). Neighbours are squares of an image's rows, or of audio's follow on.

    Pooling: Gemma 3, section 2.2; merging: Wang et al. 2024 (Qwen2-VL), section 2.1; two maps: Liu et
    al. 2023 (LLaVA 1.5).
    """

    def __init__(self, node: spec.Projector, width: int):
        super().__init__()
        self.pool, self.merge = node.pool, node.merge
        self.norm = build_if(node.norm, width * node.merge)
        into = [width * node.merge, *(project.width for project in node.maps)]
        self.maps = nn.ModuleList(build(*pair) for pair in zip(node.maps, into, strict=False))

    def forward(
        self, x: Float[Tensor, "batch rows width"], grid: Grid = None
    ) -> Float[Tensor, "batch fewer out"]:
        """`grid` is how the rows stand in an image, down and across; None where they follow one another."""
        x, grid = gathered(x, self.pool, grid)
        x, _ = gathered(x.mean(-2), self.merge, grid)
        x = x.flatten(-2)
        x = x if self.norm is None else self.norm(x)
        for project in self.maps:
            x = project(x)
        return x


def gathered(
    x: Float[Tensor, "batch rows width"], count: int, grid: Grid
) -> tuple[Float[Tensor, "batch groups count width"], Grid]:
    """Neighbouring rows in groups of `count`, row by row within each; and the grid of the groups."""
    if count == 1:
        return x[:, :, None], grid
    side = count if grid is None else math.isqrt(count)
    sides = (x.shape[1],) if grid is None else grid
    if side ** len(sides) != count or any(n % side for n in sides):
        shape = " x ".join(map(str, sides))
        raise UnsupportedError(f"{shape} rows do not divide into groups of {count}.")
    if grid is None:
        return x.unflatten(1, (-1, count)), None
    down, across = grid[0] // side, grid[1] // side
    squares = x.unflatten(1, (down, side, across, side)).transpose(2, 3)
    return squares.flatten(3, 4).flatten(1, 2), (down, across)


@implements(spec.Tower)
class Tower(nn.Module):
    """A stack read at one of its layers, from one of its rows on, and projected. Taps: output."""

    def __init__(self, node: spec.Tower):
        super().__init__()
        self.node = node
        self.stack = cast(Stack, build(node.stack))
        self.projector = build_if(node.projector, node.stack.width)

    def forward(self, features: Tensor, tap: Tap = NoTap()) -> Float[Tensor, "batch rows width"]:
        """Images (batch, channels, height, across), or audio (batch, channels, frames)."""
        embedding = cast(Patches | Frames, self.stack.embedding)
        layout = embedding.layout(features)
        x = self.stack(embedding(features, layout), layout, tap=tap, until=self.node.until)
        x = x[:, self.node.first_row :]
        return tap("output", x if self.projector is None else self.projector(x, embedding.grid))


class Towers(nn.ModuleList):
    """All towers of a model: where their rows go."""

    def put(self, features: Features | None, tokens: Tensor, layout: Layout, tap: Tap = NoTap()) -> list[Put]:
        """The rows of those that replace tokens, and the places these take. Padding is no place."""
        found = []
        for i, (tower, given) in enumerate(zip(self, self.each(features), strict=True)):
            join = cast(Tower, tower).node.join
            if not isinstance(join, spec.Replace):
                continue
            places = (tokens == join.token) & (layout.positions >= 0)
            count = int(places.sum())
            if given is None:
                if count:
                    raise RequestError(
                        f"Token {join.token} stands for features at {count:,} places, and none were given."
                    )
                continue
            if join.both_ways:
                raise UnsupportedError(
                    "Rows of an image that see one another both ways can be described but not run in torch "
                    "yet: give the call no features."
                )
            rows = tower(given, tap.at("towers", i)).flatten(0, 1)
            if len(rows) != count:
                raise RequestError(
                    f"The features make {len(rows):,} rows, and {count:,} places hold token {join.token} "
                    "for them to take."
                )
            found.append((places, rows))
        return found

    def read(
        self, features: Features | None, cache: Cache | None = None, tap: Tap = NoTap()
    ) -> Source | None:
        """The rows of the one that cross-attention reads: made once, where a cache keeps them."""
        for i, (tower, given) in enumerate(zip(self, self.each(features), strict=True)):
            if isinstance(cast(Tower, tower).node.join, spec.Read):
                return self._source(i, given, cache, tap)
        return None

    def _source(self, i: int, given: Tensor | None, cache: Cache | None, tap: Tap) -> Source:
        states: Tensor | None = None

        def run() -> tuple[Tensor, ...]:
            nonlocal states
            if given is None:
                raise RequestError("This model reads features beside its tokens, and the call gives none.")
            states = self[i](given, tap.at("towers", i))
            return (Layout.unpadded(states.shape[0], states.shape[1], states.device).positions,)

        (positions,) = run() if cache is None else cache.keep("source", run)
        return Source(states, positions)

    def each(self, features: Features | None) -> list[Tensor | None]:
        """What is given to each tower. With one tower the features stand alone."""
        if features is None:
            return [None] * len(self)
        given: list[Tensor | None] = [features] if isinstance(features, Tensor) else list(features)
        if len(given) != len(self):
            raise RequestError(f"Features for {len(given)} towers were given; this model has {len(self)}.")
        return given
