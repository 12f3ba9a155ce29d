"""Keeping what a template writes apart from what a message says.

A control token's text in a message is broken by a sentinel before the template runs, so that the
only unbroken control text in what comes out is the template's own. The sentinel is taken out
again afterwards, from pieces that are then encoded as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from qkv.errors import TokenizerError

# A template that cuts, rewrites or recases text could put together again what was broken.
_REWRITES = re.compile(
    r"(?:[|.]|map\()\s*['\"]?"
    r"(?:replace|join|split|rsplit|partition|rpartition|removeprefix|removesuffix|upper|lower|title"
    r"|capitalize|swapcase|casefold|striptags|format|reverse)\b|\[[^\]]*:[^\]]*\]"
)
_STRING = re.compile(r"'([^']+)'|\"([^\"]+)\"")

# Where a string or a literal stretch of a template ends, so that a message's text may follow.
_LITERAL_END = re.compile(r"['\"]|\{\{|\{%|\{#|%s|\{\}")


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A rendered conversation: its text, and the same in parts, an int being a control token."""

    text: str
    parts: tuple[str | int, ...]


class Shield:
    """Breaks control text in strings, and finds the template's own afterwards.

    Where a template only copies text, breaking each control text in it is enough. Where it cuts or
    rewrites, every character that could begin one is broken, but for the marks it looks for.

    `controls` maps texts to ids. `own` are texts that an assistant's message may hold unbroken:
    the model's own marks, which templates look for.
    """

    def __init__(self, controls: Mapping[str, int], own: Iterable[str], source: str) -> None:
        self._controls = controls
        self._source = source
        self._everyone = _Finder(controls)
        self._assistant = _Finder(set(controls) - set(own))
        self._own = _Finder(own)
        self._rewrites = _REWRITES.search(source) is not None
        # Plain marks that the template may look for in a message.
        strings = {one or other for one, other in _STRING.findall(source)}
        self._sought = _Finder(text for text in strings if len(text) > 1 and not self._everyone.meets(text))

    def sentinel(self, texts: Iterable[str]) -> str:
        """A private-use character that none of the texts holds."""
        used = set(self._source).union(*texts, *self._controls)
        free = next((chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used), None)
        if free is None:
            raise TokenizerError("The messages use every private-use character of Unicode; one must be left.")
        return free

    def broken(self, text: str, sentinel: str, assistant: bool = False) -> str:
        """The text with the sentinel inside each control text that it holds, begins or ends."""
        finder = self._assistant if assistant else self._everyone
        at = {*finder.starts(text), *finder.unfinished(text)}
        if self._rewrites:
            sought = {*self._sought.starts(text), *(self._own.starts(text) if assistant else ())}
            at.update(start for start in finder.candidates(text) if start not in sought)
        cuts = {start + 1 for start in at}
        stripped = text.lstrip()
        if stripped and self._continues(stripped):
            cuts.add(len(text) - len(stripped))
        edges = [0, *sorted(cuts), len(text)]
        return sentinel.join(text[start:end] for start, end in pairwise(edges))

    def split(self, rendered: str, sentinel: str) -> Scaffold:
        """The template's control tokens, and the text between them with the sentinel taken out."""
        parts: list[str | int] = []
        end = 0
        for start, stop in self._everyone.spans(rendered):
            if start > end:
                parts.append(rendered[end:start].replace(sentinel, ""))
            parts.append(self._controls[rendered[start:stop]])
            end = stop
        if end < len(rendered):
            parts.append(rendered[end:].replace(sentinel, ""))
        return Scaffold(rendered.replace(sentinel, ""), tuple(parts))

    def _continues(self, text: str) -> bool:
        """Whether `text` goes on with a control text that the template begins, as in '<|' + name."""
        return any(rest.startswith(text) or text.startswith(rest) for rest in self._left_open)

    @cached_property
    def _left_open(self) -> frozenset[str]:
        ends = {piece[-length:] for piece in _LITERAL_END.split(self._source) for length in range(1, 64)}
        return frozenset(
            control[length:]
            for control in self._controls
            for length in range(1, len(control))
            if control[:length] in ends
        )


class _Finder:
    """Finds any of many texts: by first character, then by length."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._prefixes = frozenset(text[:length] for text in self._texts for length in range(1, len(text)))
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        firsts = "".join(re.escape(first) for first in sorted({text[0] for text in self._texts}))
        self._first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def candidates(self, text: str) -> Iterator[int]:
        """Every place where one of the texts could begin."""
        return (match.start() for match in self._first.finditer(text))

    def starts(self, text: str) -> Iterator[int]:
        """Every place where one of the texts does begin."""
        return (start for start in self.candidates(text) if self._length_at(text, start))

    def unfinished(self, text: str) -> Iterator[int]:
        """Every place from where on the text, but for white space, is the beginning of one."""
        text = text.rstrip()
        longest = self._lengths[0] if self._lengths else 0
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start:] in self._prefixes:
                yield start

    def meets(self, text: str) -> bool:
        """Whether the text holds one of the texts or begins one."""
        return text in self._prefixes or any(True for _ in self.starts(text))

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """The texts as they are found from left to right, the longest first."""
        end = 0
        for start in self.candidates(text):
            if start >= end and (length := self._length_at(text, start)):
                end = start + length
                yield start, end

    def _length_at(self, text: str, start: int) -> int:
        return next((n for n in self._lengths if text[start : start + n] in self._texts), 0)
