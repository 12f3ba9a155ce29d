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
    """scale * tanh(alpha * x) + bias: no statistics at all. Zhu et al. 2025.

    `alpha` is what the one learned factor starts from.
    """

    alpha: float = 0.5

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("alpha", 1)
        yield vector("weight", *sizes)
        yield vector("bias", *sizes)


@node
class BatchNorm(Norm):
    """scale * (x - mean) / sqrt(variance + eps) + bias of each channel. Ioffe and Szegedy 2015.

    In training the statistics are those of all tokens in the batch, so a token's output depends on
    its batch mates and on later tokens: it is here for the lesson why Transformers do without.
    Afterwards they are running averages, into which each batch went with weight `momentum`.
    """

    eps: float = 1e-5
    momentum: float = 0.1

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", *sizes)
        yield vector("bias", *sizes)
