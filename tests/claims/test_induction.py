"""H17: the judge both ways, and what it measures on attention that is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments import induction
from qkv.claims.experiments.induction import CHEAT, ONE, TWO, fall, judge, second_copy
from qkv.claims.models import initialised
from qkv.claims.tasks import Repeated, repeated

STEPS = [0, 100, 200, 300, 400, 500]


def figures() -> Figures:
    two = {
        "steps": STEPS,
        "losses": [4.2, 2.9, 2.8, 2.7, 0.3, 0.01],
        "last": 0.01,
        "matching": [[0.1, 0.1], [0.9, 0.05]],
        "without them": 3.5,
        "without others": 0.02,
    }
    return {TWO: two, ONE: {"last": 2.9}, CHEAT: {"last": 0.05}}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 6 and all(check.holds for check in checks)
    assert checks[1].measured == "0 steps (0 to 0) after 400 steps (400 to 400)"


@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        (TWO, "last", 0.3),
        (TWO, "last", None),
        (TWO, "losses", [4.2, 2.2, 1.9, 1.3, 0.7, 0.01]),  # under 80 % at 100, under 20 % at 500
        (TWO, "losses", [4.2, 2.9, 2.8, 2.7, 2.7, 2.7]),
        (TWO, "matching", [[0.1, 0.1], [0.4, 0.05]]),
        (TWO, "without them", 1.9),
        (ONE, "last", 1.9),
        (CHEAT, "last", 0.3),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, what: str, value: Any) -> None:
    wrong = figures()
    wrong[name][what] = value
    assert [check.holds for check in judge([figures(), wrong])].count(False) == 1


def test_one_layer_that_diverged_gives_no_level_to_fall_from() -> None:
    wrong = figures()
    wrong[ONE]["last"] = None
    failed = [check.what for check in judge([wrong]) if not check.holds]
    assert failed == [judge([wrong])[1].what, judge([wrong])[3].what]


def test_a_fall_begins_under_four_fifths_and_ends_under_a_fifth() -> None:
    assert fall([0, 10, 20, 30], [4.0, 1.6, 0.5, 0.3], 2.0) == (20, 30)
    assert fall([0, 10, 20, 30], [4.0, 1.6, 0.5, 0.4], 2.0) is None


def test_the_second_copy_is_counted_without_its_first_token_and_without_later_copies() -> None:
    """Periods 3 and 4: tokens 4, 5 and 5, 6, 7 are counted."""
    network = initialised(induction.described(1), torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    rows = Repeated(torch.randint(64, (2, 13), generator=draw), torch.tensor([3, 4]))
    with torch.no_grad():
        logs = network(rows.tokens[:, :-1]).log_softmax(-1)
    counted = [(0, 4), (0, 5), (1, 5), (1, 6), (1, 7)]
    losses = [-float(logs[row, place - 1, rows.tokens[row, place]]) for row, place in counted]
    assert second_copy(network, rows) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_small_weights_leave_the_second_copy_to_chance_and_every_head_is_read_and_removed() -> None:
    network = initialised(induction.described(2), torch.Generator().manual_seed(0), lambda weight: 0.02)
    test = repeated(torch.Generator().manual_seed(1), 16, 65, 64, 8, 28)
    assert second_copy(network, test) == pytest.approx(math.log(64), abs=0.1)
    found = induction.by_head(network, test)
    assert [len(layer) for layer in found["matching"]] == [4, 4]
    assert found["induction heads"] == 1  # none is over a half, so the highest is taken
