"""What the files of a model say about its tokenizer, in one form for every source."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import tokenizers

from qkv.errors import TokenizerError
from qkv.text.pieces import Pieces
from qkv.text.sandbox import Template

# Drawn anew in every process, so that no text can spell the name of a hidden token.
_SECRET = secrets.token_hex(16)

MAX_ADDED = 1024  # characters of an added token


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that is found in the text before the vocabulary's own algorithm sees it."""

    id: int
    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The parts a tokenizer is put together from.

    `pipeline` holds normalizer, pre-tokenizer and model and no added tokens; in its model every
    control token bears its hidden name, so that ordinary text cannot come out as one. `named` maps
    roles (bos, eos, unk, pad, ...) to ids. `before` and `after` are the ids that plain encoding
    puts around a text. `ends` are the ids that end a turn. `unknown` is the id that the model itself
    gives for what it cannot write, if it has one.
    """

    pipeline: tokenizers.Tokenizer
    tokens: Sequence[str | None]
    pieces: Pieces
    added: Sequence[AddedToken] = ()
    controls: frozenset[int] = frozenset()
    named: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    unknown: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    templates: Mapping[str, str] = field(default_factory=dict)


def hidden_name(id: int) -> str:
    """The name a control token bears where ordinary text is encoded."""
    return f"{_SECRET}-{id}"


def control_ids(added: Iterable[AddedToken], templates: Iterable[str]) -> frozenset[int]:
    """The ids that only a model's files may write, never a user.

    These are the tokens flagged special, and those added tokens whose text a chat template itself
    writes (`<think>`, `<tool_call>`). White space and single characters are part of any text.
    """
    added = list(added)
    written = [text for template in templates for text in (template, *_literals(template))]
    if longest := next((token for token in added if len(token.text) > MAX_ADDED), None):
        raise TokenizerError(
            f"Added token {longest.id} has {len(longest.text):,} characters; {MAX_ADDED:,} are the most."
        )
    return frozenset(
        token.id
        for token in added
        if len(token.text.strip()) > 1 and (token.special or any(token.text in text for text in written))
    )


def _literals(template: str) -> frozenset[str]:
    """What a template writes in escapes, such as '\\x3cthink>'; nothing where it does not compile."""
    try:
        return Template(template).words
    except TokenizerError:
        return frozenset()
