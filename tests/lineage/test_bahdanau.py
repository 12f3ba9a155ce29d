"""RNNsearch against its equations written out for one sentence, and every way it is easily got wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.lineage.bahdanau import GRU, Last, RNNsearch, Search, Sizes, Training, rnn_encdec
from qkv.lineage.translation import beam_search, greedy, negative_log_likelihood
from tests.support import assert_close

SIZES = Sizes(source_vocab=11, target_vocab=9, hidden=5, embedding=4, maxout=3, alignment=6)
SOURCE = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0], [9, 1, 2, 0]])
PRESENT = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]]) == 1
TARGET = torch.tensor([[0, 2, 3, 4, 5], [0, 6, 7, 1, 1], [0, 8, 1, 1, 1]])
BOTH = pytest.mark.parametrize("context", [Search, Last], ids=["search", "encdec"])


def filled(model: Any, std: float = 0.5) -> Any:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def paper_gru(unit: Any, state: Tensor, inputs: Tensor) -> Tensor:
    """Appendix A.1.1, a matrix at a time."""
    (u_z, u_r), u = unit.gates.weight.chunk(2), unit.proposal.weight
    in_z, in_r, in_s = inputs.chunk(3)
    z = torch.sigmoid(in_z + u_z @ state)
    r = torch.sigmoid(in_r + u_r @ state)
    proposal = torch.tanh(in_s + u @ (r * state))
    return (1 - z) * state + z * proposal


def paper_annotations(encoder: Any, source: list[int]) -> Tensor:
    words = [encoder.embedding.weight[word] for word in source]
    ahead, back, state = [], [], torch.zeros(SIZES.hidden)
    for word in words:
        state = paper_gru(encoder.ahead.unit, state, encoder.ahead.inputs(word))
        ahead.append(state)
    state = torch.zeros(SIZES.hidden)
    for word in reversed(words):
        state = paper_gru(encoder.back.unit, state, encoder.back.inputs(word))
        back.insert(0, state)
    return torch.stack([torch.cat(pair) for pair in zip(ahead, back, strict=True)])


def paper_logits(model: Any, source: list[int], target: list[int]) -> tuple[Tensor, Tensor]:
    """Appendix A for one sentence: logits after each target word, and the alignment."""
    annotations = paper_annotations(model.encoder, source)
    score = model.context.score
    state = torch.tanh(model.start.weight @ annotations[0, SIZES.hidden :] + model.start.bias)
    logits, weights = [], []
    for token in target:
        word = model.embedding.weight[token]
        e = [
            score.output.weight[0] @ torch.tanh(score.query.weight @ state + score.key.weight @ h)
            for h in annotations
        ]
        a = torch.stack(e).softmax(0)
        context = sum(w * h for w, h in zip(a, annotations, strict=True))
        t = model.from_state.weight @ state + model.from_state.bias
        t = t + model.from_word.weight @ word + model.from_context.weight @ context
        t = torch.stack([max(t[2 * k], t[2 * k + 1]) for k in range(SIZES.maxout)])
        logits.append(model.output.weight @ t + model.output.bias)
        weights.append(a)
        inputs = model.inputs.weight @ word + model.inputs.bias + model.mixed.weight @ context
        state = paper_gru(model.unit, state, inputs)
    return torch.stack(logits), torch.stack(weights)


@torch.no_grad()
def test_it_is_the_papers_equations() -> None:
    """Queries and the readout from s_{i-1}, s_0 from the backward state at word 1, neighbours maxed."""
    model = filled(RNNsearch(SIZES))
    logits, weights = model(SOURCE, PRESENT, TARGET), model.alignment(SOURCE, PRESENT, TARGET)
    for i, length in enumerate((4, 2, 3)):
        expected, alignment = paper_logits(model, SOURCE[i, :length].tolist(), TARGET[i].tolist())
        assert_close(logits[i], expected)
        assert_close(weights[i, :, :length], alignment)
        assert not weights[i, :, length:].any()


@BOTH
@pytest.mark.parametrize("side", ["left", "right", "between"])
@torch.no_grad()
def test_padding_changes_nothing(context: Any, side: str) -> None:
    """Whatever stands there: it is hidden before the softmax, and no state walks over it."""
    model = filled(RNNsearch(SIZES, context))
    there = {"left": [3, 4, 5], "right": [0, 1, 2], "between": [0, 2, 5]}[side]
    source = torch.full((1, 6), 99)
    source[0, there] = SOURCE[0, :3]
    present = torch.zeros(1, 6, dtype=torch.bool)
    present[0, there] = True
    alone = SOURCE[:1, :3], PRESENT[:1, :3], TARGET[:1]
    assert_close(model(source, present, TARGET[:1]), model(*alone))
    weights = model.alignment(source, present, TARGET[:1])
    assert_close(weights[..., there], model.alignment(*alone))
    assert not weights[:, :, ~present[0]].any()


@BOTH
@torch.no_grad()
def test_token_by_token_equals_teacher_forcing(context: Any) -> None:
    model = filled(RNNsearch(SIZES, context))
    state, steps = model.begin(SOURCE, PRESENT), []
    for tokens in TARGET.unbind(1):
        logits, state = model.next(state, tokens)
        steps.append(logits)
    assert_close(torch.stack(steps, 1), model(SOURCE, PRESENT, TARGET))


@BOTH
def test_a_search_runs_over_its_states(context: Any) -> None:
    model = filled(RNNsearch(SIZES, context))
    one = beam_search(model, SOURCE, PRESENT, 0, 1, most=5, beams=1, penalty=0.0)
    assert [found[0].tokens for found in one] == greedy(model, SOURCE, PRESENT, 0, 1, 5)
    for i, found in enumerate(beam_search(model, SOURCE, PRESENT, 0, 1, most=5, beams=3)):
        tokens = [0, *found[0].tokens, 1][: 1 + 5]
        logits = model(SOURCE[i : i + 1], PRESENT[i : i + 1], torch.tensor([tokens]))
        total = logits[0].log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].sum()
        assert_close(torch.tensor(found[0].total), total)


@torch.no_grad()
def test_a_word_is_not_seen_before_it_is_said() -> None:
    model, changed = filled(RNNsearch(SIZES)), TARGET.clone()
    changed[:, 3:] = 5
    first, second = model(SOURCE, PRESENT, TARGET), model(SOURCE, PRESENT, changed)
    assert torch.equal(first[:, :3], second[:, :3]) and not torch.allclose(first[:, 3], second[:, 3])


@torch.no_grad()
def test_at_the_papers_initialisation_it_looks_everywhere_alike() -> None:
    """v is 0, so that the weights are 1/T exactly, also beside padding."""
    weights = RNNsearch(SIZES).alignment(SOURCE, PRESENT, TARGET)
    for i, length in enumerate((4, 2, 3)):
        assert torch.equal(weights[i, :, :length], torch.full((5, length), 1 / length))


def test_from_there_the_search_begins_to_learn() -> None:
    """W_a and U_a get no gradient through a v of 0; v gets one, and it is the only one that must."""
    model = RNNsearch(SIZES)
    filled(model.encoder)
    present = torch.ones_like(TARGET) == 1
    negative_log_likelihood(model(SOURCE, PRESENT, TARGET), TARGET, present).backward()
    score = model.context.score
    assert score.output.weight.grad.abs().max() > 0
    assert not score.query.weight.grad.any() and not score.key.weight.grad.any()


def test_the_attention_has_three_million_and_a_thousand_parameters() -> None:
    """n'n + 2n'n + n' at the paper's size; in all 30,000-word vocabularies, decoder and encoder added up."""
    n, m, maxout, words = 1000, 620, 500, 30_000
    with torch.device("meta"):
        model, baseline = RNNsearch(), rnn_encdec()
    assert sum(p.numel() for p in model.context.parameters()) == 3_001_000
    assert list(baseline.context.parameters()) == []
    reader = 3 * n * m + 3 * n + 3 * n * n
    shared = 2 * words * m + 2 * reader + (n * n + n) + reader  # W_s, and the decoder's own
    shared += 2 * maxout * (n + 1) + 2 * maxout * m + words * maxout + words  # the readout
    assert sum(p.numel() for p in model.parameters()) == shared + 2 * n * (3 * n + 2 * maxout) + 3_001_000
    assert sum(p.numel() for p in baseline.parameters()) == shared + n * (3 * n + 2 * maxout)


@torch.no_grad()
def test_looking_at_the_last_forward_state_alone_is_the_encoder_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All weight on the last word, and the backward half of what it gives unread."""
    model, baseline = filled(RNNsearch(SIZES)), rnn_encdec(SIZES)
    for part in (model.mixed, model.from_context):
        part.weight[:, SIZES.hidden :] = 0
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("context.")}
    for name in ("mixed.weight", "from_context.weight"):
        weights[name] = weights[name][:, : SIZES.hidden]
    baseline.load_state_dict(weights)
    lengths = PRESENT.sum(1)
    assert not torch.allclose(model(SOURCE, PRESENT, TARGET), baseline(SOURCE, PRESENT, TARGET), atol=1e-3)

    def forced(queries: Tensor, prepared: Tensor) -> Tensor:
        scores = torch.full((len(lengths), 1, prepared.shape[1]), float("-inf"))
        scores[torch.arange(len(lengths)), 0, lengths - 1] = 0.0
        return scores

    monkeypatch.setattr(model.context.score, "forward", forced)
    assert_close(model(SOURCE, PRESENT, TARGET), baseline(SOURCE, PRESENT, TARGET))
    assert torch.equal(model.alignment(SOURCE, PRESENT, TARGET), baseline.alignment(SOURCE, PRESENT, TARGET))


@torch.no_grad()
def test_the_unit_is_torchs_with_the_gate_turned_around_and_the_reset_elsewhere() -> None:
    """Torch's z is our 1 - z. Without a recurrent proposal that is all; one tells them apart."""
    ours, theirs = filled(GRU(4)), nn.GRUCell(4, 4)
    state, inputs = torch.randn(3, 4), torch.randn(3, 12)
    (u_z, u_r), u = ours.gates.weight.chunk(2), ours.proposal.weight
    z, r, s = inputs.chunk(3, -1)

    def torchs() -> Tensor:
        """With its input map an identity, once for each gate."""
        theirs.bias_ih.zero_(), theirs.bias_hh.zero_(), theirs.weight_ih.zero_()
        theirs.weight_hh.copy_(torch.cat([u_r, -u_z, u]))
        rows = []
        for i in range(3):
            theirs.bias_ih.copy_(torch.cat([r[i], -z[i], s[i]]))
            rows.append(theirs(torch.zeros(1, 4), state[i : i + 1])[0])
        return torch.stack(rows)

    assert (ours(state, inputs) - torchs()).abs().max() > 0.01
    u.zero_()
    assert_close(ours(state, inputs), torchs())


@torch.no_grad()
def test_what_the_keys_give_is_made_once_for_a_source() -> None:
    model, calls = filled(RNNsearch(SIZES)), []
    model.context.score.key.register_forward_hook(lambda *_: calls.append(1))
    model(SOURCE, PRESENT, TARGET)
    assert calls == [1]
    state = model.begin(SOURCE, PRESENT)
    for tokens in TARGET.unbind(1):
        _, state = model.next(state, tokens)
    assert calls == [1, 1]


def test_it_begins_as_in_the_paper() -> None:
    model = RNNsearch(Sizes(400, 300, hidden=60, embedding=50, maxout=40, alignment=70))
    for unit in (model.unit, model.encoder.ahead.unit, model.encoder.back.unit):
        for matrix in (*unit.gates.weight.chunk(2), unit.proposal.weight):
            assert_close(matrix @ matrix.T, torch.eye(60), 1e-5)
    score = model.context.score
    small = {id(score.query.weight): 0.001, id(score.key.weight): 0.001}
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter is score.output.weight:
            assert not parameter.any(), name
        elif ".gates." not in f".{name}" and ".proposal." not in f".{name}":
            std = small.get(id(parameter), 0.01)
            assert abs(parameter.std().item() / std - 1) < 0.05, name
            assert abs(parameter.mean().item()) < 5 * std / parameter.numel() ** 0.5, name


def test_it_trains_as_in_the_paper() -> None:
    assert (Training().batch, Training().clip) == (80, 1.0)
    parameter = nn.Parameter(torch.zeros(2))
    optimiser = Training().optimiser([parameter])
    assert type(optimiser) is torch.optim.Adadelta
    assert {k: optimiser.defaults[k] for k in ("lr", "rho", "eps", "weight_decay")} == {
        "lr": 1.0, "rho": 0.95, "eps": 1e-6, "weight_decay": 0,
    }  # fmt: skip
    parameter.grad = torch.tensor([3.0, 4.0])
    assert Training().clipped([parameter]).item() == 5.0
    assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    parameter.grad = torch.tensor([0.3, 0.4])
    Training().clipped([parameter])
    assert parameter.grad.tolist() == [0.30000001192092896, 0.4000000059604645]


@BOTH
def test_a_source_without_words_is_survived(context: Any) -> None:
    """Nothing to look at gives zeros, and finite gradients."""
    model = filled(RNNsearch(SIZES, context))
    present = PRESENT.clone()
    present[1] = False
    model(SOURCE, present, TARGET).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    if context is Search:
        assert not model.alignment(SOURCE, present, TARGET)[1].any()
