"""What differs between two descriptions, path by path, equal differences of many layers folded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from qkv.spec.node import Node
from qkv.spec.text import ranges, show


class Difference(NamedTuple):
    """`path` has `left` in the first description and `right` in the second; None where it is absent."""

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path}: {show(self.left)} -> {show(self.right)}"


def difference(left: Node, right: Node) -> tuple[Difference, ...]:
    """Leaves that differ, in the order of the first description."""
    folded: dict[tuple[str, Any, Any], tuple[list[int], str]] = {}
    for path, a, b in _walk("", left, right):
        found = re.search(r"\blayers\.(\d+)", path)
        places = [int(found[1])] if found else []
        general = path.replace(f"layers.{found[1]}", "layers.{}", 1) if found else path
        folded.setdefault((general, a, b), ([], general))[0].extend(places)
    return tuple(
        Difference(path.replace(".{}", f"[{ranges(places)}]") if places else path, a, b)
        for (_, a, b), (places, path) in folded.items()
    )


def _walk(path: str, left: Any, right: Any) -> Iterator[tuple[str, Any, Any]]:
    if left == right:
        return
    if isinstance(left, Node) and type(left) is type(right):
        mine, others = left.children(), right.children()
    elif isinstance(left, tuple) and isinstance(right, tuple) and _nodes(left + right):
        mine, others = dict(enumerate(left)), dict(enumerate(right))  # type: ignore[arg-type]
    else:
        yield path, left, right
        return
    for name in {**mine, **others}:
        a, b = mine.get(name), others.get(name)
        if (name in mine and name in others) or isinstance(a or b, Node):  # a slot that is gone is no news
            yield from _walk(f"{path}.{name}" if path else str(name), a, b)


def _nodes(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, Node) for value in values)
