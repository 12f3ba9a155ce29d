"""H22: the judge both ways, and scores of tokens of a network whose causes are known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from qkv import spec
from qkv.claims.claim import Figures
from qkv.claims.experiments.planted_causes import (
    ASK,
    BLANK,
    CAUSES,
    LAYERS,
    LENGTH,
    NO,
    VALUES,
    VOCAB,
    YES,
    correlations,
    judge,
    rows,
    size,
)
from qkv.claims.models import initialised, small_lm


def figures(**changed: Any) -> Figures:
    agreement = {
        "raw": [0.6, 0.5, 0.3, 0.1],
        "rollout": [0.6, 0.6, 0.65, 0.7],
        "gradients": 0.9,
        "known": 0.8,
    }
    found = {"right": 0.99, "divergence": [[0.4, 0.5, 0.6, 0.65]] * 3 + [[0.1] * 4]}
    return (
        found
        | {"agreement": agreement | {k: v for k, v in changed.items() if k in agreement}}
        | {k: v for k, v in changed.items() if k in found}
    )


def test_all_holds_of_figures_as_expected() -> None:
    checks = judge([figures()] * 3)
    assert len(checks) == 5 + LAYERS and all(check.holds for check in checks)


@pytest.mark.parametrize(
    ("name", "value", "failed"),
    [
        ("right", 0.9, ["the task is learned"]),
        ("known", 0.6, ["occlusion finds the planted causes"]),
        ("raw", [0.1, 0.2, 0.3, 0.4], ["raw attention: correlation in the last layer"]),
        ("rollout", [0.9, 0.9, 0.9, 0.0], ["in the last layer raw attention is below rollout"]),
        ("gradients", 0.05, ["raw attention in the last layer is below integrated"]),
        ("divergence", [[0.1, 0.5, 0.1, 0.6], [0.6] * 4], ["layer 0: over half", "layer 2: over half"]),
    ],
)
def test_what_is_otherwise_in_one_seed_does_not_hold(name: str, value: Any, failed: list[str]) -> None:
    found = [check.what for check in judge([figures(), figures(**{name: value})]) if not check.holds]
    assert len(found) == len(failed)
    assert all(what.startswith(start) for what, start in zip(found, failed, strict=True))


def test_rows_have_four_causes_whose_sum_tells_the_answer() -> None:
    given, answers = rows(torch.Generator().manual_seed(0), 2000)
    assert given.shape == (2000, LENGTH + 1) and (given[:, -1] == ASK).all() and int(given.max()) < VOCAB
    causes = given[:, :-1] < BLANK
    assert (causes.sum(-1) == CAUSES).all()
    worth = torch.tensor([*VALUES, *[0] * (VOCAB - BLANK)])[given].sum(-1)
    assert (worth != 0).all() and torch.equal(worth > 0, answers == YES)
    assert 0.45 < float((answers == NO).float().mean()) < 0.55
    assert {int(token) for token in given[:, :-1].unique()} == set(range(BLANK + 8))


def test_scores_are_compared_with_the_effects_of_the_sixteen_tokens() -> None:
    model = small_lm(VOCAB, layers=LAYERS, position=spec.Learned(LENGTH + 1), mask=spec.Everything())
    network = initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.2)
    given, _ = rows(torch.Generator().manual_seed(1), 1)
    found = correlations(network, given[0])
    assert np.shape(found["raw"]) == np.shape(found["rollout"]) == (LAYERS,)
    # rollout behind the first layer ranks the other tokens as its attention does
    assert found["rollout"][0] == pytest.approx(found["raw"][0])
    assert not np.allclose(found["rollout"][1:], found["raw"][1:])
    assert all(-1 <= value <= 1 for each in found.values() for value in np.atleast_1d(each))


def test_gradients_of_a_network_that_adds_up_agree_with_occlusion() -> None:
    """Where each token adds to the answer by itself, both are the same but for rounding."""
    attention = spec.Attention(1, 1, 8, mask=spec.Everything())
    step = spec.pre_norm(attention, spec.Dense("relu", 8)).sublayers[0]
    (branch,) = step.branches
    plain = replace(step, branches=(replace(branch, norm=None),))
    stack = spec.Stack(spec.Tokens(VOCAB, 8), (spec.Layer((plain,)),), None)
    node = spec.Model(decoder=stack, head=spec.Language(VOCAB))
    network = initialised(node, torch.Generator().manual_seed(3), lambda weight: 0.5)
    with torch.no_grad():  # no scores: every token is seen alike
        for name, parameter in network.named_parameters():
            if name.endswith(("query.weight", "query.bias")):
                parameter.zero_()
    given, _ = rows(torch.Generator().manual_seed(1), 1)
    found = correlations(network, given[0])
    assert found["gradients"] == pytest.approx(1, abs=0.02)
    assert math.isnan(found["raw"][0])  # even weights rank nothing


def test_an_effect_counts_by_its_size_and_the_question_not_at_all() -> None:
    effects = np.array([-2.0, 1.0, *[0.0] * (LENGTH - 2), 7.0])
    assert size(effects).tolist() == [2.0, 1.0, *[0.0] * (LENGTH - 2)]
