"""The whole: stacks, what feeds them, and what they answer with; and what can be counted from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from qkv.errors import ConfigError
from qkv.spec.attention import GatedDelta, StateSpace
from qkv.spec.heads import Head
from qkv.spec.inputs import Input, Project, Tokens
from qkv.spec.layers import Layer, Mixer
from qkv.spec.node import Node, Tensor, node, part
from qkv.spec.norms import Norm


@node
class Stack(Node):
    """An input and the layers that work on it, one entry a layer, then a norm."""

    input: Input
    layers: tuple[Layer, ...]
    norm: Norm | None = None

    @property
    def width(self) -> int:
        return self.input.stream

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from part("embedding", self.input)
        for i, layer in enumerate(self.layers):
            yield from part(f"layers.{i}", layer, self.width)
        yield from part("norm", self.norm, self.width)

    def mixers(self) -> Iterator[Mixer]:
        for layer in self.layers:
            for _, mixer in layer.mixers():
                yield mixer

    def flops(self, length: int, source: int = 0) -> int:
        """Of one forward pass over `length` inputs, reading `source` rows of another stack."""
        rows = self.input.rows(length)
        total = self.input.flops(length)
        for layer, count in Counter(self.layers).items():
            total += count * layer.flops(self.width, rows, source)
        return total


@node
class Replace(Node):
    """The tower's rows take the places of this token in the stack they feed.

    `both_ways`: there the rows of one image see one another, whatever the stack's masks say (Gemma 3).
    """

    token: int
    both_ways: bool = False


@node
class Read(Node):
    """The stack's cross-attention reads the tower's rows."""


@node
class Projector(Node):
    """From a tower's width to a stack's.

    A square of `pool` neighbouring rows becomes their mean (Gemma 3), one of `merge` rows stands
    side by side (Qwen2-VL), then a norm, then each map in turn (LLaVA 1.5: two).
    """

    maps: tuple[Project, ...]
    norm: Norm | None = None
    merge: int = 1
    pool: int = 1

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        width *= self.merge
        yield from part("norm", self.norm, width)
        for i, project in enumerate(self.maps):
            yield from part(f"maps.{i}", project, width)
            width = project.width


@node
class Tower(Node):
    """A stack that feeds another: the output of `take_layer` from row `first_row` on, projected, joined.

    `take_layer` counts the embedding as 0; -1 is the last layer, after the stack's norm.
    """

    stack: Stack
    join: Replace | Read
    projector: Projector | None = None
    take_layer: int = -1
    first_row: int = 0

    @property
    def until(self) -> int | None:
        """How many layers are run; None for all, and the norm."""
        if self.take_layer == -1:
            return None
        depth, taken = len(self.stack.layers), self.take_layer
        until = taken if taken >= 0 else depth + 1 + taken
        if not 0 <= until <= depth:
            raise ConfigError(f"A tower of {depth:,} layers has no layer {taken:,} to take.")
        return until

    def rows(self, length: int) -> int:
        """How many stand for an image, or for `length` frames of audio, where they join."""
        each = self.projector.pool * self.projector.merge if self.projector else 1
        return (self.stack.input.rows(length) - self.first_row) // each

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from part("stack", self.stack)
        yield from part("projector", self.projector, self.stack.width)


@node
class Model(Node):
    """A Transformer: an encoder, a decoder, or both; a head or none (hidden states); towers or none."""

    encoder: Stack | None = None
    decoder: Stack | None = None
    head: Head | None = None
    towers: tuple[Tower, ...] = ()

    @property
    def trunk(self) -> Stack:
        """The stack whose output the head reads."""
        stack = self.decoder or self.encoder
        if stack is None:
            raise ConfigError("A model has an encoder, a decoder, or both; this one has neither.")
        return stack

    @property
    def features(self) -> str | None:
        """What reads images or audio: the "trunk", the "encoder" that feeds it, its "towers", or nothing."""
        if not isinstance(self.trunk.input, Tokens):
            return "trunk"
        if self.encoder is not None and not isinstance(self.encoder.input, Tokens):
            return "encoder"
        return "towers" if self.towers else None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from part("encoder", self.encoder)
        yield from part("decoder", self.decoder)
        yield from part("head", self.head, self.trunk.width)
        for i, tower in enumerate(self.towers):
            yield from part(f"towers.{i}", tower)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter tensor by name, shared ones once, under the first of their names."""
        seen: dict[str, Tensor] = {}
        for tensor in self.tensors():
            first = seen.setdefault(tensor.key, tensor)
            if first.shape != tensor.shape:
                raise ConfigError(
                    f"{first.name} {first.shape} and {tensor.name} {tensor.shape} share a name "
                    "and so must have one shape."
                )
        return {tensor.name: tensor for tensor in seen.values()}

    def parameters(self, *, active: bool = False, embedding: bool = True) -> int:
        """How many parameters the model has, shared ones once.

        `active` counts of the experts only what one token uses. `embedding=False` leaves out the
        input's token table (unless the head multiplies by it), the other convention in use.
        """
        total = 0
        tables = set() if embedding else self._tables_only_looked_up()
        for tensor in self.weights().values():
            if tensor.key not in tables:
                total += tensor.used if active else tensor.size
        return total

    def _tables_only_looked_up(self) -> set[str]:
        tables = {f"{side}.embedding.weight" for side in ("encoder", "decoder")}
        keys = {tensor.key for tensor in self.tensors() if tensor.name in tables}
        return keys - {tensor.key for tensor in self.tensors() if tensor.multiplies}

    def flops(self, length: int, source: int = 0) -> int:
        """Floating-point operations of one forward pass over one sequence of `length` tokens.

        A multiply-add counts 2. Counted: products with matrices (experts: the used ones) and, for
        visible pairs only, scores and mixing. Not counted: norms, activations, softmax, look-ups,
        and towers (a tower is a stack with `flops` of its own). `source` is the number of encoder
        inputs of an encoder-decoder.
        """
        total, rows = 0, 0
        if self.encoder is not None:
            inputs = source if self.decoder is not None else length
            total, rows = self.encoder.flops(inputs), self.encoder.input.rows(inputs)
        if self.decoder is not None:
            total += self.decoder.flops(length, rows)
        return total + (self.head.flops(self.trunk.width, length) if self.head is not None else 0)

    def cache_bytes(self, length: int, *, bytes_per_value: float = 2, source: int = 0) -> int:
        """What one sequence of `length` tokens keeps between steps, in bytes.

        Keys and values of full layers grow with the length, of window layers up to the window; a
        latent counts once; cross-attention keeps `source` encoder rows; recurrent states keep
        their size, in fp32. Encoders keep nothing.
        """
        if self.decoder is None:
            return 0
        rows = self.encoder.input.rows(source) if self.encoder is not None else source
        total = 0.0
        for mixer in self.decoder.mixers():
            if isinstance(mixer, GatedDelta | StateSpace):
                state, inputs = mixer.state_values()
                total += 4 * state + bytes_per_value * inputs
            elif mixer.role in ("attention", "cross"):
                total += bytes_per_value * mixer.cache_values(length, rows)  # type: ignore[union-attr]
        return round(total)

    def __sub__(self, other: Model) -> tuple[object, ...]:
        """What differs from `other`: see `qkv.spec.difference`."""
        from qkv.spec.difference import difference

        return difference(self, other)
