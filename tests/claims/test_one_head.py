"""H28: the judge both ways."""

from __future__ import annotations

import pytest

from qkv.claims.claim import Figures
from qkv.claims.experiments.one_head import HEADS, draw, judge, named


def figures() -> Figures:
    losses = {1: 1.75, 8: 1.70, 32: 1.72}
    return {
        str(heads): {"held_out": losses[heads], "parameters": 100, "curve": {"steps": [1], "losses": [2.0]}}
        for heads in HEADS
    }


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 4 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("heads", "what", "value", "failing"),
    [
        (1, "held_out", 1.69, "that of one"),
        (1, "held_out", 1.90, "less than 10 %"),
        (32, "held_out", 1.69, "that of 32"),
        (8, "parameters", 101, "same parameters"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(heads: int, what: str, value: float, failing: str) -> None:
    wrong = figures()
    wrong[str(heads)][what] = value
    (failed,) = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert failing in failed


def test_one_head_that_diverged_is_above_and_not_by_less_than_a_tenth() -> None:
    wrong = figures()
    wrong["1"]["held_out"] = None
    assert [check.holds for check in judge([wrong])] == [True, True, True, False]
    assert "1 head of 64" in draw([wrong])["loss"]


def test_heads_are_named_by_their_size() -> None:
    assert [named(heads) for heads in HEADS] == ["1 head of 64", "8 heads of 8", "32 heads of 2"]
