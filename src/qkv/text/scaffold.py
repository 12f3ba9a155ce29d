"""Keeping what a template writes apart from what a message says.

While a template runs, each control text that it writes is one single character, its seal. Seals are
surrogates, which no Unicode text holds and no operation on text makes: whatever a template does to
a message, a seal in what comes out was written by the template. The same text in a message is
ordinary text, and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from qkv.errors import TokenizerError

_SEAL = re.compile("([\ud800-\udfff])")


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A rendered conversation: its text, and the same in parts, an int being a control token."""

    text: str
    parts: tuple[str | int, ...]


class Seals:
    """The characters that stand for control texts while a template runs.

    `controls` maps texts to ids. `own` are those that an assistant's message may hold too: the
    model's own marks, which templates look for.
    """

    def __init__(self, controls: Mapping[str, int], own: Iterable[str] = ()) -> None:
        self._controls = controls
        self._everyone = _Finder(controls)
        self._own = _Finder(own)
        self._seals: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def sealed(self, text: str) -> str:
        """A text of the template's own, with its control texts sealed."""
        return self._replaced(self._everyone, text)

    def spoken(self, text: str) -> str:
        """What an assistant said, with the model's own marks sealed."""
        return self._replaced(self._own, text)

    def opened(self, text: str) -> str:
        """The text with control texts in the place of their seals."""
        return _SEAL.sub(lambda seal: self._texts.get(seal[0], "\ufffd"), text)

    def readable(self, message: str) -> str:
        """An error message, in which Python may have written a seal as an escape."""
        for seal, text in self._texts.items():
            message = message.replace(ascii(seal)[1:-1], text)
        return self.opened(message)

    def split(self, rendered: str) -> Scaffold:
        """The template's control tokens, and the text between them."""
        pieces = (piece for piece in _SEAL.split(rendered) if piece)
        parts = tuple(self._controls[self._texts[p]] if p in self._texts else p for p in pieces)
        return Scaffold(self.opened(rendered), parts)

    def unsealed(self, scaffold: Scaffold) -> str | None:
        """A control text in what is not a control token of the scaffold, if there is one."""
        for part in scaffold.parts:
            if isinstance(part, str) and (found := next(self._everyone.spans(part), None)):
                return part[found[0] : found[1]]
        return None

    def _replaced(self, finder: _Finder, text: str) -> str:
        pieces, end = [], 0
        for start, stop in finder.spans(text):
            pieces += [text[end:start], self._seal(text[start:stop])]
            end = stop
        return "".join([*pieces, text[end:]]) if pieces else text

    def _seal(self, text: str) -> str:
        if text not in self._seals:
            if len(self._seals) == 0x800:
                raise TokenizerError("The chat template writes more than 2,048 different control tokens.")
            seal = chr(0xD800 + len(self._seals))
            self._seals[text], self._texts[seal] = seal, text
        return self._seals[text]


def holds_surrogates(text: str) -> bool:
    """Whether a string is no Unicode text."""
    return not text.isascii() and _SEAL.search(text) is not None


class _Finder:
    """Finds any of many texts: by first character, then by length."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(known, reverse=True) for first, known in lengths.items()}
        firsts = "".join(re.escape(first) for first in sorted(lengths))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """The texts as they are found from left to right, the longest first."""
        end = 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < end:
                continue
            for size in self._lengths[match[0]]:
                if text[start : start + size] in self._texts:
                    end = start + size
                    yield start, end
                    break
