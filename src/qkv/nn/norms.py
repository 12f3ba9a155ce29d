"""Normalisations: statistics in fp32, whatever the stream's type, and the result in that type."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.nn.build import implements
from qkv.nn.layout import Layout


def through(
    part: nn.Module | None, x: Float[Tensor, "batch length width"], layout: Layout
) -> Float[Tensor, "batch length width"]:
    """The stream through a norm or gate, where there is one. BatchNorm must know which tokens are there."""
    if part is None:
        return x
    return cast(Tensor, part(x, layout.positions >= 0) if isinstance(part, BatchNorm) else part(x))


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


@implements(spec.ScaleNorm)
class ScaleNorm(nn.Module):
    """g * x / max(|x|, eps), one g for all channels. Nguyen and Salazar 2019, section 2.2."""

    def __init__(self, node: spec.ScaleNorm, *sizes: int):
        super().__init__()
        self.eps = node.eps
        self.weight = nn.Parameter(torch.empty(1))

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        # the root of what is clamped, not the clamped root: at 0 the root has no finite gradient
        length = wide.square().sum(-1, keepdim=True).clamp(min=self.eps**2).sqrt()
        return (self.weight.float() * wide / length).to(x.dtype)


@implements(spec.DyT)
class DyT(nn.Module):
    """scale * tanh(alpha * x) + bias. Zhu et al. 2025, equation 4. It bounds, and measures nothing."""

    def __init__(self, node: spec.DyT, *sizes: int):
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), node.alpha))
        self.weight = nn.Parameter(torch.empty(sizes))
        self.bias = nn.Parameter(torch.empty(sizes))

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        bounded = torch.tanh(self.alpha.float() * x.float())
        return (self.weight.float() * bounded + self.bias.float()).to(x.dtype)


@implements(spec.BatchNorm)
class BatchNorm(nn.Module):
    """scale * (x - mean) / sqrt(variance + eps) + bias. Ioffe and Szegedy 2015, algorithms 1 and 2.

    In training, mean and biased variance of each channel over the tokens of the batch that are
    there, and running averages of them (of the unbiased variance) move by `momentum`; in evaluation,
    those averages.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, node: spec.BatchNorm, *sizes: int):
        super().__init__()
        self.node = node
        self.weight = nn.Parameter(torch.empty(sizes))
        self.bias = nn.Parameter(torch.empty(sizes))
        self.register_buffer("running_mean", torch.zeros(sizes))
        self.register_buffer("running_variance", torch.ones(sizes))

    def forward(
        self, x: Float[Tensor, "batch length size"], present: Bool[Tensor, "batch length"] | None = None
    ) -> Float[Tensor, "batch length size"]:
        wide = x.float()
        mean, variance = self.running_mean.float(), self.running_variance.float()
        if self.training:
            if present is None:
                raise UnsupportedError(
                    "Batch normalisation can stand around the steps of a layer and at the end, nowhere else."
                )
            mean, variance = self._measured(wide[present])
        y = (wide - mean) * torch.rsqrt(variance + self.node.eps)
        return (self.weight.float() * y + self.bias.float()).to(x.dtype)

    def _measured(self, rows: Float[Tensor, "tokens size"]) -> tuple[Tensor, Tensor]:
        count = len(rows)
        if count < 2:
            raise RequestError(f"Batch normalisation learns from at least 2 tokens; this batch has {count}.")
        mean = rows.mean(0)
        variance = (rows - mean).square().mean(0)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), self.node.momentum)
            unbiased = variance * count / (count - 1)
            self.running_variance.lerp_(unbiased.to(self.running_variance), self.node.momentum)
        return mean, variance
