"""Bytes of one kind, with the formula they come from and how far off they may be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from qkv.errors import RequestError


@dataclass(frozen=True)
class Part:
    """`bytes` of `name`, and in words what they were computed from.

    The truth lies between bytes * (1 - band) and bytes * (1 + band); a count that is exact has no band.
    """

    name: str
    bytes: int
    formula: str
    band: float = 0.0

    def data(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.bytes, "formula": self.formula, "band": self.band}


def shown(count: float) -> str:
    """Bytes as people write them: 131,072 bytes, 97.2 MB, 2.13 GB (decimal, as files are sold)."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if abs(count) >= size:
            return f"{count / size:,.2f} {unit}" if unit != "MB" else f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


def tokens(text: str | int) -> int:
    """A number of tokens as people write it: 8192, 8k (8,192), 128K, 1M (1,048,576).

    Raises RequestError for what is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKmM]?)", str(text).strip().replace(",", ""))
    count = float(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()] if found else 0
    if count < 1 or count != int(count):
        raise RequestError(f"{text!r} is no number of tokens, such as 8192 or 8k.")
    return int(count)
