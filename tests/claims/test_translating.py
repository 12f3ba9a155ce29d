"""Pairs of rows for translators, and what is counted of them, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qkv.claims.tasks import Ragged
from qkv.claims.translating import END, FIRST, START, Pairs, paired, said_exactly, surprise


class Copying:
    """Says the source and the end, with 0.8 on each token and 0.2 on the number after it."""

    def forward(self, source: Tensor, present: Tensor, target: Tensor) -> Tensor:
        state, logits = self.begin(source, present), []
        for token in target.T:
            said, state = self.next(state, token)
            logits.append(said)
        return torch.stack(logits, 1)

    def begin(self, source: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        ended = torch.cat([source, torch.zeros(len(source), 1, dtype=torch.long)], 1)
        return ended.scatter(1, present.sum(1)[:, None], END), torch.zeros(len(source), dtype=torch.long)

    def next(self, state: tuple[Tensor, Tensor], tokens: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        words, place = state
        right = words.gather(1, place[:, None].clamp(max=words.shape[1] - 1))
        shares = torch.zeros(len(words), 12).scatter(1, right, 0.8)
        return (shares + torch.zeros_like(shares).scatter(1, (right + 1) % 12, 0.2)).log(), (words, place + 1)


def rows() -> Pairs:
    source = Ragged(torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([3, 1]))
    return paired(source, source)


def test_a_target_stands_between_its_start_and_its_end() -> None:
    pairs = rows()
    assert pairs.target.tolist() == [[START, 5, 6, 7, END], [START, 8, END, 0, 0]]
    assert pairs.there.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert pairs.present.tolist() == [[True] * 3, [True, False, False]] and FIRST > END > START > 0


def test_a_row_is_right_as_a_whole() -> None:
    pairs = rows()
    assert said_exactly(Copying(), pairs).tolist() == [True, True]  # type: ignore[arg-type]
    wrong = pairs._replace(target=pairs.target.clone())
    wrong.target[0, 3] = 9
    assert said_exactly(Copying(), wrong, batch=1).tolist() == [False, True]  # type: ignore[arg-type]
    longer = pairs._replace(
        target=torch.tensor([[START, 5, 6, 7, END], [START, 8, 8, END, 0]]),
        there=torch.tensor([[True] * 5, [True] * 4 + [False]]),
    )
    assert said_exactly(Copying(), longer).tolist() == [True, False]  # type: ignore[arg-type]


def test_surprise_is_summed_over_the_tokens_that_are_there() -> None:
    nats = -torch.tensor(0.8).log().item()
    assert surprise(Copying(), rows(), batch=1).tolist() == pytest.approx([4 * nats, 2 * nats])  # type: ignore[arg-type]
