"""What is compared between engines; the figures of each are computed by `qkv.benching.figures`."""

from __future__ import annotations

from collections.abc import Sequence


def agreement(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two engines have in common before they first differ."""
    for at, (one, other) in enumerate(zip(tokens, others, strict=False)):
        if one != other:
            return at
    return min(len(tokens), len(others))
