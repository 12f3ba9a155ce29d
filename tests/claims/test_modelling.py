"""Language models that differ in one thing: the same text, weights and batches for all."""

from __future__ import annotations

import pytest
import torch

from qkv import spec
from qkv.claims.claim import Run
from qkv.claims.data import Corpus
from qkv.claims.modelling import LENGTH, split, trained
from qkv.claims.models import small_lm
from qkv.claims.training import mean_loss

RUN = Run("some-claim", 0, "smoke")


def corpus() -> Corpus:
    return Corpus("made up", torch.arange(3000) % 7, tuple("abcdefg"))


def test_what_is_held_out_is_the_end_and_is_not_trained_on() -> None:
    text = split(corpus(), 4)
    assert text.rows.shape == (4, LENGTH + 1)
    assert torch.equal(torch.cat([text.before, text.rows.flatten()]), corpus().tokens)
    assert text.unigrams == pytest.approx(torch.tensor(7.0).log().item(), abs=1e-3)


def test_what_is_trained_alike_comes_out_alike_and_is_measured_on_what_is_held_out() -> None:
    text = split(corpus(), 4)
    model = small_lm(7, width=16, heads=2, layers=1, position=spec.Rotary())
    network, first = trained(RUN, "one", model, text, 5)
    _, second = trained(RUN, "another", model, text, 5)
    assert first["curve"]["losses"] == pytest.approx(second["curve"]["losses"], rel=1e-5)
    assert first["held_out"] == pytest.approx(second["held_out"], rel=1e-5)
    assert first["held_out"] == pytest.approx(mean_loss(network, text.rows), rel=1e-5)
    assert first["parameters"] == model.parameters() and first["curve"]["steps"] == [1, 2, 3, 4, 5]


def test_a_training_that_diverges_has_no_loss() -> None:
    text = split(corpus(), 4)
    model = small_lm(7, width=16, heads=2, layers=1, position=spec.Rotary())
    _, found = trained(RUN, "wild", model, text, 5, residual=float("inf"))
    assert found["held_out"] is None and found["curve"]["diverged"] == 1
