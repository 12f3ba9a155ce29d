"""The filters, tests, methods and arithmetic of chat templates, each charged for what it costs.

Whatever is not listed here a template cannot use. What a listed operation makes is bounded before it
is made: a size that follows from the arguments is checked first, and jinja2's own does the rest.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from inspect import isgenerator
from string import Formatter
from typing import Any

from jinja2 import filters as standard
from jinja2.tests import TESTS

from qkv.errors import TokenizerError
from qkv.text.budget import (
    ITEM,
    check_number,
    check_size,
    check_width,
    length,
    spend,
    spend_deep,
    spend_shallow,
)
from qkv.text.rewriting import Role


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters and methods after which a known role is still one.
RECASING = _names("capitalize lower lstrip rstrip string strip title trim upper")

# What filters do with their value: print it, walk through all of it, or look no deeper than its elements.
_PRINTING = _names("capitalize e escape indent lower replace safe string title trim truncate upper")
_WALKING = _names("dictsort groupby join max min sort sum tojson unique")
_LISTING = _names(
    "abs count d default first float int items last length list map reject rejectattr reverse round "
    "select selectattr"
)
_MAKING = _names("abs float int list reverse round")
_TESTS = _names(
    "boolean callable defined divisibleby even false float integer iterable lower mapping none number odd "
    "sameas sequence string true undefined upper in == != < <= > >= eq equalto ge greaterthan gt le "
    "lessthan lt ne"
)
_NUMERIC_TESTS = _names("divisibleby even odd")

_METHODS: Mapping[type, frozenset[str]] = {
    str: _names(
        "capitalize casefold center count endswith find format format_map index isalnum isalpha isascii "
        "isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition "
        "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
        "startswith strip swapcase title upper zfill"
    ),
    dict: _names("copy get items keys values"),
    list: _names("copy count index"),
    tuple: _names("count index"),
}
_PADDING = _names("center ljust rjust zfill")
_SPLITTING = _names("rsplit split splitlines")
_SPACES = (
    "\t\n\v\f\r\x1c\x1d\x1e\x1f \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)

# One conversion of `%`: its flags and width, and what it converts to.
_PERCENT = re.compile(r"%(?:\([^()]*\))?([^a-zA-Z%]*)([a-zA-Z%]?)")
_LONG_NUMBER = re.compile(r"\d{4}|[*{]")
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}


def filters(text: Callable[[Any], str]) -> dict[str, Any]:
    """The filters by name; `text` says what a value prints as."""
    own = {"indent": _indent, "replace": _replace, "round": _round, "sum": _sum, "tojson": _tojson}
    own["join"] = lambda values, d="", attribute=None: _join(text, values, d, attribute)
    functions = standard.FILTERS | own
    return (
        {name: _printing(name, functions[name], text) for name in _PRINTING}
        | {name: _walking(functions[name]) for name in _WALKING}
        | {name: _listing(name, functions[name]) for name in _LISTING}
    )


def tests(text: Callable[[Any], str]) -> dict[str, Any]:
    """The tests by name."""
    return {name: _testing(name, TESTS[name], text) for name in _TESTS}


def _value_at(function: Callable[..., Any]) -> int:
    """jinja2 hands some functions its environment first."""
    return 1 if hasattr(function, "jinja_pass_arg") else 0


def _printing(name: str, function: Callable[..., Any], text: Callable[[Any], str]) -> Callable[..., Any]:
    at = _value_at(function)

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        value = text(args[at])
        spend_deep(value, *args[at + 1 :], *kwargs.values())
        result = function(*args[:at], value, *args[at + 1 :], **kwargs)
        spend_shallow(result)
        return Role(result) if isinstance(value, Role) and name in RECASING else result

    return charged


def _walking(function: Callable[..., Any]) -> Callable[..., Any]:
    at = _value_at(function)

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        value = list(args[at]) if isgenerator(args[at]) else args[at]
        spend_deep(value, *args[at + 1 :], *kwargs.values())
        if isinstance(value, str):
            spend(ITEM * len(value))  # it becomes a list of characters
        result = function(*args[:at], value, *args[at + 1 :], **kwargs)
        if isgenerator(result):
            return _each(result)
        spend_shallow(result)
        return result

    return charged


def _listing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    at = _value_at(function)

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        spend(ITEM * length(value) if name in ("list", "reverse") else ITEM)
        spend_deep(*args[at + 1 :], *kwargs.values())
        if name in ("float", "int") and isinstance(value, str):
            check_width(value)
        result = function(*args, **kwargs)
        if isgenerator(result):
            return _each(result)
        if name in _MAKING:
            spend_shallow(result)
        return result

    return charged


def _testing(name: str, function: Any, text: Callable[[Any], str]) -> Callable[..., Any]:
    at = _value_at(function)

    @wraps(function)
    def charged(*args: Any, **kwargs: Any) -> Any:
        value = args[at]
        if name in _NUMERIC_TESTS and not isinstance(value, (int, float)):
            raise TokenizerError(f"The chat template tests whether what is no number is {name}.")
        if name in ("lower", "upper"):
            value = text(value)
        if len(args) > at + 1 and name != "sameas":
            spend_deep(value, *args[at + 1 :])
        else:
            spend(0, seen=length(value))
        return function(*args[:at], value, *args[at + 1 :], **kwargs)

    return charged


def _each(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        spend()
        yield item


def arithmetic(symbol: str, left: Any, right: Any) -> Any:
    """An operation of two values, refused where it makes too large a text, sequence or number."""
    check_number(left)
    check_number(right)
    if symbol == "+" and length(left) and length(right):
        check_size(len(left) + len(right))
    elif symbol == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int) and length(value):
                check_size(len(value) * abs(times))
                spend((1 if isinstance(value, str) else ITEM) * len(value) * abs(times))
    elif symbol == "**" and isinstance(left, int) and isinstance(right, int) and right > 64 and abs(left) > 1:
        check_number(1 << 65)
    result = _OPERATORS[symbol](left, right)
    spend_shallow(result)
    return result


def percent(text: str, values: Any) -> str:
    """'%s is %d' % values."""
    fields = 0
    for match in _PERCENT.finditer(text):
        fields += 1
        flags, kind = match.groups()
        if _LONG_NUMBER.search(flags):
            raise TokenizerError("The chat template formats with a width that is not a small number.")
        if kind not in "sdiufFeEgGxXo%":
            raise TokenizerError(f"The chat template formats with %{kind}, which none may here.")
    _check_fields(text, fields, values)
    result = text % values
    spend_shallow(result)
    return result


def _check_braces(text: str, values: Any) -> None:
    fields = 0
    for _, field, layout, conversion in Formatter().parse(text):
        fields += field is not None
        if layout and _LONG_NUMBER.search(layout):
            raise TokenizerError("The chat template formats with a width that is not a small number.")
        if conversion not in (None, "s") or (layout or "").endswith("c"):
            raise TokenizerError("The chat template formats with a conversion that none may use here.")
    _check_fields(text, fields, values)


def _check_fields(text: str, fields: int, values: Any) -> None:
    # What a value prints as is longer than what it holds by brackets, quotes and escapes.
    spend_deep(values)
    spend(len(text) + fields * (6 * _printed(values) + 1000))


def _printed(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_printed(key) + _printed(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_printed, value))
    return len(value) if isinstance(value, str) else 32


def allow_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Charge for a method before it is called, and refuse one that is not listed."""
    kind = next((kind for kind in _METHODS if isinstance(owner, kind)), object)
    if name not in _METHODS.get(kind, ()):
        raise TokenizerError(f"The chat template calls .{name}(), which none may here.")
    given = [*args, *kwargs.values()]
    spend_deep(*given)
    if kind in (list, tuple) and name != "copy":
        spend_deep(owner)
    if kind is not str:
        return
    spend(0, seen=len(owner))
    if name in ("format", "format_map"):
        _check_braces(owner, given)
    elif name in _PADDING:
        for value in given:
            check_width(value)
    elif name == "replace" and len(args) > 1:
        _check_replaced(owner, *args[:2])
    elif name == "join" and args:
        _check_joined(owner, args[0])
    elif name in _SPLITTING:
        separator = given[0] if given and isinstance(given[0], str) else None
        parts = sum(map(owner.count, _SPACES)) if separator is None else owner.count(separator or "\0")
        spend(ITEM * (1 + parts))


def _check_replaced(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_size(len(text) + text.count(old) * max(len(new) - len(old), 0))


def _check_joined(between: str, values: Any) -> None:
    check_size(
        len(between) * length(values) + (sum(map(length, values)) if isinstance(values, (list, tuple)) else 0)
    )


def _join(text: Callable[[Any], str], values: Any, d: Any, attribute: Any) -> str:
    if attribute is not None:
        raise TokenizerError("The chat template joins by an attribute, which none may here.")
    texts, between = [text(value) for value in values], text(d)
    check_size(len(between) * len(texts) + sum(map(len, texts)))
    return between.join(texts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    check_width(width)
    lines = sum(map(text.count, _SPACES)) + 1
    check_size(len(text) + lines * (len(width) if isinstance(width, str) else width))
    return standard.do_indent(text, width, first, blank)


def _replace(text: str, old: Any, new: Any, count: int | None = None) -> str:
    old, new = str(old), str(new)
    _check_replaced(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if not isinstance(value, (int, float)) or not isinstance(precision, int) or abs(precision) > 32:
        raise TokenizerError("The chat template rounds what is no number, or to more than 32 digits.")
    return standard.do_round(value, precision, method)  # type: ignore[arg-type]


def _sum(values: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    if attribute is not None:
        raise TokenizerError("The chat template sums by an attribute, which none may here.")
    for value in values:
        start = arithmetic("+", start, value)
    return start


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML, which models were not trained on.
    check_width(indent)
    encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces, size = [], 0
    for piece in encoder.iterencode(value):  # piece by piece, since what is indented is longer than it holds
        size += len(piece)
        check_size(size)
        spend(len(piece))
        pieces.append(_ascii(piece) if ensure_ascii else piece)
    return "".join(pieces)


def _ascii(text: str) -> str:
    """Everything outside ASCII as an escape, but for seals, which are surrogates."""
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(
        character if character < "\x7f" or "\ud800" <= character <= "\udfff" else json.dumps(character)[1:-1]
        for character in text
    )
