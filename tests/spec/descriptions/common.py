"""What several descriptions use."""

from __future__ import annotations

from qkv.spec import Projections

BIASED = Projections(bias="qkvo")


def tied(yes: bool) -> str | None:
    return "tokens" if yes else None
