"""Bibles as SWORD modules, written by tests."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

PARTS = {
    "the lord": "el señor",
    "said": "dijo",
    "and": "y",
    "light": "luz",
    "the sea": "el mar",
    "saw": "vio",
}


def write(folder: Path, testaments: Sequence[Sequence[Sequence[str]]]) -> None:
    """Of each testament, in the order old, new: its blocks, each some verses; "" is a verse of no length."""
    folder.mkdir(parents=True)
    for name, blocks in zip(("ot", "nt"), testaments, strict=True):
        packed, starts, places = b"", b"", b""
        for number, verses in enumerate(blocks):
            text = b""
            for verse in verses:
                places += struct.pack("<2IH", number, len(text), len(verse.encode()))
                text += verse.encode()
            block = zlib.compress(text)
            starts += struct.pack("<3I", len(packed), len(block), len(text))
            packed += block
        for end, content in ((".bzz", packed), (".bzs", starts), (".bzv", places)):
            (folder / f"{name}{end}").write_bytes(content)


def write_pair(folder: Path, verses: int = 200) -> None:
    """An English and a Spanish one, of different verses of 3 to 25 words."""
    english, spanish = [], []
    for number in range(verses):
        chosen = [list(PARTS)[number // 6**i % 6] for i in range(3)] * (1 + number % 4)
        english.append(f"<w>{' '.join(chosen)}</w>.")
        spanish.append(" ".join(PARTS[one] for one in chosen) + ".")
    for name, said in (("engKJV2006eb", english), ("spaRV1909eb", spanish)):
        write(folder / name, [[["", *said[: verses // 2]]], [[said[verses // 2]], said[verses // 2 + 1 :]]])
