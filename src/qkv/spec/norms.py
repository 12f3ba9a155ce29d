"""Normalisations. Each works on the last axis, whose size its surroundings fix."""

from __future__ import annotations

from collections.abc import Iterator

from qkv.spec.node import Node, Tensor, node, vector


@node
class Norm(Node):
    """Base of the normalisations: a scale and no bias unless a subclass says otherwise."""

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", *sizes)


@node
class LayerNorm(Norm):
    """scale * (x - mean) / sqrt(variance + eps) + bias, biased variance. Ba et al. 2016."""

    eps: float = 1e-5
    scale: bool = True
    bias: bool = True

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        if self.scale:
            yield vector("weight", *sizes)
        if self.bias:
            yield vector("bias", *sizes)


@node
class RMSNorm(Norm):
    """(offset + scale) * x / sqrt(mean(x^2) + eps). Zhang and Sennrich 2019. Gemma: offset 1."""

    eps: float = 1e-6
    offset: float = 0.0
    scale: bool = True

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        if self.scale:
            yield vector("weight", *sizes)


@node
class ScaleNorm(Norm):
    """g * x / max(|x|, eps) with one learned g. Nguyen and Salazar 2019."""

    eps: float = 1e-5

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", 1)


@node
class DyT(Norm):
    """scale * tanh(alpha * x) + bias: no statistics at all. Zhu et al. 2025."""

    alpha: float = 0.5

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("alpha", 1)
        yield vector("weight", *sizes)
        yield vector("bias", *sizes)


@node
class BatchNorm(Norm):
    """Statistics over the batch and the length: kept for the lesson why not. Ioffe and Szegedy 2015."""

    eps: float = 1e-5
    momentum: float = 0.1

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", *sizes)
        yield vector("bias", *sizes)
