"""What a stack reads: tokens, image patches, or audio frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from qkv.spec.node import Node, Tensor, linear, node, part, product_flops, vector
from qkv.spec.norms import Norm
from qkv.spec.positions import Position


@node
class Project(Node):
    """An affine map to `width`, then an activation and a norm where given."""

    width: int
    bias: bool = True
    activation: str | None = None
    norm: Norm | None = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (into,) = sizes
        yield from linear("linear", self.width, into, self.bias)
        yield from part("norm", self.norm, self.width)


@node
class Tokens(Node):
    """A table of `vocab` rows; their sum with positions and types is normalised, then projected.

    `table_width`: rows stored narrower than `width` and widened before anything is added
    (OPT-350m). `types` is the number of token types. `projection` comes last (ALBERT, ELECTRA).
    A `shared` name covers the table, not what is added to it: BART's stacks share the one and have
    positions and a norm each.
    """

    shares: ClassVar[tuple[str, ...] | None] = ("weight",)

    vocab: int
    width: int
    scale: float = 1.0
    position: Position | None = None
    types: int = 0
    norm: Norm | None = None
    projection: Project | None = None
    table_width: int | None = None

    @property
    def stream(self) -> int:
        """The width the layers work at."""
        return self.projection.width if self.projection else self.width

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield vector("weight", self.vocab, self.table_width or self.width)
        if self.table_width:
            yield from linear("widen", self.width, self.table_width)
        yield from part("position", self.position, self.width)
        if self.types:
            yield vector("types.weight", self.types, self.width)
        yield from part("norm", self.norm, self.width)
        yield from part("projection", self.projection, self.width)

    def rows(self, length: int) -> int:
        return length

    def flops(self, length: int) -> int:
        return length * product_flops(self.tensors())


@node
class Patches(Node):
    """An image cut into squares of `size` pixels, each mapped to `width`; a class token first if given.

    Positions are added to all rows, the class token's included. Dosovitskiy et al. 2020, section 3.1.
    """

    size: int
    width: int
    image: tuple[int, int]
    channels: int = 3
    bias: bool = False
    class_token: bool = False
    position: Position | None = None
    norm: Norm | None = None

    @property
    def stream(self) -> int:
        return self.width

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from linear("patch", self.width, self.channels * self.size**2, self.bias)
        if self.class_token:
            yield vector("class_token", self.width)
        yield from part("position", self.position, self.width)
        yield from part("norm", self.norm, self.width)

    def rows(self, length: int) -> int:
        return self.patches + self.class_token

    @property
    def patches(self) -> int:
        return (self.image[0] // self.size) * (self.image[1] // self.size)

    def flops(self, length: int) -> int:
        return self.patches * product_flops(self.tensors())


@node
class Frames(Node):
    """Audio features of `channels` bins through 1-D convolutions of width `kernel`, one a stride.

    Each is followed by the activation; then positions are added. Radford et al. 2022 (Whisper), section 2.2.
    """

    channels: int
    width: int
    kernel: int = 3
    strides: tuple[int, ...] = (1, 2)
    activation: str = "gelu"
    position: Position | None = None

    @property
    def stream(self) -> int:
        return self.width

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        into = self.channels
        for i in range(len(self.strides)):
            yield from linear(f"convolution.{i}", self.width, into * self.kernel, bias=True)
            into = self.width
        yield from part("position", self.position, self.width)

    def rows(self, length: int) -> int:
        for stride in self.strides:
            length = -(-length // stride)
        return length

    def flops(self, length: int) -> int:
        total, into = 0, self.channels
        for stride in self.strides:
            length = -(-length // stride)
            total += 2 * length * self.width * into * self.kernel
            into = self.width
        return total


Input = Tokens | Patches | Frames
