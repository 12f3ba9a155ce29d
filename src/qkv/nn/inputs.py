"""From token numbers to the stream the layers work on."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.nn.build import build, build_if, implements
from qkv.nn.feed_forward import activation
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear


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

    def __init__(self, node: spec.Tokens):
        super().__init__()
        if node.types:
            raise UnsupportedError("Token types cannot be run in torch yet.")
        self.scale = node.scale
        self.weight = nn.Parameter(torch.empty(node.vocab, node.table_width or node.width))
        self.widen = Linear(node.table_width, node.width) if node.table_width else None
        self.position = build(node.position, node.width) if node.position else None
        self.norm = build_if(node.norm, node.width)
        self.projection = build_if(node.projection, node.width)

    def forward(
        self, tokens: Int[Tensor, "batch length"], layout: Layout
    ) -> Float[Tensor, "batch length width"]:
        self.check(tokens)
        x = self.weight[tokens]
        if self.scale != 1:
            x = x * torch.tensor(self.scale, dtype=x.dtype)  # rounded to the stream's type, as trained
        if self.widen is not None:
            x = self.widen(x)
        if self.position is not None:
            x = x + self.position(layout.positions).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.projection is None else self.projection(x)

    def check(self, tokens: Tensor) -> None:
        vocab = len(self.weight)
        wrong = ((tokens < 0) | (tokens >= vocab)).nonzero()
        if len(wrong):
            row, place = wrong[0].tolist()
            token = int(tokens[row, place])
            raise RequestError(
                f"Token {token} at place {place} of row {row} is outside the vocabulary of {vocab:,} entries."
            )
