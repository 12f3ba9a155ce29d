"""H14: the judge both ways, what is a separator, and what ablation measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.head_roles import ablated, judge, scored, separates, separators, share_of_quarter
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import mean_loss


def figures() -> Figures:
    return {
        "previous token": {"heads": [[0.9, 0.1], [0.1, 0.1]], "equal": 0.05},
        "separators": {"heads": [[0.1, 0.1], [0.3, 0.1]], "equal": 0.1},
        "induction": {"heads": [[0.0, 0.0], [0.0, 0.2]], "equal": 0.05},
        "ablated": [[6.0, 0.1], [-0.1, 0.5]],
    }


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 5 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous token", {"heads": [[0.4, 0.1], [0.1, 0.1]], "equal": 0.05}),
        ("separators", {"heads": [[0.1, 0.1], [0.19, 0.1]], "equal": 0.1}),
        ("induction", {"heads": [[0.0, 0.0], [0.0, 0.2]], "equal": 0.15}),
        ("ablated", [[9.0, 1.2], [1.0, 0.1]]),  # the median is 1.1, one head has four fifths
        ("ablated", [[0.9, 0.9], [0.9, 0.9]]),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, value: Any) -> None:
    wrong = figures() | {name: value}
    assert [check.holds for check in judge([figures(), wrong])].count(False) == 1


def test_the_share_of_a_quarter_counts_what_rises() -> None:
    assert share_of_quarter([5, 1, 1, 1, -4, 0, 2, 0]) == 0.7
    assert share_of_quarter([-1, -2, 0, 0]) == 0


def test_separators_are_punctuation_and_line_ends_with_spaces_beside() -> None:
    entries = (",", " ", ",\n", "a", ". ", "e,", "\n", "?\n", "'", "")
    assert [entry for entry in entries if separates(entry)] == [",", ",\n", ". ", "\n", "?\n"]
    assert separators(entries).tolist() == [0, 2, 4, 6, 7]


def test_heads_are_ablated_one_at_a_time_in_per_cent_of_the_whole_loss() -> None:
    model = small_lm(9, width=16, heads=2, position=spec.Rotary())
    network = initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.5)
    rows = torch.randint(9, (4, 12), generator=torch.Generator().manual_seed(1))
    found, whole = ablated(network, rows), mean_loss(network, rows)
    assert [len(layer) for layer in found] == [2, 2]
    with torch.no_grad():
        network.get_parameter("decoder.layers.1.attention.output.weight")[:, :8] = 0
    assert found[1][0] == pytest.approx(100 * (mean_loss(network, rows) / whole - 1), abs=1e-3)


def test_scores_stand_beside_those_of_equal_attention() -> None:
    """With weights that are all 0, every head gives every key the same."""
    model = small_lm(9, width=16, heads=2, position=spec.Rotary())
    network = initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.0)
    draw = torch.Generator().manual_seed(1)
    text, again = torch.randint(9, (4, 12), generator=draw), torch.arange(12).remainder(5).repeat(2, 1)
    for scores in scored(network, text, again, torch.tensor([2, 3])).values():
        assert scores["heads"] == [pytest.approx([scores["equal"]] * 2)] * 2 and scores["equal"] > 0
