"""A description as short text: the Python that builds it, defaults left out, equal layers folded."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from itertools import pairwise
from textwrap import wrap
from typing import Any

from qkv.spec.layers import Layer, Sublayer, arrangement
from qkv.spec.masks import And, Or
from qkv.spec.node import Node
from qkv.spec.norms import LayerNorm

LINE = 100
Arguments = list[tuple[str, Any]]


def show(value: Any, indent: int = 0, taken: int = 0) -> str:
    """One line where it fits beside the `taken` characters, else one argument a line."""
    line = _inline(value)
    if indent + taken + len(line) <= LINE and not (isinstance(value, tuple) and _has_layers(value)):
        return line
    inner, close = indent + 2, " " * indent
    if isinstance(value, tuple):
        return "(\n" + "".join(" " * inner + row + "\n" for row in _rows(value, inner)) + close + ")"
    if not isinstance(value, Node) or isinstance(value, And | Or):
        return line
    name, arguments = _call(value)
    rows = []
    for label, part in arguments:
        label = f"{label}=" if label else ""
        rows.append(" " * inner + label + show(part, inner, len(label) + 1) + ",\n")  # 1: the comma
    return f"{name}(\n" + "".join(rows) + close + ")"


def _has_layers(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, Layer) for value in values)


def _rows(values: tuple[Any, ...], indent: int) -> list[str]:
    """Equal layers once, with the places they stand at; plain values as many as a line holds."""
    if _has_layers(values):
        places: dict[Any, list[int]] = {}
        for place, value in enumerate(values):
            places.setdefault(value, []).append(place)
        margin = " " * indent
        return [
            "".join(f"# {line}\n{margin}" for line in wrap(_count(at), LINE - indent - 2))
            + show(value, indent)
            + ","
            for value, at in places.items()
        ]
    rows: list[str] = []
    for text in (show(value, indent) + "," for value in values):
        if rows and "\n" not in text and indent + len(rows[-1]) + len(text) < LINE:
            rows[-1] += " " + text
        else:
            rows.append(text)
    return rows


def _count(places: list[int]) -> str:
    if len(places) == 1:
        return f"layer {places[0]}"
    apart = {b - a for a, b in pairwise(places)}
    if len(places) > 2 and len(apart) == 1 and apart != {1}:
        return f"{len(places)} layers: {places[0]}, {places[1]}, ... {places[-1]}"
    return f"{len(places)} layers: {ranges(places)}"


def ranges(places: list[int]) -> str:
    """[0, 1, 2, 4] as "0-2, 4"."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _call(node: Node) -> tuple[str, Arguments]:
    """The call that makes a node: an arrangement by its name, else its class."""
    if isinstance(node, Layer) and (arranged := arrangement(node)):
        name, keywords = arranged
        plain = {"norm": LayerNorm(), "scale": 1.0, "skip": 1.0, "norms": 1, "shared": None}
        mixers = [("", mixer) for _, mixer in node.mixers()]
        return name, mixers + [(k, v) for k, v in keywords.items() if v != plain[k]]
    if isinstance(node, Sublayer) and not any(
        branch.norm or branch.after or branch.shared for branch in node.branches
    ):
        return "step", [("", branch.mixer) for branch in node.branches] + _arguments(node)[1:]
    return type(node).__name__, _arguments(node)


def _arguments(node: Node) -> Arguments:
    """Those that are not at their default, by name; without it what a kind needs and no one can mix up."""
    ordered = sorted(fields(node), key=lambda f: f.kw_only is True)
    given = [(f.name, getattr(node, f.name)) for f in ordered if getattr(node, f.name) != f.default]
    needed = [getattr(node, f.name) for f in ordered if f.default is MISSING]
    kinds = [float if isinstance(value, int | float) else type(value) for value in needed]
    apart = len(set(kinds)) == len(kinds) and all(kind in (float, str, tuple) for kind in kinds)
    bare = len(needed) if apart else 0
    return [("" if place < bare else name, value) for place, (name, value) in enumerate(given)]


def _inline(value: Any) -> str:
    if isinstance(value, And | Or):
        sign = " & " if isinstance(value, And) else " | "
        left, right = _inline(value.left), _inline(value.right)
        if isinstance(value.left, Or) and isinstance(value, And):
            left = f"({left})"
        if isinstance(value.right, Or) or (isinstance(value.right, And) and isinstance(value, And)):
            right = f"({right})"
        return left + sign + right
    if isinstance(value, Node):
        name, arguments = _call(value)
        return f"{name}(" + ", ".join((f"{n}=" if n else "") + _inline(v) for n, v in arguments) + ")"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_inline, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:_.1f}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:_}"
    return repr(value)
