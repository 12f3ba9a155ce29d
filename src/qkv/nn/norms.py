"""Normalisations: statistics in fp32, whatever the stream's type, and the result in that type."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.nn.build import implements


@implements(spec.LayerNorm)
class LayerNorm(nn.Module):
    """scale * (x - mean) / sqrt(variance + eps) + bias. Ba et al. 2016; the variance is the biased one."""

    def __init__(self, node: spec.LayerNorm, *sizes: int):
        super().__init__()
        self.eps = node.eps
        self.weight = nn.Parameter(torch.empty(sizes)) if node.scale else None
        self.bias = nn.Parameter(torch.empty(sizes)) if node.bias else None

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight.float()
        if self.bias is not None:
            y = y + self.bias.float()
        return y.to(x.dtype)


@implements(spec.RMSNorm)
class RMSNorm(nn.Module):
    """(offset + scale) * x / sqrt(mean(x^2) + eps). Zhang and Sennrich 2019, equation 4."""

    def __init__(self, node: spec.RMSNorm, *sizes: int):
        super().__init__()
        self.eps, self.offset = node.eps, node.offset
        self.weight = nn.Parameter(torch.empty(sizes)) if node.scale else None

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return y.to(x.dtype)
        if self.offset:  # Gemma scales before it rounds, Llama after
            return (y * (self.offset + self.weight.float())).to(x.dtype)
        return (y.to(x.dtype) * self.weight).to(x.dtype)
