"""Luong's attention against its equations written out for one sentence, and where it is easily wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.errors import RequestError
from qkv.lineage.luong import (
    WITH_DROPOUT,
    Global,
    LocalMonotonic,
    LocalPredictive,
    Luong,
    Sizes,
    Training,
    backwards,
)
from qkv.lineage.translation import beam_search, greedy
from qkv.spec import Concat, Dot, General, Location, Node
from tests.support import assert_close

SIZES = Sizes(source_vocab=11, target_vocab=9, hidden=5, embedding=4, layers=2, window=1)
SOURCE = torch.tensor([[3, 4, 5, 6, 1], [7, 8, 0, 0, 0], [9, 1, 2, 0, 0]])
LENGTHS = (5, 2, 3)
PRESENT = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
TARGET = torch.tensor([[0, 2, 3, 4, 5, 2], [0, 6, 7, 1, 1, 1], [0, 8, 1, 1, 1, 1]])
SCORES = pytest.mark.parametrize("score", [Dot(), General(), Concat(7), Location(6)], ids=str)
LOOKING = pytest.mark.parametrize("looking", [Global, LocalMonotonic, LocalPredictive])
FEEDING = pytest.mark.parametrize("feeding", [True, False], ids=["fed", "not fed"])


def filled(model: Any, std: float = 0.5) -> Any:
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=std)
    return model


def paper_lstm(layers: nn.LSTM, x: Tensor, state: list[Any]) -> tuple[Tensor, list[Any]]:
    """Zaremba et al. 2014, equations of section 3, a layer at a time."""
    after = []
    for k, (h, c) in enumerate(state):
        into, own, bias = (getattr(layers, f"{name}_l{k}") for name in ("weight_ih", "weight_hh", "bias_ih"))
        i, f, g, o = (into @ x + own @ h + bias).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        x = torch.sigmoid(o) * torch.tanh(c)
        after.append((x, c))
    return x, after


def paper_score(module: Any, node: Node, h: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Equation 8, and the location-based one before it."""
    if isinstance(node, Dot):
        return [h @ s for s in states]
    if isinstance(node, General):
        return [h @ (module.key.weight @ s) for s in states]
    if isinstance(node, Concat):
        hidden, v = module.hidden.weight, module.output.weight[0]
        return [v @ torch.tanh(hidden @ torch.cat([h, s])) for s in states]
    return list((module.query.weight @ h)[: len(states)])


def paper_weights(model: Any, h: Tensor, t: int, states: list[Tensor]) -> Tensor:
    """Section 3.2: softmax over the window alone, then the Gaussian, and nothing after it."""
    looking, size = model.looking, len(states)
    centre, factor = None, torch.ones(size)
    if isinstance(looking, LocalMonotonic):
        centre = float(t)
    if isinstance(looking, LocalPredictive):
        v, hidden = looking.output.weight[0], looking.hidden.weight
        centre = size * torch.sigmoid(v @ torch.tanh(hidden @ h)).item()
        factor = torch.exp(-((torch.arange(size) - centre) ** 2) / (2 * (SIZES.window / 2) ** 2))
    scores = paper_score(model.score, model.sizes.score, h, states)
    inside = [s for s in range(size) if centre is None or abs(s - centre) <= SIZES.window]
    weights = torch.zeros(size)
    if inside:
        weights[inside] = torch.stack([scores[s] for s in inside]).softmax(0)
    return weights * factor


def paper(model: Any, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
    state = [(torch.zeros(SIZES.hidden),) * 2 for _ in range(SIZES.layers)]
    states = []
    for word in source:
        top, state = paper_lstm(model.encoder, model.source_embedding.weight[word], state)
        states.append(top)
    fed, logits, alignment = torch.zeros(SIZES.hidden), [], []
    for t, word in enumerate(target):
        x = model.target_embedding.weight[word]
        h, state = paper_lstm(model.decoder, torch.cat([x, fed]) if model.sizes.feeding else x, state)
        weights = paper_weights(model, h, t, states)
        context = sum(w * s for w, s in zip(weights, states, strict=True))
        fed = torch.tanh(model.combine.weight @ torch.cat([context, h]))
        logits.append(model.output.weight @ fed)
        alignment.append(weights)
    return torch.stack(logits), torch.stack(alignment)


@SCORES
@LOOKING
@FEEDING
@torch.no_grad()
def test_it_is_the_papers_equations(score: Node, looking: Any, feeding: bool) -> None:
    """The query is the current top state; h~_{t-1}, zero at first, is read with the next word."""
    model = filled(Luong(replace(SIZES, score=score, feeding=feeding), looking))
    logits, weights = model(SOURCE, PRESENT, TARGET), model.alignment(SOURCE, PRESENT, TARGET)
    for i, length in enumerate(LENGTHS):
        expected, alignment = paper(model, SOURCE[i, :length].tolist(), TARGET[i].tolist())
        assert_close(logits[i], expected)
        assert_close(weights[i, :, :length], alignment)
        assert not weights[i, :, length:].any()


@SCORES
@LOOKING
@FEEDING
@torch.no_grad()
def test_token_by_token_equals_teacher_forcing(score: Node, looking: Any, feeding: bool) -> None:
    model = filled(Luong(replace(SIZES, score=score, feeding=feeding), looking))
    state, steps = model.begin(SOURCE, PRESENT), []
    for tokens in TARGET.unbind(1):
        logits, state = model.next(state, tokens)
        steps.append(logits)
    assert_close(torch.stack(steps, 1), model(SOURCE, PRESENT, TARGET))


@LOOKING
@pytest.mark.parametrize("there", [[5, 6, 7], [0, 1, 2], [0, 2, 5]], ids=["left", "right", "between"])
@torch.no_grad()
def test_padding_changes_nothing(looking: Any, there: list[int]) -> None:
    """Whatever stands there, and although places are counted: also where scores go by place alone."""
    for score in (General(), Location(3)):
        model = filled(Luong(replace(SIZES, score=score), looking))
        source, present = torch.full((1, 8), 99), torch.zeros(1, 8, dtype=torch.bool)
        source[0, there], present[0, there] = SOURCE[0, :3], True
        alone = SOURCE[:1, :3], PRESENT[:1, :3], TARGET[:1]
        assert_close(model(source, present, TARGET[:1]), model(*alone))
        weights = model.alignment(source, present, TARGET[:1])
        assert_close(weights[..., there], model.alignment(*alone))
        assert not weights[:, :, ~present[0]].any()


@FEEDING
def test_a_search_runs_over_its_states(feeding: bool) -> None:
    model = filled(Luong(replace(SIZES, feeding=feeding)))
    one = beam_search(model, SOURCE, PRESENT, 0, 1, most=5, beams=1, penalty=0.0)
    assert [found[0].tokens for found in one] == greedy(model, SOURCE, PRESENT, 0, 1, 5)
    for i, found in enumerate(beam_search(model, SOURCE, PRESENT, 0, 1, most=5, beams=3)):
        tokens = [0, *found[0].tokens, 1][: 1 + 5]
        logits = model(SOURCE[i : i + 1], PRESENT[i : i + 1], torch.tensor([tokens]))
        total = logits[0].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].sum()
        assert_close(torch.tensor(found[0].total), total)


# --- scores -----------------------------------------------------------------------------------


@LOOKING
@torch.no_grad()
def test_general_with_an_identity_is_dot(looking: Any) -> None:
    general, dot = (filled(Luong(replace(SIZES, score=score), looking)) for score in (General(), Dot()))
    general.score.key.weight.copy_(torch.eye(SIZES.hidden))
    dot.load_state_dict({k: v for k, v in general.state_dict().items() if not k.startswith("score.")})
    assert_close(general(SOURCE, PRESENT, TARGET), dot(SOURCE, PRESENT, TARGET))


@torch.no_grad()
def test_scores_by_place_reach_as_far_as_they_have_rows() -> None:
    """A row longer than that is refused; empty columns behind it are not places."""
    model = filled(Luong(replace(SIZES, score=Location(3)), Global))
    short = SOURCE[1:], PRESENT[1:], TARGET[1:]
    assert model(*short).shape == (2, 6, 9)
    with pytest.raises(RequestError, match="reach 3 places, and there are 5"):
        model(SOURCE, PRESENT, TARGET)


@torch.no_grad()
def test_global_attention_knows_no_place_and_local_attention_does() -> None:
    """Annotations in another order give the same mixture where all are seen, and another in a window."""
    for looking, same in ((Global, True), (LocalMonotonic, False), (LocalPredictive, False)):
        model = filled(Luong(SIZES, looking))
        state = model.begin(SOURCE[:1], PRESENT[:1])
        order = torch.tensor([4, 2, 0, 1, 3])
        values, prepared, present = state.memory
        other = state._replace(memory=(values[:, order], prepared[:, order], present))
        first, second = (model.next(s, TARGET[:1, 0])[0] for s in (state, other))
        assert bool((first - second).abs().max() < 1e-5) is same


# --- windows ----------------------------------------------------------------------------------


def predicting(place: float, size: int, window: int, deviation: float | None = None) -> Any:
    """local-p whose W and v make of a state of ones this place among `size` words."""
    looking = LocalPredictive(replace(SIZES, hidden=1, window=window, deviation=deviation))
    with torch.no_grad():
        looking.hidden.weight.fill_(50.0)
        looking.output.weight.fill_(torch.logit(torch.tensor(place / size)))
    return looking(torch.ones(1, 1, 1), torch.zeros(1, 1).long(), torch.ones(1, size, dtype=torch.bool))


@torch.no_grad()
def test_the_gaussian_of_ten_words_around_place_four_point_three() -> None:
    visible, factor = predicting(4.3, 10, window=2)
    assert visible[0, 0].nonzero()[:, 0].tolist() == [3, 4, 5, 6]
    expected = torch.tensor([0.429557, 0.955997, 0.782705, 0.235746])
    assert (factor[0, 0, 3:7] - expected).abs().max() < 1e-5


@torch.no_grad()
def test_a_window_of_all_and_a_flat_gaussian_is_global_attention() -> None:
    """D >= S and sigma without bound."""
    local = filled(Luong(replace(SIZES, window=5, deviation=1e6), LocalPredictive))
    everywhere = Luong(SIZES, Global)
    everywhere.load_state_dict({k: v for k, v in local.state_dict().items() if not k.startswith("looking.")})
    assert_close(local(SOURCE, PRESENT, TARGET), everywhere(SOURCE, PRESENT, TARGET))


@torch.no_grad()
def test_the_gaussian_comes_after_the_softmax_and_nothing_makes_up_for_it() -> None:
    """Weights are at most those of the window, by the factor at each place: their sum is below 1."""
    flat = filled(Luong(replace(SIZES, window=2, deviation=1e6, feeding=False)))
    model = Luong(replace(SIZES, window=2, feeding=False))
    model.load_state_dict(flat.state_dict())
    weights, window = (m.alignment(SOURCE, PRESENT, TARGET) for m in (model, flat))
    assert_close(window.sum(-1), torch.ones(3, 6))
    assert weights.sum(-1).max() < 1 and weights.sum(-1).min() > 0
    ratio = weights[window > 0] / window[window > 0]
    assert ratio.max() <= 1 and ratio.min() >= torch.tensor(-2.0).exp() - 1e-6  # two deviations away


def test_the_place_is_real_and_learns_through_the_gaussian_alone() -> None:
    """The slope of the logits in v agrees with differences while the window stays; a flat factor has none."""
    model = filled(Luong(replace(SIZES, window=2, feeding=False))).double()
    probe = torch.randn(3, 6, 9, dtype=torch.float64)

    def value() -> Tensor:
        return (model(SOURCE, PRESENT, TARGET) * probe).sum()

    value().backward()
    weight = model.looking.output.weight
    with torch.no_grad():
        for k in range(SIZES.hidden):
            step = torch.zeros_like(weight)
            step[0, k] = 1e-6
            weight += step
            above = value()
            weight -= 2 * step
            below = value()
            weight += step
            assert abs((above - below) / 2e-6 - weight.grad[0, k]) < 1e-5
    assert weight.grad.abs().min() > 1e-4 and model.looking.hidden.weight.grad.abs().max() > 1e-4
    flat = filled(Luong(replace(SIZES, window=5, deviation=1e9, feeding=False)))
    flat(SOURCE, PRESENT, TARGET).sum().backward()
    assert flat.looking.output.weight.grad.abs().max() < 1e-12


def test_local_m_looks_at_place_t_and_past_the_end_at_nothing() -> None:
    """Two words, D = 1: three steps see something; after that the mixture is 0, and gradients are finite."""
    model = filled(Luong(SIZES, LocalMonotonic))
    weights = model.alignment(SOURCE, PRESENT, TARGET)
    seen = [[0, 1], [0, 1], [1], [], [], []]
    assert [row.nonzero()[:, 0].tolist() for row in weights[1]] == seen
    assert [row.nonzero()[:, 0].tolist() for row in weights[0]][:3] == [[0, 1], [0, 1, 2], [1, 2, 3]]
    assert_close(weights[0].sum(-1), torch.ones(6))  # no Gaussian
    model(SOURCE, PRESENT, TARGET).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)


# --- data, sizes, training --------------------------------------------------------------------


def test_a_source_is_reversed_where_its_words_are() -> None:
    present = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [0, 0, 0, 0, 0]]) == 1
    source = torch.tensor([[1, 2, 3, 0, 0], [8, 9, 1, 2, 3], [1, 8, 2, 9, 3], [1, 2, 3, 4, 5]])
    there = [[3, 2, 1, 0, 0], [8, 9, 3, 2, 1], [3, 8, 2, 9, 1], [1, 2, 3, 4, 5]]
    assert backwards(source, present).tolist() == there
    assert torch.equal(backwards(backwards(source, present), present), source)


@pytest.mark.parametrize(
    ("training", "rates"),
    [
        (Training(), [1, 1, 1, 1, 1, 0.5, 0.25, 0.125, 0.0625, 0.03125]),
        (WITH_DROPOUT, [1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.25, 0.125, 0.0625]),
    ],
    ids=["plain", "dropout"],
)
def test_the_rate_halves_with_each_epoch_after_five_or_eight(training: Training, rates: list[float]) -> None:
    assert [training.rate(epoch) for epoch in range(1, training.epochs + 1)] == rates
    assert (training.batch, training.clip) == (128, 5.0)
    parameter = nn.Parameter(torch.zeros(2))
    optimiser = training.optimiser([parameter], epoch=training.epochs)
    assert type(optimiser) is torch.optim.SGD
    assert (optimiser.defaults["lr"], optimiser.defaults["momentum"]) == (rates[-1], 0)
    parameter.grad = torch.tensor([6.0, 8.0])
    assert training.clipped([parameter]).item() == 10.0
    assert_close(parameter.grad, torch.tensor([3.0, 4.0]))


def test_all_begins_uniform_and_a_gate_has_one_bias() -> None:
    model = Luong(Sizes(60, 50, hidden=40, embedding=30, layers=2))
    for name, parameter in model.named_parameters():
        if "bias_hh" in name:
            assert not parameter.requires_grad and not parameter.any()
        else:
            assert parameter.requires_grad and 0.08 < parameter.abs().max() <= 0.1
            assert abs(parameter.mean()) < 0.3 / parameter.numel() ** 0.5


def test_the_size_of_the_papers_system() -> None:
    """50,000 words, 4 layers of 1000: embeddings, stacks, general scores, W_c, W_s, and local-p's W and v."""
    n, words = 1000, 50_000
    with torch.device("meta"):
        models = {each: Luong(looking=each) for each in (Global, LocalMonotonic, LocalPredictive)}
    layer = 4 * n * 2 * n + 4 * n
    common = 2 * words * n + 4 * layer + 4 * layer + 4 * n * n + n * n + 2 * n * n + words * n
    more = {Global: 0, LocalMonotonic: 0, LocalPredictive: n * n + n}
    for looking, model in models.items():
        count = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert count == common + more[looking]
    assert (Sizes().window, models[LocalPredictive].looking.deviation) == (10, 5.0)


def test_dropout_is_of_training_alone_and_leaves_the_steps_alone() -> None:
    """All dropped on the way up: nothing reaches the words, while the recurrence itself goes on."""
    model = filled(Luong(replace(SIZES, dropout=0.5)))
    once, again = model(SOURCE, PRESENT, TARGET), model(SOURCE, PRESENT, TARGET)
    assert not torch.allclose(once, again)
    model.eval()
    plain = Luong(SIZES)
    plain.load_state_dict(model.state_dict())
    assert_close(model(SOURCE, PRESENT, TARGET), plain(SOURCE, PRESENT, TARGET))
    all_dropped = filled(Luong(replace(SIZES, dropout=1.0)))
    state = all_dropped.begin(SOURCE, PRESENT)
    assert not state.memory[0].any() and state.cell.abs().min() > 0
    assert not all_dropped(SOURCE, PRESENT, TARGET).any()
    # neither stack reads its words, nor a layer the one below
    other = all_dropped.begin((SOURCE + 1) % 11, PRESENT)
    assert torch.equal(state.cell, other.cell)
    first, second = (all_dropped.next(state, TARGET[:, place])[1].cell for place in (0, 1))
    assert torch.equal(first, second)
    nn.init.normal_(all_dropped.encoder.bias_ih_l0)
    other = all_dropped.begin(SOURCE, PRESENT)
    assert not torch.allclose(state.cell[:, 0], other.cell[:, 0])
    assert torch.equal(state.cell[:, 1], other.cell[:, 1])


@LOOKING
def test_a_source_without_words_is_survived(looking: Any) -> None:
    model = filled(Luong(SIZES, looking))
    present = PRESENT.clone()
    present[1] = False
    model(SOURCE, present, TARGET).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)
    assert not model.alignment(SOURCE, present, TARGET)[1].any()
