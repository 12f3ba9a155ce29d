"""Positions that are added to the embedding; and what a scheme may do inside attention."""

from __future__ import annotations

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError
from qkv.nn.build import implements
from qkv.nn.layout import Layout


@implements(spec.Learned)
class Learned(nn.Module):
    """A table: position p adds row p + offset. A token that is not there reads the row before the first."""

    def __init__(self, node: spec.Learned, width: int):
        super().__init__()
        self.offset = node.offset
        self.weight = nn.Parameter(torch.empty(node.rows, width))

    def forward(self, positions: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        rows = (positions + self.offset).clamp(min=0)
        if rows.numel() and int(rows.max()) >= len(self.weight):
            limit = len(self.weight) - self.offset
            raise RequestError(
                f"Position {int(positions.max()):,} has no row: this model's table ends at {limit:,}."
            )
        return self.weight[rows]


@implements(spec.Sinusoidal)
class Sinusoidal(nn.Module):
    """sin(p * base^(-2i/width)) and its cosine. Vaswani et al. 2017, section 3.5. Computed, not stored."""

    def __init__(self, node: spec.Sinusoidal, width: int):
        super().__init__()
        self.node, self.width = node, width

    def forward(self, positions: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        return sinusoids(positions.clamp(min=0), self.width, self.node.base, self.node.layout)


def sinusoids(
    positions: Int[Tensor, "*shape"], width: int, base: float, layout: str
) -> Float[Tensor, "*shape width"]:
    """Of positions or distances: sines and cosines in turn ("interleaved"), or all sines first ("halves")."""
    exponent = -torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
    angles = positions[..., None].double() * base**exponent
    sine, cosine = angles.sin().float(), angles.cos().float()
    if layout == "halves":
        return torch.cat([sine, cosine], -1)
    return torch.stack([sine, cosine], -1).flatten(-2)


class Projecting(Protocol):
    """What a position scheme may ask of the attention it stands in."""

    @property
    def scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        ...

    def as_queries(
        self, x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch heads length head_dim"]: ...

    def as_keys(
        self, x: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch kv_heads length head_dim"]: ...


class AttentionPosition(nn.Module):
    """A position scheme inside attention: it turns queries and keys, biases scores, or adds to values.

    A scheme overrides what it does; built as `Class(node, width, heads, head_dim)`.
    """

    by_length = False  # whether turning depends on the total length: then keys are cached unturned

    def turn(
        self, x: Float[Tensor, "batch heads length head_dim"], layout: Layout, keys: bool
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Queries, at the layout's positions, or keys, at its key positions."""
        return x

    def bias(
        self,
        query: Float[Tensor, "batch heads query head_dim"],
        key: Float[Tensor, "batch kv_heads key head_dim"],
        layout: Layout,
        attention: Projecting,
    ) -> Float[Tensor, "#batch heads query key"] | None:
        """What is added to the scaled scores, in fp32."""
        return None

    def values(
        self, weights: Float[Tensor, "batch heads query key"], layout: Layout
    ) -> Float[Tensor, "batch heads query value_dim"] | None:
        """What the weights mix in beside the values."""
        return None
