"""What is asked of an answer."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.errors import RequestError
from qkv.explanation import (
    Difference,
    Less,
    Logit,
    LogProbability,
    Loss,
    Probability,
    Reading,
    Similarity,
)
from tests.explanation.cases import TOKENS, network, reading

LOGITS = torch.tensor([[[0.0, math.log(3.0), 0.0]]])  # probabilities 1/5, 3/5, 1/5


def test_one_answer_is_read_in_the_unit_that_is_asked_for() -> None:
    assert Logit(1)(LOGITS).tolist() == pytest.approx([math.log(3)])
    assert Probability(1)(LOGITS).tolist() == pytest.approx([0.6])
    assert LogProbability(0)(LOGITS).tolist() == pytest.approx([math.log(0.2)])


def test_why_one_rather_than_the_other_is_the_difference_of_log_probabilities_too() -> None:
    told = LogProbability(1)(LOGITS) - LogProbability(0)(LOGITS)
    assert Difference(1, against=0)(LOGITS).tolist() == pytest.approx(told.tolist())
    assert Difference(1, against=0)(LOGITS).tolist() == pytest.approx([math.log(3)])
    assert Difference(0, against=1)(LOGITS).tolist() == pytest.approx([-math.log(3)])


def test_a_loss_is_the_mean_over_its_places() -> None:
    logits = torch.cat([LOGITS, LOGITS], 1)
    expected = -(math.log(0.6) + math.log(0.2)) / 2
    assert Loss((1, 2))(logits).tolist() == pytest.approx([expected])
    assert Loss((1, 2), first=3).places == (3, 4)


def test_it_is_read_where_it_is_asked() -> None:
    """Of the model's own answer at that place, whichever places the pass was made for."""
    with torch.no_grad():
        logits = network("grouped")(TOKENS)
    one = reading("grouped")
    for place in (0, 3, -2):
        assert float(one.value(Logit(5, place))) == pytest.approx(float(logits[0, place, 5]), abs=1e-6)
    targets = TOKENS[0, 1:]
    told = logits[0, :-1].log_softmax(-1).gather(-1, targets[:, None]).mean()
    assert float(one.value(Loss(tuple(targets.tolist())))) == pytest.approx(-float(told), abs=1e-6)


def test_what_the_model_does_not_answer_is_refused() -> None:
    one = reading("grouped")
    with pytest.raises(RequestError, match="50 is not one of this model's 50 answers"):
        one.value(Logit(50))
    with pytest.raises(RequestError, match="no place 7 in a prompt of 7 tokens"):
        one.value(Logit(1, 7))
    with pytest.raises(RequestError, match="answers at every token: give the metric a place"):
        one.value(Logit(1, None))
    with pytest.raises(RequestError, match="at least one target"):
        one.value(Loss(()))


def test_a_metric_of_ones_own_is_any_call_with_a_name_and_places() -> None:
    class Entropy:
        name, places = "entropy", (-1,)

        def __call__(self, logits: torch.Tensor) -> torch.Tensor:
            return -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, 0]

    shares = network("grouped")(TOKENS)[0, -1].detach().softmax(-1)
    assert float(Reading(network("grouped"), TOKENS).value(Entropy())) == pytest.approx(
        -float((shares * shares.log()).sum()), abs=1e-5
    )


def test_likeness_is_the_cosine_of_two_vectors() -> None:
    """Of (3, 4) with (1, 0) and with (0, 2): 3/5 and 4/5."""
    vectors = torch.tensor([[[3.0, 4.0]], [[0.0, -2.0]]])
    right, up = Similarity(torch.tensor([1.0, 0.0]), "right"), Similarity(torch.tensor([0.0, 2.0]), "up")
    assert right(vectors).tolist() == pytest.approx([0.6, 0.0])
    assert Less(right, up)(vectors).tolist() == pytest.approx([-0.2, 1.0])
    assert (right.places, Less(right, up).places) == (None, None)
    assert Less(right, up).name == "cosine with 'right' less cosine with 'up'"
    with pytest.raises(RequestError, match="The other text's vector has 2 numbers and this model's 3"):
        right(LOGITS)
    with pytest.raises(RequestError, match="only where they read the same places"):
        reading("grouped").places(Less(Logit(1), Logit(1, 3)))
