"""H12: the judge both ways, and the share of pairs that do not turn once."""

from __future__ import annotations

import math

import pytest

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.longer_rotary import BASE, HEADS, SCALINGS, SHORT, WIDTH, judge
from qkv.spec.rotary import inverse_frequencies

ZERO_SHOT = {"raw": 2.6, "PI": 2.2, "NTK": 2.1, "YaRN": 2.1}
TUNED = {"raw": 1.98, "PI": 1.92, "NTK": 1.95, "YaRN": 1.91}


def figures() -> Figures:
    each = {name: {"zero-shot": [ZERO_SHOT[name]] * 4, "fine-tuned": [TUNED[name]] * 4} for name in SCALINGS}
    return {"short": 2.0} | each


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 8 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "when", "loss", "failed"),
    [
        ("raw", "zero-shot", 2.39, ["far above PI"]),
        ("NTK", "zero-shot", 2.21, ["NTK is below PI"]),
        ("YaRN", "zero-shot", 2.21, ["YaRN is below PI"]),
        ("NTK", "zero-shot", 2.35, ["far above NTK", "NTK is below PI"]),
        ("PI", "fine-tuned", 1.94, ["within 0.02"]),
        ("YaRN", "fine-tuned", 1.89, ["within 0.02"]),
        ("NTK", "fine-tuned", 1.915, ["PI is below NTK"]),
        ("NTK", "fine-tuned", 1.9, ["PI is below NTK", "YaRN is below NTK"]),
    ],
)
def test_what_is_otherwise_in_one_seed_fails(name: str, when: str, loss: float, failed: list[str]) -> None:
    wrong = figures()
    wrong[name][when] = [loss] * 4
    found = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(found) == len(failed) and all(part in what for part, what in zip(failed, found, strict=True))


def test_losses_are_those_of_all_places() -> None:
    uneven = figures()
    uneven["NTK"]["zero-shot"] = [2.0, 2.0, 2.0, 2.9]  # 2.225 in all
    assert [check.what for check in judge([uneven]) if not check.holds] == ["zero-shot, NTK is below PI"]


def turns(base: float, dims: int, length: int) -> list[float]:
    """How often each pair turns within a length."""
    return [length * float(each) / (2 * math.pi) for each in inverse_frequencies(base, dims)]


def test_the_base_is_that_of_the_facts_and_leaves_the_share_of_llama() -> None:
    """Of LLaMA-1's 64 pairs the 41st is the last to turn once within 2048 positions: here 41/64 of 16."""
    assert round(BASE) == 37
    assert sum(each < 1 for each in turns(1e4, 128, 2048)) == 23
    assert math.log(SHORT / (2 * math.pi), BASE) == pytest.approx(41 / 64)
    assert sum(each < 1 for each in turns(BASE, WIDTH // HEADS, SHORT)) == 5  # from 10.25 of 16 on


def test_yarn_keeps_what_turns_eight_times_and_divides_what_does_not_turn_once() -> None:
    yarn, dims = SCALINGS["YaRN"], WIDTH // HEADS
    assert isinstance(yarn, spec.Yarn)
    kept = yarn.kept(BASE, dims).tolist()
    ends = [(share, turn) for share, turn in zip(kept, turns(BASE, dims, SHORT), strict=True)]
    assert all(share == 1 for share, turn in ends if turn > 8)
    assert all(share == 0 for share, turn in ends if turn < 1)
    assert all(0 < share < 1 for share, turn in ends if 1 < turn < 8)
