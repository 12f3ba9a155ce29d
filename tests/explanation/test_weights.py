"""Other weights with the same answer, and the same weights in another order."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import Reading, adversarial_attention, attention_maps, permuted_attention
from qkv.explanation.weights import jensen_shannon, permuted
from tests.explanation.cases import TOKENS, network, reading, tapped


def moved(variant: str, layer: int, weights: np.ndarray, place: int) -> float:
    """Total variation distance of the answer with these weights (head, key) at a place, by a tap."""
    own = tapped(variant, [])[0][0, place].softmax(-1)

    def put(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[0, :, place] = torch.as_tensor(weights.copy()).float()
        return value

    logits, _ = tapped(variant, {f"layers.{layer}.attention.weights": put})
    return float((logits[0, place].softmax(-1) - own).abs().sum() / 2)


@pytest.mark.parametrize(
    "variant, layer, place", [("grouped", 1, -1), ("alibi", 0, 4), ("post-norm", 1, -1), ("sink", 1, -1)]
)
def test_other_weights_far_from_the_own_ones_give_the_same_answer(
    variant: str, layer: int, place: int
) -> None:
    found = adversarial_attention(reading(variant), layer, place)
    own, other = found.values
    place %= 7
    np.testing.assert_allclose(own, attention_maps(reading(variant)).values[layer, :, place], atol=1e-6)
    np.testing.assert_allclose(other.sum(-1), own.sum(-1), atol=1e-5)
    assert (other >= 0).all() and (other[:, place + 1 :] == 0).all()
    assert moved(variant, layer, other, place) == pytest.approx(found.facts["distance"], abs=1e-5)
    assert found.facts["distance"] <= 0.01
    assert found.facts["divergence"] > 0.05


def test_not_any_other_weights_would_do() -> None:
    """Of these that look at one key alone each moves the answer further than the bound allows."""
    for key in range(7):
        assert moved("grouped", 1, np.eye(7)[[key] * 4], -1) > 0.02


def test_the_search_is_the_same_every_time_and_a_tighter_bound_goes_less_far() -> None:
    one = reading("grouped")
    first, again = (adversarial_attention(one, 1, steps=60) for _ in range(2))
    assert np.array_equal(first.values, again.values)
    tight = adversarial_attention(one, 1, steps=60, most=0.001)
    assert tight.facts["distance"] <= 0.001
    assert tight.facts["divergence"] < first.facts["divergence"]


def test_the_divergence_is_that_of_jensen_and_shannon() -> None:
    a, b = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert jensen_shannon(a, b).tolist() == pytest.approx([math.log(2), 0])
    p, q = torch.tensor([0.7, 0.3]), torch.tensor([0.2, 0.8])
    m = (p + q) / 2
    expected = sum(0.5 * float(x * (x / y).log()) for x, y in zip([*p, *q], [*m, *m], strict=True))
    assert float(jensen_shannon(p, q)) == pytest.approx(expected)


def test_weights_change_places_among_the_keys_that_are_seen() -> None:
    own = torch.tensor([[0.5, 0.3, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0]])
    chance = torch.Generator().manual_seed(1)
    orders = [permuted(chance, own) for _ in range(20)]
    for other in orders:
        assert sorted(other[0].tolist()) == sorted(own[0].tolist())
        assert other[0, 3] == 0 and other[1].tolist() == own[1].tolist()
    assert len({tuple(other[0].tolist()) for other in orders}) == 6


def test_each_draw_moves_the_answer_as_the_same_weights_put_there_do() -> None:
    found = permuted_attention(reading("grouped"), place=3, draws=2, seed=4)
    own = tapped("grouped", [])[0][0, 3].softmax(-1)
    for layer in (0, 1):
        chance = torch.Generator().manual_seed(4)
        for draw in range(2):
            point = f"layers.{layer}.attention.weights"
            logits, _ = tapped("grouped", {point: lambda w, chance=chance: permuted(chance, w)})  # type: ignore[misc]
            distance = float((logits[0, 3].softmax(-1) - own).abs().sum() / 2)
            assert float(found.at(layer=layer, draw=draw)) == pytest.approx(distance, abs=1e-6)
            assert distance > 1e-3
    one_token = permuted_attention(Reading(network("grouped"), TOKENS[:, :1]))
    assert (one_token.values < 1e-6).all()  # there is one order of one key


def test_what_cannot_be_asked_is_refused() -> None:
    one = reading("grouped")
    with pytest.raises(RequestError, match="Layer 2 has no attention"):
        adversarial_attention(one, 2)
    with pytest.raises(RequestError, match="above 0 and below 1"):
        adversarial_attention(one, 1, most=0)
    with pytest.raises(RequestError, match="9 is not on the axis"):
        permuted_attention(one, place=9)
    with pytest.raises(UnsupportedError, match="gives no answer for a token"):
        adversarial_attention(Reading(network("encoder-only"), TOKENS), 0)
