"""What lowering writes into: operations, the buffers they need, the slots of the cache, stored names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.runtime.program import Norm, Operation, Program, Slot, Span


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

    def done(self, output: Span) -> Program:
        return Program(tuple(self.operations), output, self.buffers, self.slots)
