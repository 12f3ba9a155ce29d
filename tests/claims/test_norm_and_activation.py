"""H21: the judge both ways; the parameters are equal."""

from __future__ import annotations

import pytest

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.norm_and_activation import BASE, LENGTH, VARIANTS, judge
from qkv.claims.models import small_lm


def figures() -> Figures:
    return {name: {"parameters": 100_000, "held_out": 2.0} for name in VARIANTS}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == len(VARIANTS) and all(check.holds for check in checks)


@pytest.mark.parametrize("value", [2.05, 1.95])
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != BASE])
def test_more_than_two_percent_in_one_seed_is_enough_either_way(name: str, value: float) -> None:
    wrong = figures()
    wrong[name]["held_out"] = value
    (failed,) = [check for check in judge([figures(), wrong]) if not check.holds]
    assert failed.what.startswith(name)
    assert f"{50 * (value - 2):+.2f}" in failed.measured


def test_unequal_parameters_are_said() -> None:
    wrong = figures()
    wrong["RMSNorm, GELU"]["parameters"] = 99_000
    assert not judge([wrong])[0].holds and "99,000 to 100,000" in judge([wrong])[0].measured


def test_the_noise_of_the_seeds_stands_beside_the_differences() -> None:
    one, two = figures(), figures()
    for each in two.values():
        each["held_out"] *= 1.1
    checks = judge([one, two])
    assert all(check.holds for check in checks)  # within a seed nothing differs
    assert all("seeds alone change LayerNorm, GELU by 9.52 %" in check.measured for check in checks[1:])


def test_the_models_have_equal_parameters() -> None:
    sizes = [
        small_lm(65, position=spec.Learned(LENGTH), norm=norm, mixer=mixer).parameters()
        for norm, mixer in VARIANTS.values()
    ]
    assert max(sizes) <= 1.005 * min(sizes)
