"""Whether a JSON schema can be held to: what is refused before any grammar is made of it.

The grammar's maker refuses keywords that it knows and cannot follow, and passes over those that it does
not know; and it takes a schema whose every text would be without end. Both are refused here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from qkv.errors import RequestError

MOST_CHARACTERS = 100_000
MOST_NESTING = 64  # of the schema's own brackets
MOST_REPEATS = 10_000

# what says how a value is, and what says nothing of that
FOLLOWED = frozenset(
    """
    $ref additionalItems additionalProperties allOf anyOf const enum exclusiveMaximum exclusiveMinimum
    format items maxItems maxLength maxProperties maximum minItems minLength minProperties minimum
    multipleOf oneOf pattern patternProperties prefixItems properties required type
    """.split()  # noqa: SIM905 (a word list reads better)
)
NOTES = frozenset(
    """
    $anchor $comment $defs $id $schema contentEncoding contentMediaType default definitions deprecated
    description discriminator example examples id readOnly title writeOnly
    """.split()  # noqa: SIM905
)
NAMED = ("properties", "patternProperties", "$defs", "definitions")
LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties")
ROUNDS = 16  # more are needed only where references turn back on each other again and again


def parsed(given: Any) -> dict[str, Any]:
    """The schema of an argument: a dict, its JSON text, or True for any object.

    Raises RequestError for what is no schema, is too large or too deep, has a keyword that is not known,
    or can be satisfied by no text that ends.
    """
    schema = _read(given) if isinstance(given, str) else given
    if schema is True:
        return {"type": "object"}
    if not isinstance(schema, dict):
        raise RequestError("json_schema must be an object, its JSON text, or true for any object.")
    schema = json.loads(_checked_text(schema))
    for part in subschemas(schema):
        for keyword in part:
            if keyword not in FOLLOWED | NOTES:
                raise RequestError(
                    f"json_schema: the keyword {keyword!r} is not known, and nothing is ignored."
                )
        check_repeats(part.get("pattern"), "json_schema: pattern")
    _check_ends(schema)
    return dict(schema)


def _read(text: str) -> Any:
    if len(text) > MOST_CHARACTERS:
        raise _too_large(len(text))
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as problem:
        raise RequestError(f"json_schema is not JSON: {problem}.") from None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number there")


def _checked_text(schema: dict[str, Any]) -> str:
    """Its text. Its depth is looked at first, as writing goes as deep; so is a schema that holds itself."""
    level: list[Any] = [schema]
    for _ in range(MOST_NESTING):
        level = [inner for outer in level for inner in _inner(outer)]
        if len(level) > MOST_CHARACTERS:
            raise _too_large(len(level))
    if level:
        raise _too_deep()
    try:
        text = written(schema)
    except (TypeError, ValueError) as problem:
        raise RequestError(f"json_schema cannot be written as JSON: {problem}.") from None
    if len(text) > MOST_CHARACTERS:
        raise _too_large(len(text))
    return text


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _too_large(size: int) -> RequestError:
    return RequestError(f"json_schema has {size:,} characters; {MOST_CHARACTERS:,} are the most.")


def _too_deep() -> RequestError:
    return RequestError(f"json_schema is nested more than {MOST_NESTING} deep.")


def written(schema: dict[str, Any]) -> str:
    return json.dumps(schema, allow_nan=False)


def check_repeats(pattern: Any, name: str) -> None:
    """Raises RequestError for a regular expression that repeats a part too often."""
    for counts in re.findall(r"\{(\d+)(?:,(\d*))?\}", pattern if isinstance(pattern, str) else ""):
        if any(len(count) > 9 or int(count or 0) > MOST_REPEATS for count in counts):
            raise RequestError(f"{name} repeats a part more than {MOST_REPEATS:,} times.")


def subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """It and all within it."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            continue  # true, false, or what the grammar's maker refuses by its place
        yield part
        for name in NAMED:
            left += _values(part.get(name))
        for name in LISTED:
            left += _items(part.get(name))
        left += [part[name] for name in SINGLE if name in part]


def _values(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _check_ends(schema: dict[str, Any]) -> None:
    """Raises RequestError where a reference leads back to itself whatever is chosen."""
    pointers = {part["$ref"] for part in subschemas(schema) if isinstance(part.get("$ref"), str)}
    targets = {pointer: _target(schema, pointer) for pointer in sorted(pointers)}
    left = {pointer for pointer, target in targets.items() if isinstance(target, dict)}
    for _ in range(ROUNDS):
        done = {pointer for pointer in left if _ends(targets[pointer], left)}
        left -= done
        if not done:
            break
    else:
        return  # not known in time: what never ends is then cut by the limit on tokens
    if left:
        raise RequestError(
            f"json_schema: {min(left)} holds itself whatever is chosen, so no text that ends can satisfy it."
        )


def _target(schema: Any, pointer: str) -> Any:
    """What a reference within the schema leads to; None for others, which the grammar's maker judges."""
    if not pointer.startswith("#"):
        return None
    at = schema
    for name in unquote(pointer[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        at = at.get(name) if isinstance(at, dict) else _at(at, name)
    return at


def _at(items: Any, name: str) -> Any:
    return (
        items[int(name)] if isinstance(items, list) and name.isdecimal() and int(name) < len(items) else None
    )


def _ends(schema: Any, endless: set[str]) -> bool:
    """Whether a text that ends may satisfy it, where none does for the references in `endless`."""
    if not isinstance(schema, dict):
        return schema is not False
    pointer = schema.get("$ref")
    if isinstance(pointer, str) and pointer in endless:
        return False
    options = [_items(schema.get(name)) for name in ("anyOf", "oneOf") if _items(schema.get(name))]
    if not all(any(_ends(option, endless) for option in choice) for choice in options):
        return False
    return all(_ends(part, endless) for part in [*_items(schema.get("allOf")), *_needed(schema)])


def _needed(schema: dict[str, Any]) -> list[Any]:
    """The schemas of what every value of this one holds."""
    kind, items = schema.get("type"), schema.get("items", True)
    if kind == "object":
        properties, others = schema.get("properties"), schema.get("additionalProperties", True)
        known = properties if isinstance(properties, dict) else {}
        return [known.get(name, others) for name in _items(schema.get("required")) if isinstance(name, str)]
    least = schema.get("minItems", 0)
    if kind != "array" or not isinstance(least, int) or least < 1:
        return []
    first = _items(schema.get("prefixItems")) or _items(items)
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    return first[:least] + ([rest] if least > len(first) else [])
