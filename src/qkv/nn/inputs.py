"""From tokens, images or audio to the rows the layers work on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError
from qkv.nn.build import build, build_if, implements
from qkv.nn.feed_forward import activation
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear

Put = tuple[Bool[Tensor, "batch length"], Float[Tensor, "rows width"]]  # where, and what stands there


@implements(spec.Project)
class Project(nn.Module):
    """norm(activation(linear(x)))."""

    def __init__(self, node: spec.Project, into: int):
        super().__init__()
        self.linear = Linear(into, node.width, node.bias)
        self.activation = activation(node.activation or "identity")
        self.norm = build_if(node.norm, node.width)

    def forward(self, x: Float[Tensor, "*rows into"]) -> Float[Tensor, "*rows width"]:
        y = self.activation(self.linear(x))
        return y if self.norm is None else self.norm(y)


@implements(spec.Tokens)
class Tokens(nn.Module):
    """scale * table[token] + position + type, normalised, then projected, each where there is one."""

    reads = "tokens"

    def __init__(self, node: spec.Tokens):
        super().__init__()
        self.scale = node.scale
        self.weight = nn.Parameter(torch.empty(node.vocab, node.table_width or node.width))
        self.widen = Linear(node.table_width, node.width) if node.table_width else None
        self.position = build(node.position, node.width) if node.position else None
        self.types = nn.Embedding(node.types, node.width) if node.types else None
        self.norm = build_if(node.norm, node.width)
        self.projection = build_if(node.projection, node.width)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        layout: Layout,
        types: Int[Tensor, "batch length"] | None = None,
        put: Sequence[Put] = (),
    ) -> Float[Tensor, "batch length width"]:
        """`types` are 0 where not given. `put` are the places where rows of a tower stand, and these rows."""
        for places, _ in put:
            tokens = tokens.masked_fill(places, 0)  # a stand-in may have no row of its own
        _check(tokens, len(self.weight), "Token", "outside the vocabulary of {:,} entries")
        x = self.row(tokens)
        for places, rows in put:
            x = x.index_put((places,), rows.to(x.dtype))
        if self.position is not None:
            x = x + self.position(layout.positions).to(x.dtype)
        if self.types is not None:
            x = x + self.types(self.typed(tokens, types))
        if self.norm is not None:
            x = self.norm(x)
        return x if self.projection is None else self.projection(x)

    def row(self, tokens: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        """What stands for these tokens by themselves, before anything is added."""
        x = self.weight[tokens]
        if self.scale != 1:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded to the stream's type, as trained
        return x if self.widen is None else self.widen(x)

    def typed(self, tokens: Tensor, types: Tensor | None) -> Int[Tensor, "batch length"]:
        assigned = torch.zeros_like(tokens) if types is None else types.to(tokens)
        if assigned.shape != tokens.shape:
            got, must = tuple(assigned.shape), tuple(tokens.shape)
            raise RequestError(f"Types must be one for each token, {must}; got {got}.")
        if self.types is not None:
            _check(assigned, self.types.num_embeddings, "Type", "not one of this model's {:,}")
        return assigned

    def layout(self, tokens: Tensor) -> Layout:
        """Of unpadded rows."""
        return Layout.unpadded(*self.rows(tokens), tokens.device)

    def rows(self, tokens: Tensor) -> tuple[int, int]:
        """Batch and length. Raises RequestError for what is no batch of tokens."""
        if tokens.ndim != 2 or 0 in tokens.shape:
            raise RequestError(f"Tokens must be (batch, length), both at least 1; got {tuple(tokens.shape)}.")
        return tokens.shape[0], tokens.shape[1]


def _check(ids: Tensor, count: int, what: str, problem: str) -> None:
    wrong = ((ids < 0) | (ids >= count)).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        found = int(ids[row, place])
        raise RequestError(f"{what} {found} at place {place} of row {row} is {problem.format(count)}.")


@implements(spec.Patches)
class Patches(nn.Module):
    """norm([class; W patches] + position): squares row by row, each (channels, size, size) flat.

    Dosovitskiy et al. 2020, equation 1. What is left over at the lower and right edges is not read.
    """

    reads = "images, as features"

    def __init__(self, node: spec.Patches):
        super().__init__()
        self.node = node
        self.patch = Linear(node.channels * node.size**2, node.width, node.bias)
        self.class_token = nn.Parameter(torch.empty(node.width)) if node.class_token else None
        self.position = build(node.position, node.width) if node.position else None
        self.norm = build_if(node.norm, node.width)

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return self.node.image[0] // self.node.size, self.node.image[1] // self.node.size

    def forward(
        self, images: Float[Tensor, "batch channels height across"], layout: Layout
    ) -> Float[Tensor, "batch rows width"]:
        size, (down, across) = self.node.size, self.grid
        whole = images[:, :, : down * size, : across * size]
        squares = whole.unflatten(3, (across, size)).unflatten(2, (down, size))
        x = self.patch(squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        if self.position is not None:
            x = x + self.position(layout.positions).to(x.dtype)
        return x if self.norm is None else self.norm(x)

    def layout(self, images: Tensor) -> Layout:
        """Each patch also at its place down and across, for positions on two axes."""
        layout = Layout.unpadded(*self.rows(images), images.device)
        if self.class_token is not None:
            return layout
        places = torch.cartesian_prod(*(torch.arange(n, device=images.device) for n in self.grid))
        return layout.on_axes(places.T[:, None].expand(-1, *layout.shape))

    def rows(self, images: Tensor) -> tuple[int, int]:
        """Batch and rows. Raises RequestError for images of another size."""
        must = (self.node.channels, *self.node.image)
        if images.ndim != 4 or not len(images) or tuple(images.shape[1:]) != must:
            raise RequestError(
                f"Images must be (batch, {', '.join(map(str, must))}); got {tuple(images.shape)}."
            )
        return len(images), self.node.rows(0)


@implements(spec.Frames)
class Frames(nn.Module):
    """Convolutions over time, each with its activation; then positions. Radford et al. 2022, section 2.2.

    Rows that the layout says are not there are silence to every convolution, as what lies beyond
    the end is.
    """

    reads = "audio, as features"

    def __init__(self, node: spec.Frames):
        super().__init__()
        self.node, self.grid = node, None
        self.activation = activation(node.activation)
        into = (node.channels, *(node.width,) * (len(node.strides) - 1))
        self.convolution = nn.ModuleList(Linear(i * node.kernel, node.width, bias=True) for i in into)
        self.position = build(node.position, node.width) if node.position else None

    def forward(
        self, frames: Float[Tensor, "batch channels frames"], layout: Layout
    ) -> Float[Tensor, "batch rows width"]:
        strides, kernel, x = self.node.strides, self.node.kernel, frames
        there = layout.positions >= 0
        for i, linear in enumerate(cast(Iterable[Linear], self.convolution)):
            heard = there.repeat_interleave(math.prod(strides[i:]), dim=1)[:, None, : x.shape[-1]]
            weight = linear.weight.unflatten(1, (-1, kernel))
            before = (kernel - 1) // 2
            padded = F.pad((x * heard).to(weight.dtype), (before, kernel - 1 - before))
            x = self.activation(F.conv1d(padded, weight, linear.bias, strides[i]))
        x = x.transpose(1, 2)
        return x if self.position is None else x + self.position(layout.positions).to(x.dtype)

    def layout(self, frames: Tensor) -> Layout:
        return Layout.unpadded(*self.rows(frames), frames.device)

    def rows(self, frames: Tensor) -> tuple[int, int]:
        """Batch and rows. Raises RequestError for what are no frames of these channels."""
        if frames.ndim != 3 or 0 in frames.shape or frames.shape[1] != self.node.channels:
            raise RequestError(
                f"Audio must be (batch, {self.node.channels}, frames); got {tuple(frames.shape)}."
            )
        return len(frames), self.node.rows(frames.shape[-1])
