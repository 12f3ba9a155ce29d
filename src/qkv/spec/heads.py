"""What a model answers with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from qkv.spec.inputs import Project
from qkv.spec.layers import Layer
from qkv.spec.node import Node, Tensor, linear, matrix, node, part, product_flops, under, vector
from qkv.spec.norms import Norm, RMSNorm


@node
class Answer(Node):
    """Base of the heads. Their size is the width of the stream; they answer once or for every token."""

    every_token: ClassVar[bool] = False

    def flops(self, width: int, length: int) -> int:
        return product_flops(self.tensors(width)) * (length if self.every_token else 1)


@node
class Language(Answer):
    """Logits over the vocabulary for the next token. Tied to the token table by the same `shared` name.

    `transform` comes before the matrix; `scale` multiplies the logits; `cap` bounds them to
    cap * tanh(logits / cap). A `shared` name covers the matrix alone.
    """

    shares: ClassVar[tuple[str, ...] | None] = ("weight",)
    every_token: ClassVar[bool] = True

    vocab: int
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None
    transform: Project | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from part("transform", self.transform, width)
        yield matrix("weight", self.vocab, self.transform.width if self.transform else width)
        if self.bias:
            yield vector("bias", self.vocab)


@node
class MaskedLanguage(Language):
    """The same for the masked tokens themselves. Devlin et al. 2018."""


@node
class Pool(Answer):
    """A sequence as one vector: its "first" or "last" token, the "mean" or the "max"; then `dense`."""

    how: Literal["first", "last", "mean", "max"] = "first"
    dense: Project | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from part("dense", self.dense, *sizes)

    def width(self, into: int) -> int:
        return self.dense.width if self.dense else into


@node
class SequenceClass(Answer):
    """One of `classes` for the whole sequence (or a regression with one)."""

    classes: int
    pool: Pool = Pool()
    bias: bool = True

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from part("pool", self.pool, width)
        yield from linear("output", self.classes, self.pool.width(width), self.bias)


@node
class TokenClass(Answer):
    """One of `classes` for each token, read through `transform` where there is one."""

    every_token: ClassVar[bool] = True

    classes: int
    bias: bool = True
    transform: Project | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from part("transform", self.transform, width)
        into = self.transform.width if self.transform else width
        yield from linear("output", self.classes, into, self.bias)


@node
class Span(Answer):
    """A start and an end score for each token: question answering. Devlin et al. 2018, section 4.2."""

    every_token: ClassVar[bool] = True
    classes: ClassVar[int] = 2
    bias: ClassVar[bool] = True

    transform: Project | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from part("transform", self.transform, width)
        yield from linear("output", 2, self.transform.width if self.transform else width, True)


@node
class PooledEmbedding(Answer):
    """The sequence as one vector, of unit length if `normalise`."""

    pool: Pool = Pool("mean")
    normalise: bool = True

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from part("pool", self.pool, *sizes)


@node
class MultiToken(Answer):
    """The next token and, through one further layer each, the ones after it. DeepSeek-V3, section 2.2.

    A further layer reads join([norm(hidden); norm(token's row)]) and answers, through a norm of its
    own, with the matrix of `next`.
    """

    every_token: ClassVar[bool] = True

    next: Language
    layers: tuple[Layer, ...]
    norm: Norm = RMSNorm()

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from part("next", self.next, width)
        for i, layer in enumerate(self.layers):
            yield from under(f"layers.{i}", self._further(layer, width))

    def _further(self, layer: Layer, width: int) -> Iterator[Tensor]:
        yield from part("hidden_norm", self.norm, width)
        yield from part("token_norm", self.norm, width)
        yield from linear("join", width, 2 * width)
        yield from part("layer", layer, width)
        yield from part("norm", self.norm, width)

    def flops(self, width: int, length: int) -> int:
        logits = (1 + len(self.layers)) * self.next.flops(width, length)
        join = 2 * length * width * 2 * width
        return logits + sum(join + layer.flops(width, length) for layer in self.layers)


Head = Language | SequenceClass | TokenClass | Span | PooledEmbedding | Pool | MultiToken
