"""A description as short text: the Python that builds it, defaults left out, equal layers folded."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from qkv.spec.layers import Branch, Layer
from qkv.spec.masks import And, Or
from qkv.spec.node import Node

LINE = 100


def show(value: Any, indent: int = 0) -> str:
    """One line where it fits, else one argument a line."""
    line = _inline(value)
    if len(line) + indent <= LINE and not (isinstance(value, tuple) and _has_layers(value)):
        return line
    inner, close = indent + 2, " " * indent
    if isinstance(value, tuple):
        return "(\n" + "".join(" " * inner + row + ",\n" for row in _rows(value, inner)) + close + ")"
    if not isinstance(value, Node) or isinstance(value, And | Or):
        return line
    rows = []
    for name, argument in _arguments(value):
        label = f"{name}=" if name else ""
        rows.append(" " * inner + label + show(argument, inner) + ",\n")
    return f"{type(value).__name__}(\n" + "".join(rows) + close + ")"


def _has_layers(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Layer) for value in values)


def _rows(values: tuple[Any, ...], indent: int) -> list[str]:
    """Equal layers once, with the places they stand at."""
    if not _has_layers(values):
        return [show(value, indent) for value in values]
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return [f"# {_count(at)}\n" + " " * indent + show(value, indent) for value, at in places.items()]


def _count(places: list[int]) -> str:
    return f"layer {places[0]}" if len(places) == 1 else f"{len(places)} layers: {ranges(places)}"


def ranges(places: list[int]) -> str:
    """[0, 1, 2, 4] as "0-2, 4"."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _arguments(node: Node) -> list[tuple[str, Any]]:
    """Positional while no default came before, then by keyword; those at their default left out."""
    found: list[tuple[str, Any]] = []
    positional = True
    for f in sorted(fields(node), key=lambda f: f.kw_only is True):
        value = getattr(node, f.name)
        required = f.default is MISSING and f.default_factory is MISSING
        if not required and value == f.default:
            positional = False
            continue
        bare = positional and not f.kw_only and isinstance(value, int | float | str | tuple)
        found.append(("" if bare else f.name, value))
        positional = bare
    return found


def _inline(value: Any) -> str:
    if isinstance(value, And | Or):
        sign = " & " if isinstance(value, And) else " | "
        sides = [f"({_inline(s)})" if isinstance(s, Or) else _inline(s) for s in (value.left, value.right)]
        return sign.join(sides)
    if isinstance(value, Branch) and value.norm is None:
        return f"Branch({_inline(value.mixer)})"
    if isinstance(value, Node):
        inside = ", ".join((f"{n}=" if n else "") + _inline(v) for n, v in _arguments(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_inline, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:_.1f}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return repr(value)
