"""Two models side by side: only what differs, in the order of reading, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from qkv.inspection.report import Inspection, heading, terminal_width, wrapped
from qkv.spec import difference


@dataclass(frozen=True)
class Change:
    """Lines of one step that only the left or only the right model has."""

    number: int
    title: str
    left: tuple[str, ...]
    right: tuple[str, ...]


@dataclass(frozen=True)
class Consequence:
    """A figure of both models."""

    what: str
    left: int
    right: int

    @property
    def ratio(self) -> str:
        """How many times as much the right one has."""
        return f"x{self.right / self.left:.3g}" if self.left else ""

    def __str__(self) -> str:
        ratio = f", {self.ratio}" if self.ratio else ""
        return f"{self.what}: {self.left:,} -> {self.right:,}{ratio}"


@dataclass(frozen=True)
class Comparison:
    """What differs between two inspected models."""

    left: Inspection
    right: Inspection
    changes: tuple[Change, ...]
    consequences: tuple[Consequence, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, width: int | None = None) -> Iterator[str]:
        """What only the left has with a -, what only the right has with a +."""
        width = width or terminal_width()
        yield from heading(self.left, width, "- ")
        yield from heading(self.right, width, "+ ")
        if not self.changes and not self.unknown():
            yield "The two are described alike."
        for change in self.changes:
            yield ""
            label = f"{change.number} {change.title}"
            for sign, lines in (("-", change.left), ("+", change.right)):
                for line in lines:
                    yield from wrapped(label, f"{sign} {line}", width)
                    label = ""
        if self.consequences:
            yield ""
            label = "It follows"
            for consequence in self.consequences:
                yield from wrapped(label, str(consequence), width)
                label = ""

        for sign, what in self.unknown():
            yield ""
            yield from wrapped("Not known", f"{sign} {what}", width)

    def unknown(self) -> tuple[tuple[str, str], ...]:
        """What of either could not be read, and so could not be compared."""
        sides = (("-", self.left), ("+", self.right))
        return tuple((sign, "; ".join(side.unknown)) for sign, side in sides if side.unknown)

    def data(self) -> dict[str, Any]:
        both = self.left.model is not None and self.right.model is not None
        apart = difference(self.left.model, self.right.model) if both else ()  # type: ignore[arg-type]
        return {
            "left": self.left.name,
            "right": self.right.name,
            "changes": [asdict(change) for change in self.changes],
            "consequences": [asdict(consequence) for consequence in self.consequences],
            "description": [str(d) for d in apart],
            "unknown": {"left": list(self.left.unknown), "right": list(self.right.unknown)},
        }


def between(left: Inspection, right: Inspection) -> Comparison:
    """What differs, and the figures that differ with it."""
    changes = []
    mine, theirs = ({step.title: step for step in found.steps} for found in (left, right))
    order = {step.title: step.number for step in (*left.steps, *right.steps)}
    for title, number in sorted(order.items(), key=lambda item: item[1]):
        ours = mine[title].lines if title in mine else ()
        other = theirs[title].lines if title in theirs else ()
        removed = tuple(line for line in ours if line not in other)
        added = tuple(line for line in other if line not in ours)
        if removed or added:
            changes.append(Change(number, title, removed, added))
    return Comparison(left, right, tuple(changes), tuple(_consequences(left, right)))


def _consequences(left: Inspection, right: Inspection) -> Iterator[Consequence]:
    if left.model is None or right.model is None:
        return
    a, b = left.model, right.model
    figures = [
        ("parameters", a.parameters(), b.parameters()),
        ("parameters a token uses", a.parameters(active=True), b.parameters(active=True)),
        ("cache bytes of 1,024 tokens", a.cache_bytes(1024), b.cache_bytes(1024)),
    ]
    contexts = [c for c in (left.context, right.context) if c]
    if len(contexts) == 2:
        shorter = min(contexts)
        figures.append((f"cache bytes of {shorter:,} tokens", a.cache_bytes(shorter), b.cache_bytes(shorter)))
        figures.append(("context", contexts[0], contexts[1]))
    figures.append(("FLOPs for 1,024 tokens", a.flops(1024), b.flops(1024)))
    yield from (Consequence(*figure) for figure in figures if figure[1] != figure[2])
