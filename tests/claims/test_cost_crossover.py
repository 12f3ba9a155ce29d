"""H25: the judge both ways, crossings by hand, and operations that are exact. No test is of times."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.claims.claim import Figures, Run
from qkv.claims.experiments.cost_crossover import PARTS, crossing, judge, measure, operations

LENGTHS = [128.0, 256.0, 512.0, 1024.0]


def figures(counted: float = 1.0, seconds: float = 1.0, promised: float = 0.0) -> Figures:
    """d = 128: 4 n^2 d for scores, 8 n d^2 more for attention, 16 n d^2 for the feed-forward."""
    found: Figures = {"lengths": LENGTHS, "counted": {}, "seconds": {}, "promised": []}
    scores = [4 * n * n * 128 for n in LENGTHS]
    maps, wide = [8 * n * 128**2 for n in LENGTHS], [16 * n * 128**2 for n in LENGTHS]
    for of, factor in (("counted", counted), ("seconds", seconds)):
        found[of]["scores"] = [factor * s for s in scores]
        found[of]["attention"] = [factor * s + m for s, m in zip(scores, maps, strict=True)]
        found[of]["feed-forward"] = wide
    both = zip(found["counted"]["attention"], wide, strict=True)
    found["promised"] = [a + w + promised for a, w in both]
    return found


def test_all_holds_of_figures_as_expected() -> None:
    assert [check.holds for check in judge([figures()] * 3)] == [True] * 5


def test_what_is_otherwise_does_not_hold() -> None:
    holds = [check.holds for check in judge([figures(), figures(promised=1.0)])]
    assert holds == [False, True, True, True, True]
    holds = [check.holds for check in judge([figures(), figures(counted=1.01)])]
    assert holds == [True, False, True, False, True]
    holds = [check.holds for check in judge([figures(), figures(seconds=2.2)])]
    assert holds == [True, True, False, True, False]


def test_a_crossing_is_on_logarithmic_scales_and_may_not_be() -> None:
    assert crossing([1, 4, 16], [1, 4, 16], [2, 2, 2]) == pytest.approx(2)
    assert crossing([1, 10], [1, 1000], [10, 10]) == pytest.approx(10 ** (1 / 3))
    assert crossing([1, 2], [1, 2], [3, 3]) is None and crossing([1, 2], [4, 5], [3, 3]) is None
    (check,) = [c for c in judge([figures(seconds=1e-3)]) if "time, scores" in c.what]
    assert check.measured == "at no length measured" and not check.holds


def test_operations_are_those_of_the_products() -> None:
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    assert operations(lambda: a @ b) == 2 * 3 * 5 * 7


def test_a_smoke_run_has_every_part_at_every_length_and_its_count_is_exact() -> None:
    found = measure(Run("cost-crossover", 0, "smoke"))
    lengths = found["lengths"]
    for of in ("counted", "seconds"):
        assert set(found[of]) == set(PARTS)
        assert all(len(row) == len(lengths) and min(row) > 0 for row in found[of].values())
    assert all(math.isfinite(v) for row in found["seconds"].values() for v in row)
    for place, n in enumerate(lengths):
        scores, attention, wide = (found["counted"][part][place] for part in PARTS)
        assert (scores, attention, wide) == (
            4 * n * n * 128,
            4 * n * n * 128 + 8 * n * 128**2,
            16 * n * 128**2,
        )
        assert found["promised"][place] == attention + wide
