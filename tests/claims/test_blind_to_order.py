"""H7: the judge both ways, chance by hand, and who can see the order at all."""

from __future__ import annotations

from copy import deepcopy
from math import exp, log

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.blind_to_order import LONGEST, MODELS, SYMBOLS, TASKS, judge, log_orders
from qkv.claims.tasks import Ragged, ragged
from qkv.claims.translating import FIRST

BLIND = "Transformer, no positions"


def figures() -> Figures:
    one = {name: {"exact": 0.99, "nats": 0.02} for name in MODELS}
    one |= {BLIND: {"exact": 0.28, "nats": 7.1}, "chance": {"exact": 0.27, "nats": 7.0}}
    return {task: deepcopy(one) for task in TASKS}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 10 and all(check.holds for check in checks)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("name", "what", "value"),
    [
        ("ConvS2S", "exact", 0.89),
        ("ConvS2S, no positions", "exact", 0.93),
        ("Transformer", "exact", 0.5),
        (BLIND, "exact", 0.31),
        (BLIND, "exact", 0.2),
        (BLIND, "nats", 6.8),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(task: str, name: str, what: str, value: float) -> None:
    wrong = figures()
    wrong[task][name][what] = value
    failed = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert len(failed) == 1 and failed[0].startswith(task)


def test_orders_are_counted_by_hand() -> None:
    rows = Ragged(torch.tensor([[4, 5, 6], [4, 4, 5], [4, 4, 0], [7, 0, 0]]), torch.tensor([3, 3, 2, 1]))
    assert log_orders(rows).tolist() == pytest.approx([log(6), log(3), 0, 0], abs=1e-6)
    made = ragged(torch.Generator().manual_seed(0), 4000, 1, LONGEST, SYMBOLS, FIRST)
    different = sum(exp(-sum(log(i) for i in range(1, n + 1))) for n in range(1, LONGEST + 1)) / LONGEST
    assert different < float((-log_orders(made)).exp().mean()) < different + 0.02


@pytest.mark.parametrize("name", MODELS)
def test_only_a_transformer_without_positions_reads_a_set(name: str) -> None:
    """The logits of a row of different symbols and of the same row turned round."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    source = FIRST + torch.arange(8)[None]
    target = torch.tensor([[1, 5, 4, 9]])
    there = torch.ones_like(source, dtype=torch.bool)
    with torch.no_grad():
        apart = float((model(source, there, target) - model(source.flip(1), there, target)).abs().max())
    assert apart < 1e-5 if name == BLIND else apart > 1e-3
