"""H31: the judge both ways, and distances of attention that is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures, Run
from qkv.claims.experiments import attention_distance
from qkv.claims.experiments.attention_distance import LARGE, SMALL, by_layer, distances, judge, thirds, wide
from qkv.claims.models import initialised, small_lm

DEEPER = [[1.0, 3.0], [2.0, 5.0], [3.0, 9.0]]


def figures() -> Figures:
    return {SMALL: DEEPER, LARGE: DEEPER}


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 4 and all(check.holds for check in checks)


@pytest.mark.parametrize("name", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("heads", "failing"),
    [
        ([[3.0, 9.0], [2.0, 5.0], [1.0, 3.0]], "farther than the first"),
        ([[1.0, 1.5], [2.0, 3.0], [3.0, 9.0]], "over half of the layers"),
    ],
)
def test_one_seed_that_is_otherwise_is_enough(name: str, heads: list[list[float]], failing: str) -> None:
    wrong = figures() | {name: heads}
    (failed,) = [check.what for check in judge([figures(), wrong]) if not check.holds]
    assert failed.startswith(name) and failing in failed


def test_a_model_that_is_not_here_is_said_and_not_passed_over() -> None:
    checks = judge([figures() | {LARGE: None}])
    assert [check.holds for check in checks] == [True, True, False, False]
    assert checks[2].measured == "not measured: its package is not installed"


def test_half_of_the_layers_is_not_over_half() -> None:
    assert wide([[1.0, 2.1], [1.0, 2.0]]) == 0.5
    even = figures() | {SMALL: [[1.0, 2.1], [2.0, 3.0]]}
    assert [check.holds for check in judge([even])] == [True, False, True, True]


def test_thirds_are_means_of_layers() -> None:
    heads = [[1.0, 3.0], [4.0, 4.0], [9.0, 9.0], [9.0, 9.0], [6.0, 6.0], [7.0, 7.0]]
    assert by_layer(heads) == [2, 4, 9, 9, 6, 7] and thirds(heads) == (3, 6.5)


def test_equal_attention_looks_half_as_far_as_there_is_without_the_first_token() -> None:
    """With weights that are all 0: of queries 1 to 11, half the way to key 1 each."""
    model = small_lm(9, width=16, heads=2, position=spec.Rotary())
    network = initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.0)
    found = distances(network, torch.arange(12).remainder(9).repeat(3, 1))
    # a query that sees q + 1 keys, one of them the first, has q / (q + 1) of its weight on the others
    weights = [query / (query + 1) for query in range(1, 12)]
    away = sum(weight * (query - 1) / 2 for query, weight in enumerate(weights, 1))
    assert found == [pytest.approx([away / sum(weights)] * 2)] * 2


@pytest.mark.slow
def test_smollm2_is_read_layer_by_layer(smollm2_file: Path) -> None:
    found = attention_distance.of_smollm2(Run("attention-distance", 0))
    assert [len(layer) for layer in found] == [9] * 30
    assert all(0 < distance < attention_distance.READ for layer in found for distance in layer)
