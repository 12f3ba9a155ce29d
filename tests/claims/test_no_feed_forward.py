"""H30: the judge both ways, and the sizes it compares."""

from __future__ import annotations

import pytest

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.no_feed_forward import DEEP, SHALLOW, VARIANTS, WHOLE, judge
from qkv.claims.models import small_lm


def figures() -> Figures:
    losses = {WHOLE: 1.8, SHALLOW: 2.1, DEEP: 1.9}
    found: Figures = {name: {"held_out": losses[name], "parameters": 1000} for name in VARIANTS}
    return found | {"unigrams": 3.3}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 4 and all(check.holds for check in checks)
    assert checks[2].measured == "33 % of it (33 to 33)"


@pytest.mark.parametrize(
    ("changed", "failing"),
    [
        ({SHALLOW: 1.7}, ["equal depth: the loss", "equal parameters: less"]),  # there is no difference then
        ({DEEP: 1.96}, ["equal parameters: less"]),
        ({DEEP: None}, ["equal parameters: less"]),
        ({SHALLOW: 2.6, DEEP: 1.9}, ["attention alone learns"]),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(changed: dict[str, float | None], failing: list[str]) -> None:
    wrong = figures()
    for name, loss in changed.items():
        wrong[name]["held_out"] = loss
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == len(failing)
    assert all(what.startswith(start) for what, start in zip(failed, failing, strict=True))


def test_deeper_attention_that_is_better_leaves_less_than_nothing_of_the_difference() -> None:
    better = figures()
    better[DEEP]["held_out"] = 1.7
    assert judge([better])[2].holds and judge([better])[2].measured == "-33 % of it"


def test_a_model_of_another_size_fails() -> None:
    wrong = figures()
    wrong[DEEP]["parameters"] = 1030
    assert [check.holds for check in judge([wrong])] == [True, False, True, True]


def test_six_layers_of_attention_are_as_large_as_two_whole_ones() -> None:
    sizes = {
        name: small_lm(65, layers=layers, position=spec.Learned(64), arrange=arrange).parameters()
        for name, (layers, arrange) in VARIANTS.items()
    }
    assert sizes[DEEP] == pytest.approx(sizes[WHOLE], rel=0.02) and sizes[SHALLOW] < 0.5 * sizes[WHOLE]
