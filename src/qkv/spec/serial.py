"""A description to JSON and back, without loss: each node an object whose "kind" names it."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from qkv.errors import ConfigError
from qkv.spec.node import Node


def to_json(node: Node, indent: int | None = None) -> str:
    return json.dumps(to_data(node), indent=indent)


def from_json(text: str) -> Node:
    """The node a text describes. Raises ConfigError naming the kind and field that are wrong."""
    try:
        node = from_data(json.loads(text))
    except json.JSONDecodeError as problem:
        raise ConfigError(f"This description is not valid JSON: {problem}.") from None
    except RecursionError:
        raise ConfigError("This description is nested too deeply.") from None
    if not isinstance(node, Node):
        raise ConfigError("A description is a JSON object with a 'kind'.")
    return node


def to_data(value: Any) -> Any:
    """Plain dictionaries, lists and numbers; fields at their default are left out."""
    if isinstance(value, Node):
        data: dict[str, Any] = {"kind": type(value).__name__}
        for f in fields(value):
            field_value = getattr(value, f.name)
            if field_value != f.default:
                data[f.name] = to_data(field_value)
        return data
    if isinstance(value, tuple):
        return [to_data(item) for item in value]
    return value


def from_data(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(from_data(item) for item in value)
    if not isinstance(value, dict):
        return value
    called = value.get("kind")
    if called is None:
        raise ConfigError("A part of a description has no 'kind'.")
    kind = Node.kinds.get(called) if isinstance(called, str) else None
    if kind is None:
        raise ConfigError(f"A description has a part of unknown kind {called!r}.")
    arguments = {name: from_data(item) for name, item in value.items() if name != "kind"}
    hints = _hints(called)
    for name, argument in arguments.items():
        if name not in hints:
            raise ConfigError(f"{kind.__name__} has no field {name!r} ({', '.join(hints)}).")
        if not _fits(argument, hints[name]):
            where, wanted = f"{kind.__name__}.{name}", _wanted(hints[name])
            raise ConfigError(f"{where} is {_called(argument)}; it must be {wanted}.")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in arguments]
    if missing:
        raise ConfigError(f"{kind.__name__} lacks its {missing[0]!r}.")
    return kind(**arguments)


@cache
def _hints(kind: str) -> dict[str, Any]:
    """The types of a kind's fields, by name."""
    hints = get_type_hints(Node.kinds[kind])
    return {f.name: hints[f.name] for f in fields(Node.kinds[kind])}


def _fits(value: Any, hint: Any) -> bool:
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, choice) for choice in inside)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        hints = inside[:1] * len(value) if inside[-1] is Ellipsis else inside
        return len(value) == len(hints) and all(map(_fits, value, hints))
    if origin is Literal:
        return value in inside
    if isinstance(value, bool):  # Python counts it as an int
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _called(value: Any) -> str:
    if isinstance(value, Node):
        return type(value).__name__
    if isinstance(value, tuple):
        return "a list" if any(isinstance(item, Node) for item in value) else repr(list(value))
    return "null" if value is None else repr(value)


def _wanted(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_wanted, get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list, each " + _wanted(get_args(hint)[0])
    return {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}.get(
        hint, "null" if hint is type(None) else hint.__name__
    )
