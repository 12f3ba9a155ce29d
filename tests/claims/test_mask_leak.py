"""H16: the judge both ways, and the Jacobian test on what is known to leak."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.mask_leak import LEAKS, LENGTH, MASKS, future, judge, share_known
from qkv.claims.models import initialised, small_lm


def figures() -> Figures:
    found: Figures = {
        name: {"curve": {"last": 0.05}, "masked": 4.0, "future": 1.0, "words": 0.1} for name in LEAKS
    }
    return found | {"causal": {"curve": {"last": 1.9}, "masked": 1.9, "future": 0.0, "words": 0.7}}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 9 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        *((name, "masked", 2.8) for name in LEAKS),
        *((name, "future", 0.0) for name in LEAKS),
        *((name, "words", 0.4) for name in LEAKS),
        *((name, "curve", {"last": 0.2}) for name in LEAKS),
        ("causal", "future", 0.1),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, what: str, value: object) -> None:
    wrong = figures()
    wrong[name][what] = value
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and name.split()[-1] in failed[0]


@pytest.mark.parametrize("name", MASKS)
def test_the_jacobian_sees_the_future_where_the_mask_shows_it(name: str) -> None:
    model = small_lm(11, width=16, heads=2, position=spec.Learned(LENGTH), mask=MASKS[name])
    network = initialised(model, torch.Generator().manual_seed(0))
    rows = torch.randint(11, (1, 8), generator=torch.Generator().manual_seed(1))
    assert (future(network, rows) > 0) == (name in LEAKS)


def test_words_are_counted_by_letters_but_for_the_cut_ones_and_single_letters() -> None:
    assert share_known("cut the xqz of a end", {"the", "of", "a", "cut", "end"}) == pytest.approx(5 / 9)
    assert share_known("one two", {"one", "two"}) == 0
