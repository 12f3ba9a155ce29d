"""Greedy and beam search against every sentence there is; the objective against its definition."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from qkv.errors import RequestError
from qkv.lineage.translation import beam_search, greedy, negative_log_likelihood, reordered
from tests.support import assert_close

START, END, VOCAB = 0, 1, 4
SOURCE = torch.tensor([[2, 3], [3, 3], [2, 2]])
PRESENT = torch.ones(3, 2, dtype=torch.bool)


class Memory(NamedTuple):
    total: Tensor
    nothing: tuple[()]


class Toy(nn.Module):
    """A recurrence whose first state is the source's sum; its state is nested, as those of the models are."""

    def __init__(self, sharpness: float = 2.0):
        super().__init__()
        self.embedding, self.sharpness = nn.Embedding(VOCAB, 6), sharpness
        self.cell, self.output = nn.RNNCell(6, 6), nn.Linear(6, VOCAB)

    def begin(self, source: Tensor, present: Tensor) -> Any:
        total = (self.embedding(source) * present[..., None]).sum(1)
        return (total, Memory(total, ()))

    def next(self, state: Any, tokens: Tensor) -> Any:
        hidden = self.cell(self.embedding(tokens), state[0])
        return self.sharpness * self.output(hidden + state[1].total), (hidden, state[1])

    def forward(self, source: Tensor, present: Tensor, target: Tensor) -> Tensor:
        state, logits = self.begin(source, present), []
        for token in target.T:
            now, state = self.next(state, token)
            logits.append(now)
        return torch.stack(logits, 1)

    def alignment(self, source: Tensor, present: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


def everything(model: Toy, sentence: int, most: int, penalty: float) -> list[tuple[float, list[int]]]:
    """Every sentence of up to `most` tokens, the end included, with its score, best first."""
    found = []
    for length in range(most):
        for words in itertools.product([t for t in range(VOCAB) if t != END], repeat=length):
            target = torch.tensor([[START, *words]])
            logits = model(SOURCE[sentence : sentence + 1], PRESENT[:1], target)
            gains = logits[0].log_softmax(-1)
            total = sum(gains[i, token].item() for i, token in enumerate([*words, END]))
            found.append((total / ((5 + length + 1) / 6) ** penalty, list(words)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.0])
@torch.no_grad()
def test_with_a_beam_for_everything_it_is_exhaustive_search(penalty: float) -> None:
    """4 tokens with the end: 40 sentences; the best of all, with its score."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = Toy()
        found = beam_search(model, SOURCE, PRESENT, START, END, most=4, beams=64, penalty=penalty)
        for sentence in range(3):
            score, words = everything(model, sentence, 4, penalty)[0]
            best = found[sentence][0]
            assert best.tokens == words and best.finished
            assert abs(best.score - score) < 1e-5
            assert abs(best.total - score * ((6 + len(words)) / 6) ** penalty) < 1e-5


@torch.no_grad()
def test_all_that_ended_are_kept_best_first_with_their_scores() -> None:
    """Nothing ended before the last step beats what is left, so that nothing stops it: all 13 are found."""
    model = Toy(1.0)
    model.output.bias.copy_(torch.tensor([0.0, -3.0, 0.0, 0.5]))
    nn.init.zeros_(model.output.weight)
    expected = everything(model, 0, 3, 5.0)
    found = beam_search(model, SOURCE[:1], PRESENT[:1], START, END, most=3, beams=40, penalty=5.0)[0]
    assert len(found) == len(expected) == 13
    assert sorted(t.tokens for t in found) == sorted(words for _, words in expected)
    assert_close(torch.tensor([t.score for t in found]), torch.tensor([score for score, _ in expected]))


def textbook(model: Toy, most: int, beams: int, penalty: float) -> tuple[list[Any], list[Any]]:
    """Step by step in plain Python, without a rule to stop early: what ended, and what is left."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, most + 1):
        steps = []
        for total, words in live:
            gains = model(SOURCE[:1], PRESENT[:1], torch.tensor([[START, *words]]))[0, -1].log_softmax(-1)
            steps += [(total + gains[token].item(), [*words, token]) for token in range(VOCAB)]
        steps.sort(reverse=True)
        divisor = ((5 + length) / 6) ** penalty
        ended += [(total / divisor, words[:-1]) for total, words in steps[:beams] if words[-1] == END]
        live = [step for step in steps if step[1][-1] != END][:beams]
    return sorted(ended, reverse=True), live


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("penalty", [0.6, 4.0])
@torch.no_grad()
def test_a_narrow_beam_is_the_textbook_one(beams: int, penalty: float) -> None:
    for seed in range(25):
        torch.manual_seed(seed)
        model = Toy(4.0)
        ended, live = textbook(model, 6, beams, penalty)
        found = beam_search(model, SOURCE[:1], PRESENT[:1], START, END, 6, beams, penalty)[0]
        if ended:
            assert (found[0].tokens, found[0].finished) == (ended[0][1], True)
            assert abs(found[0].score - ended[0][0]) < 1e-4
        else:
            assert [t.tokens for t in found] == [words for _, words in live]
            assert not any(t.finished for t in found)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_is_its_sentences(beams: int) -> None:
    model = Toy()
    together = beam_search(model, SOURCE, PRESENT, START, END, 5, beams)
    for i in range(3):
        alone = beam_search(model, SOURCE[i : i + 1], PRESENT[:1], START, END, 5, beams)[0]
        assert [t.tokens for t in alone[:1]] == [t.tokens for t in together[i][:1]]
        assert abs(alone[0].score - together[i][0].score) < 1e-5


@torch.no_grad()
def test_greedy_takes_the_best_token_and_is_the_search_of_one_beam() -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        model = Toy()
        found = greedy(model, SOURCE, PRESENT, START, END, 5)
        for sentence in range(3):
            words: list[int] = []
            while len(words) < 5 and END not in words:
                logits = model(SOURCE[sentence : sentence + 1], PRESENT[:1], torch.tensor([[START, *words]]))
                words.append(int(logits[0, -1].argmax()))
            assert found[sentence] == [word for word in words if word != END]
        searched = beam_search(model, SOURCE, PRESENT, START, END, 5, beams=1, penalty=0.0)
        assert [translations[0].tokens for translations in searched] == found


def test_the_length_that_is_divided_by_counts_the_end_and_not_the_start() -> None:
    """Equal odds of four tokens: log 4 a token, three tokens with the end, ((5 + 3) / 6)^5."""
    model = Toy(0.0)
    found = beam_search(model, SOURCE[:1], PRESENT[:1], START, END, most=3, beams=64, penalty=5.0)[0]
    longest = [t for t in found if len(t.tokens) == 2]
    assert len(longest) == 9
    for translation in longest:
        assert abs(translation.total + 3 * math.log(4)) < 1e-5
        assert abs(translation.score + 3 * math.log(4) / (8 / 6) ** 5) < 1e-5


def test_where_none_ends_the_unfinished_are_given() -> None:
    model = Toy()
    with torch.no_grad():
        model.output.bias[END] = -1e4
    found = beam_search(model, SOURCE, PRESENT, START, END, most=3, beams=2)
    assert [[len(t.tokens) for t in each] for each in found] == [[3, 3]] * 3
    assert not any(t.finished for each in found for t in each)
    assert all(len(each) == 3 for each in greedy(model, SOURCE, PRESENT, START, END, 3))


def test_a_state_is_reordered_through_all_its_tuples() -> None:
    rows, x = torch.tensor([2, 0, 0]), torch.arange(6).view(3, 2)
    first, memory = reordered((x, Memory(x + 10, ())), rows)
    assert first.tolist() == [[4, 5], [0, 1], [0, 1]]
    assert isinstance(memory, Memory) and memory.total.tolist() == [[14, 15], [10, 11], [10, 11]]
    assert memory.nothing == ()


@pytest.mark.parametrize(("name", "most", "beams"), [("most", 0, 1), ("beams", 3, 0)])
def test_nothing_to_search_is_refused(name: str, most: int, beams: int) -> None:
    with pytest.raises(RequestError, match=f"{name} is 0; it must be at least 1."):
        beam_search(Toy(), SOURCE, PRESENT, START, END, most, beams)
    with pytest.raises(RequestError, match="most is 0"):
        greedy(Toy(), SOURCE, PRESENT, START, END, 0)
    with pytest.raises(RequestError, match=r"penalty is -0.5; it must be at least 0."):
        beam_search(Toy(), SOURCE, PRESENT, START, END, 3, penalty=-0.5)


def test_the_objective_is_summed_over_a_sentence_and_averaged_over_sentences() -> None:
    logits = torch.randn(2, 4, VOCAB)
    target = torch.tensor([[START, 2, 3, END], [START, END, -7, 99]])
    present = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]) == 1
    logs = logits.log_softmax(-1)
    expected = -(logs[0, 0, 2] + logs[0, 1, 3] + logs[0, 2, END] + logs[1, 0, END]) / 2
    assert_close(negative_log_likelihood(logits, target, present), expected)
