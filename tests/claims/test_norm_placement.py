"""H15: the judge both ways."""

from __future__ import annotations

import pytest

from qkv.claims.claim import Figures
from qkv.claims.experiments.norm_placement import RATES, VARIANTS, judge


def figures() -> Figures:
    lasts = {}
    for name in VARIANTS:
        for rate in RATES:
            lasts[f"{name}, {rate:g}"] = 3.3 if name == "post-norm" else 2.4
    return {"frequencies": 3.3, "curves": {name: {"last": last} for name, last in lasts.items()}}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == len(RATES) * len(VARIANTS) and all(check.holds for check in checks)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("name", VARIANTS)
def test_one_seed_that_is_otherwise_is_enough(name: str, rate: float) -> None:
    wrong = figures()
    wrong["curves"][f"{name}, {rate:g}"]["last"] = 2.9 if name == "post-norm" else 3.0
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and failed[0].startswith(name) and f"{rate:g}" in failed[0]


def test_to_diverge_is_to_stall_and_not_to_learn() -> None:
    diverged = figures()
    for curve in diverged["curves"].values():
        curve["last"] = None
    holds = {check.what: check.holds for check in judge([diverged])}
    assert all(held == ("stalls" in what) for what, held in holds.items())
