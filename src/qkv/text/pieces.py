"""What each token adds to the text, as bytes.

Decoding is then the joining of bytes, whether all at once or one token at a time. Each function
here undoes one way vocabularies write text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from qkv.errors import TokenizerError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: visible Latin-1 characters are themselves, the rest sit from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level(token: str) -> bytes:
    """Every character stands for one byte; a token with any other character is plain text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    """U+2581 is a space; <0x0A> is a byte."""
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()


def is_byte(token: str) -> bool:
    """Whether a token is written as a byte: <0x00> to <0xFF>."""
    return BYTE_TOKEN.fullmatch(token) is not None


def wordpiece(token: str, prefix: str = "##") -> bytes:
    """A token begins a word unless it has the prefix."""
    return (token.removeprefix(prefix) if token.startswith(prefix) else f" {token}").encode()


def word(token: str) -> bytes:
    """Every token is a word."""
    return f" {token}".encode()


@dataclass(frozen=True, slots=True)
class Pieces:
    """The bytes of every token: `pieces[id]`.

    `verbatim` ids are written as they are instead of through `spell`. `drops_space` says that one
    space at the very beginning of a text is the vocabulary's own and belongs to no text.
    """

    tokens: Sequence[str | None]
    spell: Callable[[str], bytes]
    verbatim: Set[int] = frozenset()
    drops_space: bool = False
    _known: dict[int, bytes] = field(default_factory=dict)

    def __getitem__(self, id: int) -> bytes:
        known = self._known.get(id)
        if known is None:
            known = self._known[id] = self._read(id)
        return known

    def _read(self, id: int) -> bytes:
        token = token_of(self.tokens, id)
        return token.encode() if id in self.verbatim else self.spell(token)


def token_of(tokens: Sequence[str | None], id: int) -> str:
    """The vocabulary's text of one id, which must be one of its ids."""
    token = tokens[id] if 0 <= id < len(tokens) else None
    if token is None:
        raise TokenizerError(f"Token id {id} is not in the vocabulary of {len(tokens):,} ids.")
    return token
