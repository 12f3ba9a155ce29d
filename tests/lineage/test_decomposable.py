"""Decomposable Attention (D5, E6): alignment, its order-blindness, masks, counts and settings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qkv.errors import RequestError
from qkv.lineage.decomposable import DecomposableAttention, Judgement, Settings, with_intra
from tests.support import assert_close

TINY = Settings(vocab=11, vectors=7, width=6)
WITH_INTRA = replace(TINY, far=2)
BOTH = pytest.mark.parametrize("settings", [TINY, WITH_INTRA], ids=["vanilla", "intra"])


def random(settings: Settings) -> DecomposableAttention:
    """With weights large enough that everything shows, and no dropout."""
    torch.manual_seed(0)
    model = DecomposableAttention(settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    return model


def pair(premise: int = 5, hypothesis: int = 4, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randint(0, TINY.vocab, (batch, n), generator=generator) for n in (premise, hypothesis)]
    return draw[0], draw[1]


# --- the equations ----------------------------------------------------------------------------


def by_hand(model: DecomposableAttention, premise: list[int], hypothesis: list[int]) -> Judgement:
    """One pair, word by word, as the paper writes it."""
    far = model.settings.far

    def words(tokens: list[int]) -> list[Tensor]:
        vectors = [model.null, *(model.table[token] for token in tokens)]
        return [model.project.weight @ vector for vector in vectors]

    def shares(scores: list[Tensor]) -> list[float]:
        powers = [math.exp(score.item()) for score in scores]
        return [power / sum(powers) for power in powers]

    def mixed(weights: list[float], values: list[Tensor]) -> Tensor:
        return torch.stack([weight * value for weight, value in zip(weights, values, strict=True)]).sum(0)

    def with_own(a: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        intra = model.intra
        assert intra is not None and far is not None
        f, wide, rows = [intra.attend(x) for x in a], [], []
        for i in range(len(a)):
            d = [intra.distance[2 * far + 1 if abs(i - j) > far else i - j + far] for j in range(len(a))]
            rows.append(shares([f[i] @ f[j] + d[j] for j in range(len(a))]))
            wide.append(torch.cat([a[i], mixed(rows[-1], a)]))
        return wide, torch.tensor(rows)

    a, b, within = words(premise), words(hypothesis), None
    if far is not None:
        (a, of_a), (b, of_b) = with_own(a), with_own(b)
        within = (of_a, of_b)
    e = [[model.attend(x) @ model.attend(y) for y in b] for x in a]
    over_b = [shares(row) for row in e]
    over_a = [shares([e[i][j] for i in range(len(a))]) for j in range(len(b))]
    v1 = sum(model.compare(torch.cat([a[i], mixed(over_b[i], b)])) for i in range(len(a)))
    v2 = sum(model.compare(torch.cat([b[j], mixed(over_a[j], a)])) for j in range(len(b)))
    logits = model.output(model.aggregate(torch.cat([v1, v2])))  # type: ignore[list-item]
    return Judgement(logits, torch.tensor(over_b), torch.tensor(over_a), within)


@BOTH
def test_equals_the_papers_sums_word_by_word(settings: Settings) -> None:
    """E6: attend, then compare, then aggregate."""
    model, (premise, hypothesis) = random(settings), pair()
    found = model(premise, hypothesis)
    for row in range(2):
        expected = by_hand(model, premise[row].tolist(), hypothesis[row].tolist())
        assert_close(found.logits[row], expected.logits)
        assert_close(found.to_hypothesis[row], expected.to_hypothesis)
        assert_close(found.to_premise[row], expected.to_premise)
        if expected.within is not None:
            assert_close(found.within[0][row], expected.within[0])
            assert_close(found.within[1][row], expected.within[1])


@BOTH
def test_each_word_goes_through_f_once(settings: Settings) -> None:
    """D5: O(length) applications, not one a pair."""
    model, (premise, hypothesis) = random(settings), pair(5, 4, batch=2)
    rows: list[int] = []
    model.attend.register_forward_hook(lambda module, given, out: rows.append(out[..., 0].numel()))
    model(premise, hypothesis)
    assert rows == [2 * (5 + 1), 2 * (4 + 1)]  # and NULL


def test_the_two_softmaxes_run_along_different_axes() -> None:
    found = random(TINY)(*pair())
    assert found.to_hypothesis.shape == (2, 6, 5) and found.to_premise.shape == (2, 5, 6)
    assert_close(found.to_hypothesis.sum(-1), torch.ones(2, 6))
    assert_close(found.to_premise.sum(-1), torch.ones(2, 5))
    assert (found.to_hypothesis.transpose(1, 2) - found.to_premise).abs().max() > 0.01


def test_words_are_summed_not_averaged() -> None:
    """D5: a premise said twice aligns as before and weighs twice."""
    model, (premise, hypothesis) = random(replace(TINY, null=False)), pair()
    summed: list[Tensor] = []
    model.aggregate.register_forward_hook(lambda module, given, out: summed.append(given[0]))
    model(premise, hypothesis)
    model(torch.cat([premise, premise], 1), hypothesis)
    once, twice = summed
    assert_close(twice[:, :6], 2 * once[:, :6])
    assert_close(twice[:, 6:], once[:, 6:])


# --- order ------------------------------------------------------------------------------------


def test_without_intra_attention_order_is_not_seen() -> None:
    model, (premise, hypothesis) = random(TINY), pair()
    found = model(premise[:, [3, 0, 4, 1, 2]], hypothesis[:, [2, 0, 3, 1]])
    assert_close(found.logits, model(premise, hypothesis).logits)


def test_with_distance_biases_order_is_seen() -> None:
    model, (premise, hypothesis) = random(WITH_INTRA), pair()
    expected = model(premise, hypothesis).logits
    assert (model(premise[:, [3, 0, 4, 1, 2]], hypothesis).logits - expected).abs().max() > 1e-3
    assert (model(premise, hypothesis[:, [2, 0, 3, 1]]).logits - expected).abs().max() > 1e-3


def test_intra_attention_alone_without_biases_sees_no_order() -> None:
    """The biases are the only place where order enters."""
    model, (premise, hypothesis) = random(replace(WITH_INTRA, null=False)), pair()
    torch.nn.init.constant_(model.intra.distance, 0.7)  # type: ignore[union-attr]
    found = model(premise[:, [3, 0, 4, 1, 2]], hypothesis)
    assert_close(found.logits, model(premise, hypothesis).logits)


def test_all_distances_of_more_than_ten_words_share_a_bias() -> None:
    model = DecomposableAttention(with_intra(vocab=3))
    intra = model.intra
    assert intra is not None and intra.distance.shape == (22,)
    rows = intra.rows(torch.ones(1, 25, dtype=torch.bool))[0]
    assert rows[12].tolist() == [21, 21, *range(22 - 2, -1, -1), 21, 21]  # i - j = 12, 11, 10, ..., -10, ...
    assert rows[0].tolist() == [*range(10, -1, -1), *[21] * 14]


# --- padding ----------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("null", [True, False])
def test_padding_changes_nothing(settings: Settings, side: str, null: bool) -> None:
    """Both softmaxes and both sums, in either sentence; whatever stands in the padding."""
    model, (premise, hypothesis) = random(replace(settings, null=null)), pair(5, 4)

    def padded(tokens: Tensor, by: int) -> tuple[Tensor, Tensor]:
        fill = torch.full((2, by), 9)
        parts = [fill, tokens] if side == "left" else [tokens, fill]
        present = [torch.zeros(2, by), torch.ones(tokens.shape)]
        return torch.cat(parts, 1), torch.cat(present if side == "left" else present[::-1], 1).bool()

    (long_p, in_p), (long_h, in_h) = padded(premise, 3), padded(hypothesis, 2)
    found, expected = model(long_p, long_h, in_p, in_h), model(premise, hypothesis)
    assert_close(found.logits, expected.logits)
    columns = in_h[0].nonzero().flatten() + null
    columns = torch.cat([torch.zeros(int(null), dtype=torch.long), columns])
    rows = torch.cat([torch.zeros(int(null), dtype=torch.long), in_p[0].nonzero().flatten() + null])
    assert_close(found.to_hypothesis[:, rows][:, :, columns], expected.to_hypothesis)
    assert_close(found.to_premise[:, columns][:, :, rows], expected.to_premise)


def test_sentences_of_different_lengths_stand_in_one_batch() -> None:
    model, (premise, hypothesis) = random(WITH_INTRA), pair(5, 4)
    present = torch.tensor([[True] * 5, [True, True, False, False, False]])
    found = model(premise, hypothesis, present)
    assert_close(found.logits[1:], model(premise[1:, :2], hypothesis[1:]).logits)
    assert_close(found.logits[:1], model(premise[:1], hypothesis[:1]).logits)


def test_an_empty_sentence_has_finite_gradients() -> None:
    model, (premise, hypothesis) = random(replace(WITH_INTRA, null=False)), pair()
    model(premise, hypothesis, torch.zeros(2, 5, dtype=torch.bool)).logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_null_word_takes_what_matches_nothing() -> None:
    """A first row and column, whose vector is no row of the table."""
    model, (premise, hypothesis) = random(TINY), pair()
    assert model(premise, hypothesis).to_hypothesis.shape == (2, 6, 5)
    bare = random(replace(TINY, null=False))
    bare.load_state_dict(model.state_dict())
    found, expected = bare(premise, hypothesis), model(premise, hypothesis)
    assert found.to_hypothesis.shape == (2, 5, 4)
    kept = expected.to_hypothesis[:, 1:, 1:]
    assert_close(found.to_hypothesis, kept / kept.sum(-1, keepdim=True))


# --- settings ---------------------------------------------------------------------------------


def count(settings: Settings) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in DecomposableAttention(settings).parameters())


def test_parameters_of_the_papers_sizes() -> None:
    """D5: 382 thousand, and 582 thousand with intra-sentence attention; word vectors are not among them."""
    assert count(Settings(vocab=40_000)) == 381_803
    assert count(with_intra(vocab=40_000)) == 582_203 + 22


def test_word_vectors_have_unit_length_and_are_frozen() -> None:
    model = DecomposableAttention(TINY)
    assert_close(model.table.norm(dim=-1), torch.ones(11))
    assert_close(model.null.norm(), torch.tensor(1.0))
    given = torch.arange(77.0).view(11, 7) + 1
    model.use_vectors(given)
    assert_close(model.table[3], given[3] / given[3].square().sum().sqrt())
    assert not model.table.requires_grad and "table" in model.state_dict()
    with pytest.raises(RequestError, match=r"\(11, 6\); this model's must be \(11, 7\)"):
        model.use_vectors(given[:, :6])


def test_weights_begin_as_the_paper_says() -> None:
    torch.manual_seed(0)
    model = DecomposableAttention(replace(with_intra(vocab=5), vectors=40, width=50))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif parameter.numel() > 1000:
            assert float(parameter.detach().std()) == pytest.approx(0.01, rel=0.1)
    assert model.intra is not None and 0 < model.intra.distance.abs().max().item() < 0.05


@pytest.mark.parametrize(("settings", "rate"), [(Settings(vocab=5), 0.05), (with_intra(5), 0.025)])
def test_trained_by_adagrad(settings: Settings, rate: float) -> None:
    optimiser = DecomposableAttention(replace(settings, vectors=4, width=3)).optimiser()
    assert isinstance(optimiser, torch.optim.Adagrad)
    assert optimiser.defaults["lr"] == rate and optimiser.defaults["initial_accumulator_value"] == 0.1


def test_dropout_stands_before_each_of_the_layers_and_only_in_training() -> None:
    model, sentences = random(WITH_INTRA), pair()
    drops = [m for m in model.modules() if isinstance(m, torch.nn.Dropout)]
    assert [m.p for m in drops] == [0.2] * 8  # F_intra, F, G, H
    assert torch.equal(model(*sentences).logits, model(*sentences).logits)
    model.train()
    assert not torch.equal(model(*sentences).logits, model(*sentences).logits)


def test_losses_are_cross_entropies() -> None:
    model, sentences = random(TINY), pair()
    judgement = model(*sentences)
    expected = -judgement.logits.log_softmax(-1)[[0, 1], [2, 0]]
    assert_close(model.losses(judgement, torch.tensor([2, 0])), expected)


def test_learns_whether_the_premise_has_the_word() -> None:
    """End to end, by its own objective and optimiser: with words aligned by what they are, it is easy."""
    torch.set_num_threads(1)  # for so little a second one costs more than it does
    torch.manual_seed(0)
    model = DecomposableAttention(Settings(vocab=12, vectors=16, width=32, classes=2, dropout=0.0, std=0.2))
    optimiser, right = model.optimiser(), []
    for _ in range(400):
        words, labels = torch.rand(32, 12).argsort(-1), torch.randint(0, 2, (32,))
        hypothesis = torch.where(labels == 1, words[:, 2], words[:, 4])[:, None]
        judgement = model(words[:, :4], hypothesis)
        optimiser.zero_grad()
        model.losses(judgement, labels).mean().backward()
        optimiser.step()
        right.append((judgement.logits.argmax(-1) == labels).float().mean())
    assert float(torch.stack(right[-20:]).mean()) > 0.95
