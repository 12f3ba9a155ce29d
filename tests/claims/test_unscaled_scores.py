"""H9: the judge both ways, and what is measured."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.unscaled_scores import entropy_share, judge


def figures(entropy: float = 0.02, gradient: float = 0.01, mean: float = 3.0) -> Figures:
    return {
        "scaled": {"entropy": 0.9, "gradient": 0.2, "curve": {"mean": 2.5}},
        "unscaled": {"entropy": entropy, "gradient": gradient, "curve": {"mean": mean}},
    }


def test_all_holds_of_figures_as_expected() -> None:
    assert [check.holds for check in judge([figures()] * 3)] == [True, True, True]


@pytest.mark.parametrize(
    ("wrong", "place"), [(figures(entropy=0.11), 0), (figures(gradient=0.021), 1), (figures(mean=2.4), 2)]
)
def test_one_seed_that_is_otherwise_is_enough(wrong: Figures, place: int) -> None:
    holds = [True, True, True]
    holds[place] = False
    assert [check.holds for check in judge([figures(), wrong, figures()])] == holds


def test_an_unscaled_training_that_diverges_is_slower() -> None:
    found = figures()
    found["unscaled"]["curve"]["mean"] = None
    assert judge([found])[2].holds


def test_the_entropy_of_equal_weights_is_one_and_of_a_choice_zero() -> None:
    equal = torch.ones(3, 3).tril() / torch.arange(1, 4)[:, None]
    assert entropy_share(equal[None, None]) == pytest.approx(1)
    assert entropy_share(torch.eye(3)[None, None]) == 0
    half = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.5, 0.5, 0]])
    assert entropy_share(half[None, None]) == pytest.approx((1 + math.log(2) / math.log(3)) / 2)
