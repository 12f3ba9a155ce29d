"""H20: the judge both ways, and what is measured of a choice against choices that are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from qkv import spec
from qkv.claims.claim import Figures, Run
from qkv.claims.experiments.balanced_experts import (
    DENSE,
    NAMES,
    WEIGHT,
    evenness,
    experts,
    experts_left,
    in_points,
    judge,
    loss,
    routed,
)
from qkv.claims.models import initialised, small_lm
from qkv.nn import Layout, Transformer
from qkv.nn.experts import load_balancing
from qkv.nn.norms import LayerNorm


def figures(**changed: Any) -> Figures:
    found: Figures = {DENSE: {"held_out": 2.0, "flops": 1000}}
    for name in NAMES:
        even = "no balancing" not in name
        most = 8 if "top-1" in name else 4
        found[name] = {
            "held_out": 1.9 if even else 2.1,
            "flops": 1010,
            "left_after": [7.9, 8.0] if even else [1.5, 2.0],
            "balance": [1.0, 1.02] if even else [0.9 * most, most],
        }
    for name, values in changed.items():
        found[name] = found[name] | values
    return found


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 13 and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "values", "failed"),
    [
        ("top-1, bias", {"flops": 1030}, "all do the same work"),
        ("top-1, no balancing", {"left_after": [1.0, 7.5]}, "top-1, no balancing: the entropy"),
        ("top-2, no balancing", {"left_after": [4.5, 4.5]}, "top-2, no balancing: the entropy"),
        ("top-1, no balancing", {"balance": [1.0, 7.5]}, "top-1, no balancing: the balance loss goes to 8"),
        ("top-2, no balancing", {"balance": [2.0, 2.5]}, "top-2, no balancing: the balance loss goes to 4"),
        ("top-1, loss", {"balance": [1.0, 1.3]}, "top-1, loss: the balance loss goes to 1.0"),
        ("top-2, bias", {"balance": [1.2, 1.2]}, "top-2, bias: the balance loss goes to 1.0"),
        ("top-1, bias", {"held_out": 2.1}, "equal work for a token: the loss of top-1, bias"),
        ("top-2, loss", {"held_out": None}, "equal work for a token: the loss of top-2, loss"),
    ],
)
def test_what_is_otherwise_in_one_seed_does_not_hold(name: str, values: Figures, failed: str) -> None:
    checks = judge([figures(), figures(), figures(**{name: values})])
    if failed.startswith("all do"):  # sizes are the same in all seeds: the first tells
        checks = judge([figures(**{name: values})])
    (check,) = [check for check in checks if not check.holds]
    assert check.what.startswith(failed)


def test_experts_left_is_the_number_of_those_that_are_used_evenly() -> None:
    assert experts_left(torch.tensor([5] * 8)) == pytest.approx(8)
    assert experts_left(torch.tensor([7, 0, 0, 7])) == pytest.approx(2)
    assert experts_left(torch.tensor([0, 3])) == pytest.approx(1)
    assert experts_left(torch.tensor([3, 1])) == pytest.approx(
        math.exp(0.75 * math.log(4 / 3) + math.log(4) / 4)
    )


def network(top_k: int, way: str) -> Transformer:
    model = small_lm(11, layers=2, width=16, heads=2, mixer=experts(top_k, way), position=spec.Learned(12))
    return initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.3)


def rows(count: int = 5) -> torch.Tensor:
    return torch.randint(11, (count, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top_k", [1, 2])
def test_a_choice_that_is_always_the_same_has_the_greatest_balance_loss(top_k: int) -> None:
    """Of one expert 8, of two 4 (both with all of the probability)."""
    model = network(top_k, "no balancing")
    with torch.no_grad():
        for module in routed(model):
            module.router.weight.zero_()
            module.router.weight[:top_k] = 1e4  # the norm before it leaves no state at zero
        for part in model.modules():
            if isinstance(part, LayerNorm):
                part.weight.zero_()
                part.bias.fill_(1.0)
    found = evenness(model, rows()[:, :-1])
    assert found["balance"] == pytest.approx([8 / top_k] * 2, rel=1e-5)
    assert found["left_after"] == pytest.approx([top_k] * 2)
    assert sorted(found["shares"][0], reverse=True)[:2] == pytest.approx([1, 0] if top_k == 1 else [0.5, 0.5])


def test_evenness_over_parts_is_that_of_all_rows() -> None:
    model, many = network(1, "no balancing"), rows(130)[:, :-1]
    seen: list[torch.Tensor] = []
    (first, _) = routed(model)
    hook = first.router.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    found = evenness(model, many)
    hook.remove()
    logits = torch.cat(seen[:3])  # 64, 64 and 2 rows; the last call is that of `evenness` itself
    counts = torch.bincount(logits.argmax(-1).flatten(), minlength=8)
    assert found["shares"][0] == pytest.approx((counts / counts.sum()).tolist())
    assert found["left_after"][0] == pytest.approx(experts_left(counts))
    assert logits.shape[:2] == many.shape


def test_the_loss_has_what_balances_and_nothing_else() -> None:
    batch = rows()
    plain, balanced = network(2, "no balancing"), network(2, "loss")
    told: list[float] = []
    entropy = F.cross_entropy(plain(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    assert float(loss(plain, "no balancing", told, batch).detach()) == pytest.approx(
        float(entropy.detach()), rel=1e-6
    )
    with plain_tap(balanced) as seen:
        total = float(loss(balanced, "loss", told, batch).detach())
    layout = Layout.unpadded(*batch[:, :-1].shape)
    added = 0.0
    for module, logits in zip(routed(balanced), seen, strict=True):
        routing = module.router(logits, layout)
        added += float(load_balancing(routing.scores, routing.chosen, layout).detach())
    assert total == pytest.approx(float(entropy.detach()) + WEIGHT * added, rel=1e-6) and added > 2
    assert len(told) == 2 and told[0] == told[1] and 2 <= told[0] <= 8


class plain_tap:
    """The logits that the routers of one pass are given first."""

    def __init__(self, model: Transformer):
        self.model, self.seen = model, list[torch.Tensor]()

    def __enter__(self) -> list[torch.Tensor]:
        self.hooks = [
            module.router.register_forward_pre_hook(
                lambda _, given: self.seen.append(given[0]) if len(self.seen) < 2 else None
            )
            for module in routed(self.model)
        ]
        return self.seen

    def __exit__(self, *problem: object) -> None:
        for hook in self.hooks:
            hook.remove()


def test_the_bias_goes_against_the_load_and_takes_no_part_in_the_loss() -> None:
    batch = rows()
    model, plain = network(1, "bias"), network(1, "no balancing")
    told: list[float] = []
    assert float(loss(model, "bias", told, batch).detach()) == pytest.approx(
        float(loss(plain, "no balancing", told, batch).detach()), rel=1e-6
    )
    found = evenness(plain, batch[:, :-1])
    for module, shares in zip(routed(model), found["shares"], strict=True):
        expected = [0.001 * ((share < 1 / 8) - (share > 1 / 8)) for share in shares]
        assert module.router.balance.tolist() == pytest.approx(expected, abs=1e-9)


def test_points_are_means_of_equal_stretches() -> None:
    assert in_points([1.0, 3.0, 5.0, 7.0], 2) == [2, 6] and len(in_points([1.0] * 500, 40)) == 40


def test_one_expert_is_weighed_by_its_probability_and_two_by_their_shares() -> None:
    one, two = experts(1, "bias"), experts(2, "loss")
    assert (one.router.normalise, one.router.balance, one.expert.hidden) == (False, True, 256)
    assert (two.router.normalise, two.router.balance, two.expert.hidden) == (True, False, 128)


def test_a_smoke_run_has_every_variant() -> None:
    from qkv.claims.experiments.balanced_experts import measure

    found = measure(Run("balanced-experts", 0, "smoke"))
    assert set(NAMES) <= set(found) and found[DENSE]["left"] == []
    assert all(len(found[name]["left"]) == len(found[name]["curve"]["steps"]) == 3 for name in NAMES)
