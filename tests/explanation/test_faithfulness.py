"""Scores beside what is measured, and beside chance."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from qkv.errors import RequestError
from qkv.explanation import (
    Axis,
    Blank,
    Evidence,
    Logit,
    Reading,
    Resample,
    Zero,
    agreement,
    comprehensiveness,
    deletion,
    insertion,
    occlusion,
    rollout,
    spearman,
    sufficiency,
)
from qkv.explanation.faithfulness import ranks
from qkv.spec import Model, Pool, SequenceClass, Stack, Tokens
from tests.explanation.cases import METRIC, REFERENCE, TOKENS, asked, reading, tapped
from tests.matrix.variants import VOCAB, WIDTH
from tests.support import random_model

SCORES = np.array([0.1, 3.0, -1.0, 2.0, 0.0, 5.0, 0.2])
ORDER = [5, 1, 3, 6, 0, 4, 2]


def without(tokens: list[int]) -> float:
    """The answer with token 1 at these places, from the model itself."""
    changed = TOKENS.clone()
    changed[0, tokens] = 1
    return asked(tapped("grouped", [], changed)[0])


def test_what_goes_with_the_best_tokens_and_what_the_best_alone_leave() -> None:
    own = without([])
    for method, some in ((comprehensiveness, lambda n: ORDER[:n]), (sufficiency, lambda n: ORDER[n:])):
        found = method(reading("grouped"), METRIC, SCORES, Blank(1), fractions=(0.1, 0.2, 0.5, 1))
        expected = [own - without(some(n)) for n in (1, 2, 4, 7)]
        np.testing.assert_allclose(found.at(ranking="given").values, expected, atol=1e-5)
        assert found.axes[1].labels == ("0.1", "0.2", "0.5", "1")
    assert float(found.at(ranking="given", fraction="1")) == pytest.approx(0, abs=1e-6)


def test_chance_is_the_mean_of_orders_of_a_fixed_seed() -> None:
    one, own = reading("grouped"), without([])
    first = comprehensiveness(one, METRIC, SCORES, Blank(1), fractions=(0.5,), draws=3, seed=5)
    again = comprehensiveness(one, METRIC, -SCORES, Blank(1), fractions=(0.5,), draws=3, seed=5)
    other = comprehensiveness(one, METRIC, SCORES, Blank(1), fractions=(0.5,), draws=3, seed=6)
    chance = np.random.default_rng(5)
    expected = np.mean([own - without(chance.permutation(7)[:4].tolist()) for _ in range(3)])
    assert float(first.at(ranking="random")) == pytest.approx(expected, abs=1e-5)
    assert float(again.at(ranking="random")) == float(first.at(ranking="random"))
    assert float(other.at(ranking="random")) != float(first.at(ranking="random"))
    assert float(again.at(ranking="given")) != float(first.at(ranking="given"))


def test_curves_go_from_the_whole_prompt_to_none_and_back() -> None:
    one = reading("grouped")
    down, up = deletion(one, METRIC, SCORES, Blank(1)), insertion(one, METRIC, SCORES, Blank(1))
    for found, expected in (
        (down, [without(ORDER[:n]) for n in range(8)]),
        (up, [without(ORDER[n:]) for n in range(8)]),
    ):
        np.testing.assert_allclose(found.at(ranking="given").values, expected, atol=1e-5)
        area = sum((a + b) / 2 for a, b in pairwise(expected)) / 7
        assert found.facts["area"] == pytest.approx(area, abs=1e-5)
        ends = found.values[1, [0, -1]]
        np.testing.assert_allclose(ends, [expected[0], expected[-1]], atol=1e-5)  # all orders share them
    assert (down.axes[1].name, up.axes[1].name) == ("replaced", "there")


def test_a_planted_cause_is_told_from_chance() -> None:
    """The mean of what each token brings: what goes with a token is its own part, exactly."""
    model = random_model(Model(Stack(Tokens(VOCAB, WIDTH), ()), head=SequenceClass(3, Pool("mean"))))
    one, metric = Reading(model, TOKENS), Logit(2, place=None)
    effects = occlusion(one, metric, Zero())
    best = np.sort(effects.values)[::-1]
    found = comprehensiveness(one, metric, effects, Zero(), fractions=(0.1, 0.5))
    np.testing.assert_allclose(found.at(ranking="given").values, [best[0], best[:4].sum()], atol=1e-6)
    assert (found.values[0] > found.values[1] + 0.01).all()
    down, up = deletion(one, metric, effects, Zero()).facts, insertion(one, metric, effects, Zero()).facts
    assert down["area"] < down["random area"] - 0.01 and up["area"] > up["random area"] + 0.01


def test_several_replacements_give_their_mean() -> None:
    reference = reading("grouped", REFERENCE)
    found = deletion(reading("grouped"), METRIC, SCORES, Resample(reference)).at(ranking="given").values
    assert found[7] == pytest.approx(reference.value(METRIC).mean().item(), abs=1e-5)


def test_rank_correlation_of_known_numbers() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 7.0])).tolist() == [2.5, 1, 2.5, 4]
    assert spearman([1, 2, 3, 4], [10, 20, 35, 90]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    a, b = np.random.default_rng(0).permutation(9), np.random.default_rng(1).permutation(9)
    distances = float(((a - b) ** 2).sum())
    assert spearman(a, b) == pytest.approx(1 - 6 * distances / (9 * (81 - 1)))  # without ties
    assert spearman(a, np.exp(b / 3)) == pytest.approx(spearman(a, b))  # ranks alone count
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3])) and np.isnan(spearman([], []))
    assert spearman([1, np.nan, 2], [1, 0, 2]) == pytest.approx(1)
    with pytest.raises(RequestError, match="2 numbers cannot be compared with 3"):
        spearman([1, 2], [1, 2, 3])


def test_agreement_is_the_correlation_of_each_layer() -> None:
    one = reading("alibi")
    effects, scores = occlusion(one, METRIC, Blank(1)), rollout(one).at(query=-1)
    found = agreement(scores, effects)
    assert found.axes == scores.axes[:1]
    for layer in (0, 1):
        assert float(found.at(layer=layer)) == pytest.approx(
            spearman(scores.at(layer=layer), effects), abs=1e-9
        )
    same = replace(effects, values=np.exp(effects.values))
    assert float(agreement(same, effects)) == pytest.approx(1)
    with pytest.raises(RequestError, match="must be the tokens of the effects"):
        agreement(rollout(one), Evidence("x", np.zeros(3), (Axis("token", ("a", "b", "c")),), "s"))


def test_scores_that_do_not_fit_are_refused() -> None:
    one = reading("grouped")
    with pytest.raises(RequestError, match=r"a score for each of the 7 tokens; got \(3,\)"):
        deletion(one, METRIC, [1, 2, 3], Zero())
    with pytest.raises(RequestError, match="a score for each"):
        deletion(one, METRIC, [1, 2, 3, 4, 5, 6, float("nan")], Zero())
    with pytest.raises(RequestError, match="above 0 and at most 1"):
        sufficiency(one, METRIC, SCORES, Zero(), fractions=(0.0,))
    with pytest.raises(RequestError, match="At least one random order"):
        insertion(one, METRIC, SCORES, Zero(), draws=0)
    assert torch.equal(one.sides[0].given, TOKENS)


def test_tokens_of_one_side_can_be_ranked_alone() -> None:
    """The source's: as it is, less with its two best replaced."""
    from tests.explanation.cases import SOURCE, network

    variant = "encoder-decoder-pre-norm"
    scores, model = np.array([0.5, 2.0, -1.0, 1.0]), network(variant)
    found = comprehensiveness(reading(variant), METRIC, scores, Blank(1), (0.5,), side=0)
    changed = SOURCE.clone()
    changed[0, [1, 3]] = 1
    with torch.no_grad():
        lost = asked(model(TOKENS, SOURCE)) - asked(model(TOKENS, changed))
    assert float(found.at(ranking="given", fraction="0.5")) == pytest.approx(lost, abs=1e-5)
    with pytest.raises(RequestError, match="a score for each of the 11 tokens"):
        comprehensiveness(reading(variant), METRIC, scores, Blank(1), (0.5,))
