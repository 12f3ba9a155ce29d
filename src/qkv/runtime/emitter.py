"""What lowering writes into: operations, the buffers they need, the slots of the cache, stored names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.runtime.program import (
    Norm,
    Operation,
    Pick,
    Program,
    Rotate,
    Sinusoids,
    Slot,
    Span,
    Store,
    TakeRows,
)

PLACED = Store, Rotate, TakeRows, Sinusoids  # what all rows go through, or by where they stand


class Unexpressed(UnsupportedError):
    """The operations of a program do not express this part."""

    def __init__(self, place: str, what: str):
        super().__init__(f"{place}: {what} cannot be lowered to a program; it runs on torch.")


def only(node: spec.Node, place: str, *fields_read: str) -> None:
    """Refuses a node that says more than these fields: what a description learns later is never left out."""
    for f in fields(node):
        value = getattr(node, f.name)
        if f.name not in ("shared", *fields_read) and value != f.default:
            raise Unexpressed(place, f"{type(node).__name__}.{f.name} = {value}")


@dataclass(frozen=True)
class Into:
    """Where a mixer leaves its output: written to `out`, or scaled and added to what is there."""

    out: Span
    add: bool = False
    scale: float = 1.0


@dataclass
class Emitter:
    """One program in the making. `stored` gives, for each tensor, the name its values are stored under."""

    stored: Mapping[str, str]
    operations: list[Operation] = field(default_factory=list)
    buffers: dict[str, int] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)

    def buffer(self, name: str, width: int) -> Span:
        """The first columns of a buffer that is as wide as its widest use."""
        self.buffers[name] = max(width, self.buffers.get(name, 0))
        return Span(name, 0, width)

    def emit(self, operation: Operation) -> None:
        self.operations.append(operation)

    def name(self, place: str) -> str:
        return self.stored[place]

    def maybe(self, place: str) -> str | None:
        """The stored name of a tensor, if the description has it."""
        return self.stored.get(place)

    def norm(self, node: spec.Node | None, place: str, x: Span, out: Span, groups: int = 1) -> Span:
        """`out`, with x normalised in it; x itself where there is no norm."""
        if node is None:
            return x
        if not isinstance(node, spec.LayerNorm | spec.RMSNorm):
            raise Unexpressed(place, type(node).__name__)
        only(node, place, "eps", "scale", "bias" if isinstance(node, spec.LayerNorm) else "offset")
        kind, offset = ("rms", node.offset) if isinstance(node, spec.RMSNorm) else ("layer", 0.0)
        scale, bias = self.maybe(f"{place}.weight"), self.maybe(f"{place}.bias")
        self.emit(Norm(out, x, kind, node.eps, scale, bias, offset, groups))  # type: ignore[arg-type]
        return out

    def pick(self, stream: Span) -> Span:
        """The rows of the stream that are wanted, and from here on no others.

        The others are left as early as can be: once the last keys and values are stored, all that the
        operations emitted since then read is picked, and they go on from that.
        """
        last = max(i for i, each in enumerate(self.operations) if isinstance(each, PLACED))
        after, self.operations = self.operations[last + 1 :], self.operations[: last + 1]
        taken = {stream.buffer: stream}
        written: list[Span] = []
        for operation in after:
            for span in operation.reads:
                if not any(each.holds(span) for each in written):
                    taken[span.buffer] = span.around(taken.get(span.buffer, span))
            written += [span for name, span in operation.spans.items() if name == "out"]
        names = {buffer: f"wanted_{buffer}" for buffer in taken} | {stream.buffer: "wanted"}
        self.buffers |= {name: self.buffers[buffer] for buffer, name in names.items()}

        def moved(span: Span) -> Span:
            return replace(span, buffer=names.get(span.buffer, span.buffer))

        self.emit(Pick(tuple(map(moved, taken.values())), tuple(taken.values())))
        for operation in after:
            spans: dict[str, Any] = {name: moved(span) for name, span in operation.spans.items()}
            self.emit(replace(operation, **spans))
        return moved(stream)

    def done(self, output: Span) -> Program:
        return Program(tuple(self.operations), output, self.buffers, self.slots)
