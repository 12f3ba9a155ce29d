"""H19: the judge both ways, and what the four kinds keep of a token."""

from __future__ import annotations

import pytest
import torch

from qkv.claims.claim import Figures
from qkv.claims.experiments.shared_keys import GQA, KINDS, MHA, MLA, MQA, cached, described, judge
from qkv.claims.models import initialised


def figures() -> Figures:
    bytes_ = {MHA: 1024.0, GQA: 256.0, MQA: 128.0, MLA: 288.0}
    return {
        name: {"held_out": 1.8, "parameters": 1000, "bytes": bytes_[name], "apart": 1e-7} for name in KINDS
    }


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 5 and all(check.holds for check in checks)
    assert checks[3].what == "MLA keeps 0.28125 of MHA's cache: 2.25 pairs of key and value for 8"
    assert checks[2].measured == "0.125 (128 of 1024 bytes a token)"


@pytest.mark.parametrize(
    ("kind", "figure", "value", "failing"),
    [
        (MQA, "held_out", 1.86, 0),  # 3.3 % above
        (MLA, "held_out", 1.74, 0),
        (GQA, "held_out", None, 0),
        (GQA, "bytes", 260.0, 1),
        (MQA, "bytes", 1024.0, 2),
        (MLA, "bytes", 256.0, 3),
        (MLA, "apart", 2e-5, 4),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(
    kind: str, figure: str, value: float | None, failing: int
) -> None:
    wrong = figures()
    wrong[kind][figure] = value
    checks = judge([figures(), wrong])
    assert [place for place, check in enumerate(checks) if not check.holds] == [failing]


def test_a_spread_of_just_under_three_per_cent_is_small() -> None:
    near = figures()
    near[MQA]["held_out"] = 1.8 * 1.029
    assert judge([near])[0].holds


@pytest.mark.parametrize(("kind", "values"), [(MHA, 128), (GQA, 32), (MQA, 16), (MLA, 36)])
def test_a_token_of_a_layer_costs_so_many_values(kind: str, values: int) -> None:
    """8 keys and 8 values of 8; 2 and 2; one of each; a latent of 32 and a rotated key of 4."""
    network = initialised(described(50, KINDS[kind]), torch.Generator().manual_seed(0)).eval()
    found = cached(network, torch.arange(24).view(2, 12))
    assert found["bytes"] == 2 * 4 * values  # two layers in fp32
    assert found["apart"] < 1e-6
