"""The training loop and what is measured of a network."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from qkv import spec
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import (
    adam,
    by_bucket,
    cosine,
    exact,
    held_out,
    loss_by_position,
    mean_loss,
    next_token_loss,
    train,
    unigram_entropy,
    warm_up,
    windows,
)
from qkv.errors import RequestError


class Point(nn.Module):
    def __init__(self, *start: float):
        super().__init__()
        self.at = nn.Parameter(torch.tensor(start))


def sgd(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def test_a_step_goes_down_the_gradient_of_the_batch() -> None:
    point = Point(1.0, 2.0)
    curve = train(point, [torch.tensor(3.0)], lambda b: (b * point.at).sum(), 1, sgd(point, 0.1), clip=None)
    assert point.at.tolist() == pytest.approx([0.7, 1.7])
    assert curve.losses == [9.0] and curve.norms == pytest.approx([math.sqrt(18)])
    assert not point.training


def test_the_norm_of_all_gradients_is_bounded_and_told_as_it_was() -> None:
    point = Point(0.0, 0.0)
    slope = torch.tensor([3.0, 4.0])
    curve = train(point, [slope], lambda b: (b * point.at).sum(), 1, sgd(point, 1.0), clip=1.0)
    assert point.at.tolist() == pytest.approx([-0.6, -0.8]) and curve.norms == pytest.approx([5.0])


def test_the_curve_has_means_over_equal_stretches() -> None:
    point = Point(0.0)
    heard: list[tuple[int, int, str]] = []
    curve = train(
        point,
        (torch.tensor(float(i)) for i in itertools.count()),
        lambda batch: batch + 0 * point.at.sum(),
        10,
        points=4,
        told=lambda done, total, note="": heard.append((done, total, note)),
        note="x",
    )
    assert curve.steps == [2, 5, 8, 10] and curve.losses == [0.5, 3.0, 6.0, 8.5]
    assert (curve.last, curve.mean) == (8.5, 4.5)  # of steps 0 to 9, each counting once
    assert heard[-1] == (10, 10, "x, loss 8.500") and len(heard) == 4


def test_a_schedule_is_a_factor_on_the_rate_and_is_gone_afterwards() -> None:
    point = Point(0.0)
    optimiser = sgd(point, 1.0)
    train(
        point, itertools.repeat(1.0), lambda b: b * point.at.sum(), 3, optimiser, schedule=lambda step: step
    )
    assert point.at.item() == pytest.approx(-(1 + 2 + 3)) and optimiser.param_groups[0]["lr"] == 1.0


def test_schedules() -> None:
    warm = warm_up(4, cosine(10, end=0.2))
    assert [warm(step) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert warm(4 + 5) == pytest.approx(0.6) and warm(14) == pytest.approx(0.2) == warm(99)
    assert warm_up(4)(5) == 1.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_diverges_ends_there_and_has_no_last_loss(bad: float) -> None:
    point = Point(1.0)
    losses = [1.0, 1.0, 1.0, bad, 1.0]
    curve = train(point, losses, lambda b: b * point.at.sum(), 5, sgd(point, 0.1), points=5)
    assert (curve.diverged, curve.last, curve.mean) == (4, None, None)
    assert len(curve.losses) == 3 and point.at.item() == pytest.approx(0.7)  # nothing was changed by it
    assert curve.data()["last"] is None and curve.data()["diverged"] == 4


def test_batches_that_end_too_early_are_refused() -> None:
    point = Point(1.0)
    with pytest.raises(RequestError, match="The batches ended at step 3 of 5"):
        train(point, [1.0, 1.0], lambda b: b * point.at.sum(), 5)


def test_decay_spares_vectors() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(1)
    optimiser = adam(model, rate=0.1, decay=0.5)
    (0 * (model.weight.sum() + model.bias.sum())).backward()
    optimiser.step()
    assert model.weight[0, 0].item() == pytest.approx(0.95) and model.bias[0].item() == 1.0


def test_windows_are_stretches_of_the_corpus_all_of_them() -> None:
    rows = next(windows(torch.arange(100), 8, 4000, torch.Generator().manual_seed(0)))
    assert rows.shape == (4000, 9) and bool((rows.diff(dim=1) == 1).all())
    assert (int(rows.min()), int(rows.max())) == (0, 99)
    with pytest.raises(RequestError, match="stretches of 9 need more"):
        next(windows(torch.arange(9), 8, 1, torch.Generator()))


def test_what_is_held_out_is_the_end() -> None:
    assert held_out(torch.arange(20), 3, 2).tolist() == [[12, 13, 14, 15], [16, 17, 18, 19]]
    with pytest.raises(RequestError):
        held_out(torch.arange(7), 3, 2)


def test_losses_are_cross_entropies_of_the_next_token() -> None:
    network = initialised(small_lm(11, layers=1, width=16, heads=2), torch.Generator().manual_seed(0))
    rows = torch.randint(11, (5, 8), generator=torch.Generator().manual_seed(1))
    shares = network(rows[:, :-1]).softmax(-1)
    by_hand = torch.tensor(
        [[-shares[row, place, rows[row, place + 1]].log() for place in range(7)] for row in range(5)]
    )
    assert torch.allclose(loss_by_position(network, rows, batch=2), by_hand.mean(0), atol=1e-5)
    assert mean_loss(network, rows) == pytest.approx(float(by_hand.mean()), abs=1e-5)
    assert float(next_token_loss(network)(rows)) == pytest.approx(float(by_hand.mean()), abs=1e-5)


def test_a_small_model_learns_a_cycle() -> None:
    """An end to end check: after 60 steps the next of 0 1 2 ... 10 0 is nearly certain."""
    network = initialised(
        small_lm(11, layers=1, width=32, heads=2, position=spec.Rotary()), torch.Generator().manual_seed(0)
    )
    corpus = torch.arange(11).repeat(50)
    batches = windows(corpus, 16, 8, torch.Generator().manual_seed(1))
    curve = train(network, batches, next_token_loss(network), 60, adam(network, 1e-2))
    assert curve.losses[0] > 2.0 and curve.losses[-1] < 0.1


def test_exact_rows_and_shares_by_length() -> None:
    predicted = torch.tensor([[1, 2, 3], [1, 2, 9], [1, 9, 9]])
    target = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    counts = torch.tensor([[True] * 3, [True, True, False], [True, True, False]])
    hits: Tensor = exact(predicted, target, counts)
    assert hits.tolist() == [True, True, False]
    assert by_bucket(torch.tensor([3, 2, 2]), hits, [0, 2, 3, 4]) == [None, 0.5, 1.0]


def test_entropy_of_frequencies() -> None:
    assert unigram_entropy(torch.tensor([0, 0, 2, 2])) == pytest.approx(math.log(2))
    assert unigram_entropy(torch.tensor([1, 1, 1])) == 0
