"""Token ids to text: all at once, or one id at a time with the same result."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence, Set

from qkv.text.pieces import Pieces


def decode(pieces: Pieces, ids: Sequence[int], skip: Set[int]) -> str:
    """The whole text. Bytes that are no UTF-8 become U+FFFD, one for each broken character."""
    data = b"".join(pieces[id] for id in ids if id not in skip)
    if pieces.drops_space:
        data = data.removeprefix(b" ")
    return data.decode(errors="replace")


class IncrementalDecoder:
    """Decodes one id at a time; all that `push` and `flush` give, joined, is the full decode.

    What it remembers is at most three bytes of an unfinished character, however long the text.
    """

    def __init__(self, pieces: Pieces, skip: Set[int], after: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._skip = skip
        self._begun = not pieces.drops_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for id in after:
            self.push(id)

    def push(self, id: int) -> str:
        """The text that `id` completes; empty while a character is unfinished."""
        if id in self._skip:
            return ""
        piece = self._pieces[id]
        if piece and not self._begun:
            self._begun = True
            piece = piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    @property
    def unfinished(self) -> bool:
        """Whether bytes of a character wait for its rest."""
        return bool(self._utf8.getstate()[0])

    @property
    def drops_space(self) -> bool:
        """Whether a space is dropped if it comes next."""
        return not self._begun

    def fork(self) -> IncrementalDecoder:
        """Another that goes on from here by itself."""
        other = copy.copy(self)
        other._utf8 = copy.copy(self._utf8)
        return other

    def flush(self) -> str:
        """No more ids: an unfinished character becomes one U+FFFD."""
        return self._utf8.decode(b"", final=True)
