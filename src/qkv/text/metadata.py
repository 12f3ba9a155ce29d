"""The tokenizer keys of GGUF metadata, read and checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from qkv.errors import TokenizerError
from qkv.text.vocabulary import AddedToken, control_ids, hidden_name

SPACE = "\u2581"
_TEMPLATE = "tokenizer.chat_template"


class Type(IntEnum):
    """What `tokenizer.ggml.token_type` says of each token."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_FOUND = frozenset({Type.UNKNOWN, Type.CONTROL, Type.USER_DEFINED})  # in a text as they stand

# The misspelling is the format's own.
NAMED = {
    "bos": "bos",
    "eos": "eos",
    "eot": "eot",
    "eom": "eom",
    "unknown": "unk",
    "seperator": "sep",
    "padding": "pad",
    "cls": "cls",
    "mask": "mask",
}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The metadata, checked: one text and one type for every id."""

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]
    named: Mapping[str, int]
    templates: Mapping[str, str]
    added: Sequence[AddedToken]
    controls: frozenset[int]

    def text(self, key: str, default: str | None = None) -> str:
        return _text(self.metadata, key, default)

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(key, default)
        if value not in (True, False):
            raise TokenizerError(f"{key} must be true or false, not {value!r}.")
        return bool(value)

    def strings(self, key: str) -> Sequence[str]:
        return _strings(self.metadata, key)

    def scores(self) -> list[float]:
        scores = _numbers(self.metadata, "tokenizer.ggml.scores", len(self.tokens))
        if not all(map(math.isfinite, scores)):
            raise TokenizerError("tokenizer.ggml.scores must hold finite numbers only.")
        return scores

    def keys(self, tokens: Sequence[str]) -> dict[str, int]:
        """The vocabulary of the model, in the order of the ids: token -> id, with control tokens under
        their hidden names."""
        names = list(tokens)
        for id in self.controls:
            names[id] = hidden_name(id)
        return dict(zip(names, range(len(names)), strict=True))

    def unknown(self) -> str | None:
        """The name of the unknown token in the model's vocabulary."""
        id = self.named.get("unk")
        if id is None:
            return None
        return hidden_name(id) if id in self.controls else self.tokens[id]


def read(metadata: Mapping[str, Any]) -> GgufVocabulary:
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        seen: dict[str, int] = {}
        first, second = next((seen[t], i) for i, t in enumerate(tokens) if seen.setdefault(t, i) != i)
        raise TokenizerError(f"tokenizer.ggml.tokens: ids {first} and {second} are both {tokens[first]!r}.")
    types: list[int] = [Type.NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = list(map(int, _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))))
        if not set(types) <= set(Type):
            raise TokenizerError("tokenizer.ggml.token_type must hold numbers from 0 to 6 only.")
    named = {}
    for key, name in NAMED.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if key in metadata:
            named[name] = _id(metadata, key, len(tokens))
    templates = _templates(metadata)
    added = _added(tokens, types, set(named.values()))
    return GgufVocabulary(
        metadata, tokens, types, named, templates, added, control_ids(added, templates.values())
    )


def _added(tokens: Sequence[str], types: Sequence[int], named: set[int]) -> list[AddedToken]:
    """The tokens found in a text as they stand.

    A token that the file names (as its EOS, say) and that looks like a marker is special even
    where its type says otherwise: converters have forgotten it. One that looks like text is not:
    some files name id 11, a comma, as the BOS they do not have.
    """
    added = []
    for id in sorted({id for id, kind in enumerate(types) if kind in _FOUND} | named):
        token, kind = tokens[id], types[id]
        marker = id in named and re.fullmatch(r"<.+>|\[.+\]", token) is not None
        special = kind in (Type.CONTROL, Type.UNKNOWN) or marker
        if token and (special or kind == Type.USER_DEFINED):
            text = token if special else token.replace(SPACE, " ")
            added.append(AddedToken(id=id, text=text, special=special))
    return added


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    named = {key.removeprefix(f"{_TEMPLATE}."): key for key in metadata if key.startswith(f"{_TEMPLATE}.")}
    if _TEMPLATE in metadata:
        named["default"] = _TEMPLATE
    return {name: _text(metadata, key) for name, key in named.items()}


def _text(metadata: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = metadata.get(key, default)
    if value is None:
        raise TokenizerError(f"{key} is missing.")
    if not isinstance(value, str):
        raise TokenizerError(f"{key} must be a string, not {type(value).__name__}.")
    return value


def _array(metadata: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = metadata.get(key)
    if value is None:
        raise TokenizerError(f"{key} is missing.")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        raise TokenizerError(f"{key} must be an array, not {type(value).__name__}.")
    return value.tolist() if hasattr(value, "tolist") else value


def _all(values: Sequence[Any], kinds: type | tuple[type, ...]) -> bool:
    """Whether all are of the kinds. Asked of each type once: a vocabulary has half a million values."""
    return all(issubclass(kind, kinds) for kind in set(map(type, values)))


def _strings(metadata: Mapping[str, Any], key: str) -> Sequence[str]:
    values = _array(metadata, key)
    if not _all(values, str):
        raise TokenizerError(f"{key} must hold strings only.")
    try:
        "".join(values).encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{key} holds text that is no Unicode.") from error
    return values


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> list[float]:
    values = _array(metadata, key)
    if len(values) != length:
        raise TokenizerError(f"{key} has {len(values):,} entries and tokenizer.ggml.tokens has {length:,}.")
    if not _all(values, (int, float)):
        raise TokenizerError(f"{key} must hold numbers only.")
    return list(values)


def _id(metadata: Mapping[str, Any], key: str, size: int) -> int:
    try:
        id = int(metadata[key])
    except (TypeError, ValueError, OverflowError) as error:
        raise TokenizerError(f"{key} must be a token id, not {metadata[key]!r}.") from error
    if not 0 <= id < size:
        raise TokenizerError(f"{key} is {id}, outside the vocabulary of {size:,} ids.")
    return id
