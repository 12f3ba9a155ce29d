"""Layers in few words: exact, whatever the pattern."""

from __future__ import annotations

import pytest

from qkv.inspection.places import places


@pytest.mark.parametrize(
    ("layers", "total", "words"),
    [
        (range(4), 4, "every layer"),
        (range(5, 62, 6), 62, "every 6th layer"),
        ([i for i in range(62) if i % 6 != 5], 62, "all but every 6th layer"),
        (range(0, 24, 2), 24, "every 2nd layer from the first"),
        (range(1, 24, 2), 24, "every 2nd layer"),
        ([0, 1, 2], 61, "layers 0-2"),
        ([3], 8, "layer 3"),
        ([0, 1, 3], 8, "layers 0-1, 3"),
    ],
)
def test_places(layers: object, total: int, words: str) -> None:
    assert places(layers, total) == words  # type: ignore[arg-type]
