"""The affine map."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """x W^T + b, weight (out, into). Computed in the weight's own type: a border casts, whatever came in."""

    def __init__(self, into: int, out: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, into))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x: Float[Tensor, "*rows into"]) -> Float[Tensor, "*rows out"]:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)
