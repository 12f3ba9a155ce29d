"""H29: the judge both ways, what differs between tokens, and layers that keep nothing of their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.no_residual import PURE, WITH, WITHOUT, differing, judge, no_skip, pure
from qkv.claims.models import initialised, small_lm
from qkv.nn import Taps, tap_names


def figures() -> Figures:
    differs = {WITH: [0.9, 0.8, 0.7], WITHOUT: [0.9, 0.5, 3e-7], PURE: [0.9, 0.2, 5e-7]}
    return {"unigrams": 3.3, "differs": differs, WITH: {"held_out": 1.8}, WITHOUT: {"held_out": 3.2}}


def test_all_holds_of_figures_as_expected() -> None:
    """After the last layer, what is left of two stacks is round-off: the layer before decides."""
    checks = judge([figures()] * 3)
    assert len(checks) == 5 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "value", "failing"),
    [
        (WITH, [0.9, 0.8, 0.4], "over half"),
        (PURE, [0.9, 0.2, 0.15], "under a tenth"),
        (PURE, [0.9, 0.6, 5e-7], "a feed-forward keeps"),
        (WITHOUT, [0.9, 0.5, 0.75], "residuals keep"),
    ],
)
def test_states_of_one_seed_that_are_otherwise_are_enough(name: str, value: Any, failing: str) -> None:
    wrong = figures()
    wrong["differs"][name] = value
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and failing in failed[0]


@pytest.mark.parametrize(
    ("name", "loss", "holds"),
    [(WITHOUT, 2.5, False), (WITHOUT, None, True), (WITH, None, False), (WITH, 3.4, False)],
)
def test_training_without_residuals_is_to_stall_where_training_with_them_is_not(
    name: str, loss: float | None, holds: bool
) -> None:
    wrong = figures()
    wrong[name]["held_out"] = loss
    assert [check.holds for check in judge([figures(), wrong])] == [True] * 4 + [holds]


def test_what_differs_is_a_part_of_the_norm() -> None:
    assert differing(torch.tensor([[[3.0, 4.0], [3.0, 4.0]]])) == 0
    assert differing(torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])) == 1
    # mean 2, rest 1 and -1
    assert differing(torch.tensor([[[3.0], [1.0]]])) == pytest.approx((2 / 10) ** 0.5)


@pytest.mark.parametrize(
    ("arrange", "silent"),
    [(no_skip, "attention.output"), (no_skip, "feed_forward.down"), (pure, "attention.output")],
)
def test_a_layer_without_residuals_forgets_its_input_where_a_branch_says_nothing(
    arrange: Any, silent: str
) -> None:
    model = small_lm(9, width=16, heads=2, layers=1, position=spec.Learned(8), arrange=arrange)
    network = initialised(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        network.get_parameter(f"decoder.layers.0.{silent}.weight").zero_()
    taps = Taps(["layers.0.output"], tap_names(model))
    network(torch.arange(8)[None], tap=taps)
    assert taps["layers.0.output"].abs().max() == 0
