"""The parts of a tokenizer's JSON files, taken with the type that the format gives them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qkv.errors import TokenizerError

# Ids may have gaps, as where a vocabulary is filled up to a round size; a table is made of them all.
MAX_GAP = 1 << 16


def an_object(value: Any, where: str) -> dict[str, Any]:
    return _of(dict, "an object", value, where)


def a_list(value: Any, where: str) -> list[Any]:
    return _of(list, "a list", value, where)


def a_string(value: Any, where: str) -> str:
    text: str = _of(str, "a string", value, where)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise TokenizerError(f"{where} holds a lone surrogate, which is no Unicode.")
    return text


def an_integer(value: Any, where: str) -> int:
    if isinstance(value, bool):
        raise TokenizerError(f"{where} must be a whole number, not {value}.")
    return _of(int, "a whole number", value, where)


def entry(value: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in value:
        raise TokenizerError(f"{where}.{key} is missing.")
    return value[key]


def check_ids(ids: Mapping[str, int], entries: int) -> None:
    """Every id must be one that a vocabulary of so many entries can have."""
    limit = 2 * entries + MAX_GAP
    for token, id in ids.items():
        if not 0 <= an_integer(id, f"tokenizer.json: the id of token {_brief(token)}") < limit:
            raise TokenizerError(
                f"tokenizer.json: token {_brief(token)} has the id {id}; "
                f"a vocabulary of {entries:,} entries has ids from 0 to {limit - 1:,} at most."
            )


def check_known(ids: tuple[int, ...], tokens: list[str | None], where: str) -> None:
    for id in ids:
        if not 0 <= an_integer(id, where) < len(tokens) or tokens[id] is None:
            raise TokenizerError(f"{where} names the id {id}, which is no token's.")


def _of(kind: type, name: str, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise TokenizerError(f"{where} must be {name}, not {_brief(value)}.")
    return value


def _brief(value: Any) -> str:
    if isinstance(value, (dict, list)) and value:
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
