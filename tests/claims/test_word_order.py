"""H10: the judge both ways, and that without positions nothing can be seen, exactly."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.word_order import CAUSAL, FILLERS, LENGTH, POSITIONS, described, judge
from qkv.claims.models import initialised
from qkv.claims.tasks import a_or_b_first


def figures() -> Figures:
    return {"accuracy": dict.fromkeys(POSITIONS, 1.0) | {"none": 0.5, CAUSAL: 0.97}}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == len(POSITIONS) + 1 and all(check.holds for check in checks)


@pytest.mark.parametrize("name", [*POSITIONS, CAUSAL])
def test_one_seed_that_is_otherwise_is_enough(name: str) -> None:
    wrong = figures()
    wrong["accuracy"][name] = 0.6 if name == "none" else 0.9
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1


def swapped(tokens: torch.Tensor) -> torch.Tensor:
    return torch.where(tokens == 0, 1, torch.where(tokens == 1, 0, tokens))


@pytest.mark.parametrize(
    ("position", "mask", "blind"),
    [
        (None, spec.Everything(), True),
        (None, spec.Causal(), False),
        (spec.Rotary(), spec.Everything(), False),
        (spec.Learned(LENGTH), spec.Everything(), False),
    ],
)
def test_who_can_see_the_order_at_all(position: spec.Position | None, mask: spec.Mask, blind: bool) -> None:
    """Swapping a and b changes no bag of tokens: without positions the answer is the same."""
    network = initialised(described(position, mask), torch.Generator().manual_seed(0), lambda w: 0.5)
    tokens, _ = a_or_b_first(torch.Generator().manual_seed(1), 16, LENGTH, FILLERS)
    with torch.no_grad():
        apart = float((network(tokens) - network(swapped(tokens))).abs().max())
    assert apart < 1e-5 if blind else apart > 1e-2


def test_a_symmetric_bias_sees_no_more_than_whether_a_row_is_turned() -> None:
    """ALiBi looks at distances alone, so a row and its mirror image are one."""
    network = initialised(described(spec.Alibi()), torch.Generator().manual_seed(0), lambda w: 0.5)
    tokens, _ = a_or_b_first(torch.Generator().manual_seed(1), 16, LENGTH, FILLERS)
    with torch.no_grad():
        assert torch.allclose(network(tokens), network(tokens.flip(1)), atol=1e-5)
