"""Gradients at the embeddings, and their integral, which is complete."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from qkv.errors import RequestError
from qkv.explanation import (
    Blank,
    Logit,
    Mean,
    Reading,
    Resample,
    Zero,
    gradient,
    gradient_times_input,
    integrated_gradients,
    occlusion,
)
from qkv.spec import Model, Pool, SequenceClass, Stack, Tokens
from tests.explanation.cases import EVERY, METRIC, REFERENCE, SOURCE, TOKENS, asked, network, reading, tapped
from tests.matrix.variants import VOCAB, WIDTH
from tests.support import random_model


def answer(variant: str, changed: Mapping[str, Tensor]) -> float:
    return asked(tapped(variant, changed)[0])


def moved(one: Reading, point: str, states: Mapping[str, Tensor], place: int, steps: Tensor) -> np.ndarray:
    """The answer a step ahead less that a step back, for each step at a place, all in one batch."""
    both = torch.cat([steps, -steps])
    rows = [states[name].expand(len(both), -1, -1).clone() for name in states]
    rows[list(states).index(point)][:, place] += both
    with torch.no_grad():
        logits = one.run(inputs=rows)[:, -1]
    ahead, back = (logits[:, 3] - logits[:, 11]).double().chunk(2)
    return (ahead - back).numpy()


SMOOTH = ["grouped", "biased", "parallel", "alibi", "post-norm", "encoder-decoder-pre-norm"]


@pytest.mark.parametrize("variant", SMOOTH)
def test_gradients_are_the_slopes_that_small_steps_measure(variant: str) -> None:
    one = reading(variant)
    points = [f"{side.prefix}embedding" for side in one.sides]
    states = one.read(points)
    inward, lengths = gradient_times_input(one, METRIC), gradient(one, METRIC)
    row = 0
    for point in points:
        for place in range(states[point].shape[1]):
            ways = torch.cat([torch.eye(states[point].shape[2]), states[point][:, place]])
            slopes = moved(one, point, states, place, 2e-2 * ways) / 4e-2
            scale = np.linalg.norm(slopes[:-1])
            assert inward.values[row] == pytest.approx(slopes[-1], abs=0.02 * scale)
            assert lengths.values[row] == pytest.approx(scale, rel=0.02)
            row += 1
    assert row == len(inward.values) == len(lengths.values)


COMPLETE = [variant for variant in EVERY if not variant.startswith("experts")]


@pytest.mark.parametrize(
    "variant, by",
    [
        *((variant, Blank(1)) for variant in COMPLETE),
        *((v, Zero()) for v in ("grouped", "post-norm", "alibi")),
    ],
    ids=str,
)
def test_integrated_gradients_are_complete(variant: str, by: Blank | Zero) -> None:
    """They sum to the answer less that of the baseline, to 1e-3, both taken from the model itself."""
    one = reading(variant)
    points = [f"{side.prefix}embedding" for side in one.sides]
    blank = Reading(network(variant), TOKENS * 0 + 1, SOURCE * 0 + 1 if network(variant).paired else None)
    own = asked(tapped(variant, [])[0])
    zero = {point: torch.zeros_like(value) for point, value in one.read(points).items()}
    difference = own - answer(variant, zero if isinstance(by, Zero) else blank.read(points))
    found = integrated_gradients(one, METRIC, by)
    assert float(found.values.sum()) == pytest.approx(difference, abs=1.1e-3)
    assert abs(found.facts["gap"]) <= 1e-3
    assert found.facts["own"] == pytest.approx(own, abs=1e-4)
    assert found.facts["own"] - found.facts["baseline"] == pytest.approx(difference, abs=1e-4)


def test_the_integral_is_that_of_a_plain_sum_along_the_way() -> None:
    """Riemann's, of 400 steps."""
    one = reading("grouped")
    found = integrated_gradients(one, METRIC, Blank(1), tolerance=1e-4)
    end = one.embeddings[0]
    start = Reading(network("grouped"), TOKENS * 0 + 1).embeddings[0]
    steps = (torch.arange(400) + 0.5) / 400
    x = (start + steps[:, None, None] * (end - start)).requires_grad_()
    logits = one.run(inputs=[x])
    (slopes,) = torch.autograd.grad((logits[:, -1, 3] - logits[:, -1, 11]).sum(), [x])
    np.testing.assert_allclose(found.values, (slopes * (end - start)).sum(-1).mean(0), atol=1e-3)


def test_a_tighter_tolerance_takes_more_steps_and_too_few_are_said() -> None:
    one = reading("grouped")
    rough, fine = (integrated_gradients(one, METRIC, tolerance=t).facts for t in (1e-1, 1e-3))
    assert rough["steps"] < fine["steps"] and fine["missed"] <= 1e-3 < rough["missed"]
    short = integrated_gradients(one, METRIC, most=8).facts
    assert short["steps"] == 8 and abs(short["gap"]) > 1e-2
    with pytest.raises(RequestError, match="tolerance above 0 and at least 8 steps"):
        integrated_gradients(one, METRIC, tolerance=0)


def test_experts_that_change_on_the_way_show_as_a_gap() -> None:
    facts = integrated_gradients(reading("experts-softmax"), METRIC, Blank(1), most=256).facts
    assert abs(facts["gap"]) > 1e-2 and facts["missed"] > 1e-2


def test_several_baselines_give_their_mean() -> None:
    one = reading("grouped")
    each = [
        integrated_gradients(one, METRIC, Mean(reading("grouped", REFERENCE[i : i + 1]))) for i in range(3)
    ]
    both = integrated_gradients(one, METRIC, Resample(reading("grouped", REFERENCE)))
    np.testing.assert_allclose(both.values, np.mean([found.values for found in each], 0), atol=1e-3)
    assert both.facts["baseline"] == pytest.approx(np.mean([f.facts["baseline"] for f in each]), abs=1e-5)


def test_in_a_model_that_only_adds_all_methods_agree() -> None:
    """The mean of embeddings through one map: a token brings its own product, whatever asks."""
    model = random_model(Model(Stack(Tokens(VOCAB, WIDTH), ()), head=SequenceClass(3, Pool("mean"))))
    one, metric = Reading(model, TOKENS), Logit(2, place=None)
    weight = model.head.output.weight.detach()  # type: ignore[union-attr]
    expected = (one.embeddings[0][0] @ weight[2]) / 7
    for found in (
        gradient_times_input(one, metric),
        integrated_gradients(one, metric),
        occlusion(one, metric, Zero()),
    ):
        np.testing.assert_allclose(found.values, expected, atol=1e-6)
    np.testing.assert_allclose(gradient(one, metric).values, float(weight[2].norm()) / 7, rtol=1e-5)
