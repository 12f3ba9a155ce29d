"""The verses of a Bible as the SWORD project packs them, zText: blocks, and where in them a verse stands.

A testament is three files. `.bzs` has twelve bytes a block: where it is in `.bzz`, how long it is there and
unpacked. `.bzv` has ten bytes a verse: its block, where it begins in it, and how long it is. Modules of one
versification number their verses alike, so that translations pair up by number. The text is OSIS markup.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from qkv.errors import SourceError

UNSAID = re.compile(r"<(note|title|rdg)\b[^>]*?(?<!/)>.*?</\1>", re.DOTALL)  # what is not part of a verse
MARKUP = re.compile(r"<[^>]*>")


def verses(folder: Path) -> list[str]:
    """All verses of both testaments in their order, without markup, white space as one space.

    What stands before a book or a chapter has a number too, and no text. Raises SourceError for files
    that are missing or contradict each other.
    """
    return [_plain(text) for testament in ("ot", "nt") for text in _records(folder / testament)]


def _plain(text: str) -> str:
    return " ".join(MARKUP.sub("", UNSAID.sub("", text)).split())


def _records(stem: Path) -> Iterator[str]:
    try:
        places, blocks, packed = (stem.with_suffix(end).read_bytes() for end in (".bzv", ".bzs", ".bzz"))
        texts = [
            zlib.decompress(packed[start : start + size])
            for start, size, _ in struct.iter_unpack("<3I", blocks)
        ]
        for block, start, length in struct.iter_unpack("<2IH", places):
            yield texts[block][start : start + length].decode("utf-8") if length else ""
    except (OSError, struct.error, zlib.error, IndexError, UnicodeDecodeError) as problem:
        raise SourceError(f"{stem}.bzv, .bzs and .bzz are no zText module: {problem}.") from None
