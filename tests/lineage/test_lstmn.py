"""LSTMN (D4, E5): two tapes, attention over strictly earlier tokens, and both fusions with a source."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qkv.errors import RequestError
from qkv.lineage.lstmn import EncoderDecoder, LanguageModel, LSTMNLayer, PairSettings, Settings
from qkv.lineage.translation import beam_search, greedy
from tests.support import assert_close

TINY = Settings(vocab=9, width=4, cell=5, layers=2)
PAIR = PairSettings(vocab=9, target_vocab=8, width=4, cell=5, layers=2)
FEEDBACK = pytest.mark.parametrize("feedback", [True, False], ids=["paper", "released"])
FUSION = pytest.mark.parametrize("fusion", ["shallow", "deep"])


def strong(module: Any) -> Any:
    """Weights large enough that everything shows."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return module


def tokens(length: int, batch: int = 3, vocab: int = 8, seed: int = 1) -> Tensor:
    return torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def everywhere(ids: Tensor) -> Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


# --- one layer --------------------------------------------------------------------------------


def additive(score: Any, query: Tensor, keys: list[Tensor]) -> Tensor:
    """softmax over the keys of v . tanh(W query + U key)."""
    asked, v = score.query.weight @ query, score.output.weight[0]
    return torch.stack([v @ torch.tanh(asked + score.key.weight @ key) for key in keys]).softmax(0)


def gates(layer: LSTMNLayer, x: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    w, b, u = layer.of_input.weight, layer.of_input.bias, layer.of_tape.weight
    i, f, o, new = (w @ x + b + u @ before).chunk(4)
    return i.sigmoid(), f.sigmoid(), o.sigmoid(), new.tanh()


def by_hand(layer: LSTMNLayer, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """One sequence (length, into): the hidden states and the weights of each token, by the equations."""
    h: list[Tensor] = []
    c: list[Tensor] = []
    maps: list[Tensor] = []
    nothing = torch.zeros(layer.cell)
    last = nothing
    for word in x:
        tilde_h, tilde_c, s = nothing, nothing, torch.zeros(0)
        if h:
            query = torch.cat([word, last]) if layer.feedback else word
            s = additive(layer.score, query, h)
            tilde_h = sum((s[i] * h[i] for i in range(len(h))), nothing)
            tilde_c = sum((s[i] * c[i] for i in range(len(h))), nothing)
        i, f, o, new = gates(layer, word, tilde_h)
        c.append(f * tilde_c + i * new)
        h.append(o * torch.tanh(c[-1]))
        maps.append(s)
        last = tilde_h
    return h, maps


@FEEDBACK
def test_a_layer_equals_the_equations(feedback: bool) -> None:
    """D4: the same weights mix hidden and memory tape, over tokens 1 .. t - 1."""
    layer, x = strong(LSTMNLayer(4, 5, feedback)), torch.randn(2, 6, 4)
    hidden, weights, _ = layer(x, torch.ones(2, 6, dtype=torch.bool))
    for row in range(2):
        expected, maps = by_hand(layer, x[row])
        assert_close(hidden[row], torch.stack(expected))
        for t, each in enumerate(maps[1:], 1):
            assert_close(weights[row, t, :t], each)


def test_the_term_of_the_latest_mixture_matters() -> None:
    """D4: the paper has it, the authors' released encoder does not."""
    paper, released = LSTMNLayer(4, 5), LSTMNLayer(4, 5, feedback=False)
    assert paper.score.query.weight.shape == (5, 9) and released.score.query.weight.shape == (5, 4)
    strong(paper)
    state = paper.state_dict()
    state["score.query.weight"] = state["score.query.weight"][:, :4]
    released.load_state_dict(state)
    x, there = torch.randn(1, 5, 4), torch.ones(1, 5, dtype=torch.bool)
    a, b = paper(x, there)[0], released(x, there)[0]
    assert_close(a[:, :2], b[:, :2])  # there is no h~ before the first, and one token to look at after it
    assert (a[:, 3:] - b[:, 3:]).abs().max() > 1e-3


class Latest(nn.Module):
    """A score that leaves nothing but the token before."""

    def prepared(self, keys: Tensor) -> Tensor:
        return keys

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        scores = queries.new_full((len(queries), 1, prepared.shape[1]), float("-inf"))
        scores[..., -1] = 0
        return scores


def test_looking_at_the_token_before_alone_it_is_an_lstm() -> None:
    """D4."""
    layer, x = strong(LSTMNLayer(4, 5)), torch.randn(2, 7, 4)
    layer.score = Latest()
    hidden, weights, _ = layer(x, torch.ones(2, 7, dtype=torch.bool))
    lstm = nn.LSTM(4, 5, batch_first=True)

    def theirs(rows: Tensor) -> Tensor:
        i, f, o, new = rows.chunk(4)
        return torch.cat([i, f, new, o])

    with torch.no_grad():
        lstm.weight_ih_l0.copy_(theirs(layer.of_input.weight))
        lstm.weight_hh_l0.copy_(theirs(layer.of_tape.weight))
        lstm.bias_ih_l0.copy_(theirs(layer.of_input.bias))
        lstm.bias_hh_l0.zero_()
    assert_close(hidden, lstm(x)[0])
    assert weights[0, 4].tolist() == [0, 0, 0, 1, 0, 0, 0]


def test_what_stands_beside_is_added_to_the_memory() -> None:
    layer, x, beside = strong(LSTMNLayer(4, 5)), torch.randn(1, 4), torch.randn(1, 5)
    hidden, _, tape = layer.step(x, layer.begin(x), torch.ones(1, dtype=torch.bool), beside)
    i, _, o, new = gates(layer, x[0], torch.zeros(5))
    memory = i * new + beside[0]
    assert_close(tape.cells[0, 1], torch.cat([o * torch.tanh(memory), memory]))
    assert_close(hidden[0], o * torch.tanh(memory))


# --- the language model -----------------------------------------------------------------------


@FEEDBACK
def test_no_token_sees_itself_or_what_comes_after(feedback: bool) -> None:
    """E5: i = 1 .. t - 1, from left to right. The first token sees nothing at all."""
    model, ids = strong(LanguageModel(replace(TINY, feedback=feedback))), tokens(7)
    weights = model.read(ids).weights
    assert weights.shape == (3, 2, 7, 7)
    assert not weights.triu().any() and bool((weights.tril(-1) > 0).sum() == 3 * 2 * 21)
    assert_close(weights.sum(-1)[:, :, 1:], torch.ones(3, 2, 6))


@FEEDBACK
def test_editing_a_later_token_leaves_earlier_states_unchanged(feedback: bool) -> None:
    """D4."""
    model, ids = strong(LanguageModel(replace(TINY, feedback=feedback))), tokens(7)
    edited = ids.clone()
    edited[:, 4] = (edited[:, 4] + 1) % 8
    before, after = model(ids), model(edited)
    assert torch.equal(before[:, :4], after[:, :4])
    assert ((before - after)[:, 4:].abs().amax(-1) > 1e-4).all()


def test_layers_stand_on_one_another() -> None:
    model, ids = strong(LanguageModel(TINY)), tokens(5)
    first, second = model.reader.layers
    below, _, _ = first(model.embedding(ids), everywhere(ids))
    above, weights, tape = second(below, everywhere(ids))
    found = model.read(ids)
    assert torch.equal(found.hidden, above) and torch.equal(found.weights[:, 1], weights)
    assert torch.equal(found.tapes[1].cells, tape.cells)
    assert_close(model(ids), above @ model.output.weight.T + model.output.bias)


@FEEDBACK
def test_a_language_model_reads_token_by_token(feedback: bool) -> None:
    model, ids = strong(LanguageModel(replace(TINY, feedback=feedback))), tokens(6)
    state, found = model.begin(3), []
    for t in range(6):
        logits, state = model.next(state, ids[:, t])
        found.append(logits)
    assert_close(torch.stack(found, 1), model(ids))
    assert state[0].cells.shape == (3, 7, 10)  # a slot a token, and the one of zeros


@FEEDBACK
@pytest.mark.parametrize("places", [[0, 1], [6, 7], [0, 3, 7]], ids=["left", "right", "both-and-between"])
def test_padding_is_not_read(feedback: bool, places: list[int]) -> None:
    model, ids = strong(LanguageModel(replace(TINY, feedback=feedback))), tokens(8)
    present = everywhere(ids)
    present[:, places] = False
    kept = [t for t in range(8) if t not in places]
    found, expected = model.read(ids, present), model.read(ids[:, kept])
    assert_close(found.hidden[:, kept], expected.hidden)
    assert_close(found.weights[:, :, kept][..., kept], expected.weights)
    assert not found.weights[..., places].any()


def test_losses_are_those_of_the_next_token() -> None:
    model, ids = strong(LanguageModel(TINY)), tokens(5)
    chosen = model(ids).log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert_close(model.losses(ids), -chosen)
    present = everywhere(ids)
    present[1, 3:] = False
    assert_close(model.losses(ids, present)[1], torch.cat([-chosen[1, :2], torch.zeros(2)]))


def test_a_first_token_has_finite_gradients() -> None:
    model = strong(LanguageModel(TINY))
    model(tokens(1)).sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_no_tokens_are_refused() -> None:
    with pytest.raises(RequestError, match=r"both at least 1; got \(2, 0\)"):
        LanguageModel(TINY).read(tokens(0, 2))


def count(make: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make().parameters())


def test_parameters_of_the_papers_size() -> None:
    """One layer of 300 and words of 150: score, gates, and the two tables."""
    score = 300 * (150 + 300) + 300 * 300 + 300
    assert count(lambda: LSTMNLayer(150, 300)) == score + 1200 * 451
    assert count(LanguageModel) == score + 1200 * 451 + 10_000 * 150 + 10_000 * 301
    assert count(lambda: LSTMNLayer(150, 300, feedback=False)) == score - 300 * 300 + 1200 * 451


def test_weights_begin_uniform() -> None:
    torch.manual_seed(0)
    for model in (LanguageModel(replace(TINY, cell=40)), EncoderDecoder(replace(PAIR, cell=40))):
        every = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert float(every.abs().max()) <= 0.05
        assert float(every.std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)


# --- with a source ----------------------------------------------------------------------------


def pair_of(fusion: str, **changes: Any) -> EncoderDecoder:
    return strong(EncoderDecoder(replace(PAIR, fusion=fusion, **changes)))  # type: ignore[no-any-return]


def tapes_of(model: EncoderDecoder, source: Tensor) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Hidden and memory tape of each layer of the encoder, of one sentence (length)."""
    tapes = model.encoder(model.source(source[None]), everywhere(source[None])).tapes
    halves = [tape.cells[0, 1:].chunk(2, -1) for tape in tapes]
    return [(list(h), list(m)) for h, m in halves]


def test_deep_fusion_equals_the_equations() -> None:
    """D4: r gates the source's memory tape into every layer's cell."""
    model, source, target = pair_of("deep"), tokens(6)[0], tokens(5, seed=2)[0]
    read, decoder = tapes_of(model, source), model.decoder
    nothing = torch.zeros(5)
    h: list[list[Tensor]] = [[], []]
    c: list[list[Tensor]] = [[], []]
    last_intra, last_inter = [nothing] * 2, [nothing] * 2
    logits, alignment = [], []
    for token in target:
        x = model.target.weight[token]
        for k, (layer, fusion) in enumerate(zip(decoder.reader.layers, decoder.fusions, strict=True)):
            gamma, alpha = read[k]
            p = additive(fusion.score, torch.cat([x, last_inter[k]]), gamma)
            tilde_gamma = sum((p[j] * gamma[j] for j in range(6)), nothing)
            tilde_alpha = sum((p[j] * alpha[j] for j in range(6)), nothing)
            r = fusion.gate(torch.cat([tilde_gamma, x])).sigmoid()
            tilde_h, tilde_c = nothing, nothing
            if h[k]:
                s = additive(layer.score, torch.cat([x, last_intra[k]]), h[k])
                tilde_h = sum((s[i] * h[k][i] for i in range(len(s))), nothing)
                tilde_c = sum((s[i] * c[k][i] for i in range(len(s))), nothing)
            i_, f, o, new = gates(layer, x, tilde_h)
            c[k].append(r * tilde_alpha + f * tilde_c + i_ * new)
            h[k].append(o * torch.tanh(c[k][-1]))
            last_intra[k], last_inter[k], x = tilde_h, tilde_gamma, h[k][-1]
        logits.append(model.output(x))
        alignment.append(p)
    given = source[None], everywhere(source[None]), target[None]
    assert_close(model(*given)[0], torch.stack(logits))
    assert_close(model.alignment(*given)[0], torch.stack(alignment))


def test_shallow_fusion_is_a_plain_reader_of_word_and_context() -> None:
    """D4: ordinary attention, asked by the state before, over hidden states only."""
    model, source, target = pair_of("shallow"), tokens(6)[0], tokens(5, seed=2)[0]
    hidden, _ = tapes_of(model, source)[-1]
    decoder, before, inputs, alignment = model.decoder, torch.zeros(5), [], []
    for t, token in enumerate(target):
        p = additive(decoder.score, before, hidden)
        context = sum((p[j] * hidden[j] for j in range(6)), torch.zeros(5))
        inputs.append(torch.cat([model.target.weight[token], context]))
        states = decoder.reader(torch.stack(inputs)[None], torch.ones(1, t + 1, dtype=torch.bool)).hidden[0]
        before = states[-1]
        alignment.append(p)
    given = source[None], everywhere(source[None]), target[None]
    assert_close(model(*given)[0], model.output(states))
    assert_close(model.alignment(*given)[0], torch.stack(alignment))


@FUSION
@FEEDBACK
def test_token_by_token_equals_teacher_forcing(fusion: str, feedback: bool) -> None:
    model, source, target = pair_of(fusion, feedback=feedback), tokens(6), tokens(5, seed=2)
    state, found = model.begin(source, everywhere(source)), []
    for t in range(5):
        logits, state = model.next(state, target[:, t])
        found.append(logits)
    assert_close(torch.stack(found, 1), model(source, everywhere(source), target))


@FUSION
@FEEDBACK
def test_a_decoder_keeps_the_term_that_the_released_encoder_leaves_out(fusion: str, feedback: bool) -> None:
    model = pair_of(fusion, feedback=feedback)
    assert [layer.feedback for layer in model.encoder.layers] == [feedback] * 2
    assert [layer.feedback for layer in model.decoder.reader.layers] == [True] * 2


@FUSION
def test_padding_of_the_source_changes_nothing(fusion: str) -> None:
    model, source, target = pair_of(fusion), tokens(6), tokens(5, seed=2)
    expected = model(source, everywhere(source), target)
    for padded, places in ((torch.cat([source, tokens(3)], 1), slice(0, 6)), (tokens(9), slice(3, 9))):
        padded[:, places] = source
        present = torch.zeros_like(padded, dtype=torch.bool)
        present[:, places] = True
        assert_close(model(padded, present, target), expected)
        weights = model.alignment(padded, present, target)
        assert_close(weights[..., places], model.alignment(source, everywhere(source), target))
        assert not weights.masked_fill(present[:, None], 0).any()


@FUSION
def test_the_source_is_read_and_later_targets_are_not(fusion: str) -> None:
    model, source, target = pair_of(fusion), tokens(6), tokens(5, seed=2)
    expected = model(source, everywhere(source), target)
    other = source.clone()
    other[:, 2] = (other[:, 2] + 1) % 8
    assert ((model(other, everywhere(source), target) - expected).abs().amax((1, 2)) > 1e-4).all()
    later = target.clone()
    later[:, 3] = (later[:, 3] + 1) % 7
    found = model(source, everywhere(source), later)
    assert torch.equal(found[:, :3], expected[:, :3]) and not torch.equal(found[:, 3:], expected[:, 3:])


@FUSION
def test_searches_reorder_the_state(fusion: str) -> None:
    """The likeliest of all translations of three tokens, found by trying them all."""
    model, source = pair_of(fusion), tokens(4)
    present = everywhere(source)
    assert greedy(model, source, present, 0, 7, 3) == [
        each[0].tokens for each in beam_search(model, source, present, 0, 7, 3, beams=1, penalty=0.0)
    ]
    found = beam_search(model, source, present, 0, 7, 3, beams=64, penalty=0.0)
    for row in range(3):
        best = max(_ended(model, source[row : row + 1]), key=lambda pair: pair[1])
        assert found[row][0].tokens == best[0]
        assert found[row][0].total == pytest.approx(best[1], abs=1e-4)


def _ended(model: EncoderDecoder, source: Tensor) -> list[tuple[list[int], float]]:
    """Every translation of up to two tokens that ends, by 7, and its log-probability."""
    found = []
    for length in range(3):
        bodies = torch.tensor(list(product(range(7), repeat=length)), dtype=torch.long)
        target = F.pad(F.pad(bodies, (1, 0), value=0), (0, 1), value=7)
        rows = source.expand(len(target), -1)
        logs = model(rows, everywhere(rows), target).log_softmax(-1)
        totals = logs[:, :-1].gather(2, target[:, 1:, None]).sum((1, 2)).tolist()
        found += list(zip(bodies.tolist(), totals, strict=True))
    return found


@FUSION
def test_gradients_reach_every_parameter(fusion: str) -> None:
    model, source = pair_of(fusion), tokens(4)
    model(source, everywhere(source), tokens(3, seed=2)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


# --- it learns --------------------------------------------------------------------------------


@FEEDBACK
def test_learns_to_recall_the_value_of_a_key(feedback: bool) -> None:
    """Two of keys and values, then a key: the last token's loss falls far below that of a guess."""
    torch.set_num_threads(1)  # for so little a second one costs more than it does
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, vocab=8, width=16, cell=32, layers=1, feedback=feedback, init=0.2))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        values, asked = torch.randint(4, 8, (64, 2)), torch.randint(0, 2, (64,))
        keys = torch.stack([torch.zeros_like(asked), torch.ones_like(asked)], 1)
        last = torch.stack([asked, values.gather(1, asked[:, None])[:, 0]], 1)
        ids = torch.cat([keys[:, :1], values[:, :1], keys[:, 1:], values[:, 1:], last], 1)
        loss = model.losses(ids)[:, -1].mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss.item() < 0.1 < torch.log(torch.tensor(2.0))  # of the two values it could be
