"""Made-up tasks: their answers by hand, and that nothing gives the answer away."""

from __future__ import annotations

import pytest
import torch

from qkv.claims.tasks import PAD, Ragged, a_or_b_first, ragged, recall, reversed_
from qkv.errors import RequestError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_rows_of_all_lengths_with_padding_at_the_end() -> None:
    rows = ragged(generator(), 2000, 2, 5, symbols=3)
    assert sorted(set(rows.lengths.tolist())) == [2, 3, 4, 5]
    assert bool(((rows.tokens != PAD) == rows.there).all())
    assert sorted(set(rows.tokens[rows.there].tolist())) == [1, 2, 3]


def test_reversed_rows() -> None:
    given = Ragged(torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]), torch.tensor([3, 5]))
    back = reversed_(given)
    assert back.tokens.tolist() == [[3, 2, 1, 0, 0], [8, 7, 6, 5, 4]]
    assert torch.equal(reversed_(back).tokens, given.tokens)


def test_recall_asks_for_the_value_of_one_of_the_keys() -> None:
    made = recall(generator(), 500, pairs=3, gap=4, keys=6, values=5, fillers=2)
    assert made.tokens.shape == (500, 3 * 2 + 4 + 1)
    for row, answer, place in zip(
        made.tokens.tolist(), made.answers.tolist(), made.places.tolist(), strict=True
    ):
        pairs = dict(zip(row[0:6:2], row[1:6:2], strict=True))
        assert len(pairs) == 3 and all(key < 6 <= value < 11 for key, value in pairs.items())
        assert all(11 <= filler < 13 for filler in row[6:10])
        assert pairs[row[-1]] == answer == row[place]
    assert sorted(set(made.places.tolist())) == [1, 3, 5]
    with pytest.raises(RequestError, match="There are 2 keys, too few for 3"):
        recall(generator(), 1, pairs=3, gap=0, keys=2, values=2)


def test_which_came_first_is_in_the_order_alone() -> None:
    tokens, labels = a_or_b_first(generator(), 4000, 12, fillers=8)
    for row, label in zip(tokens.tolist(), labels.tolist(), strict=True):
        assert row.count(0) == row.count(1) == 1 and label == (row.index(1) < row.index(0))
        assert all(2 <= token < 10 for token in row if token > 1)
    assert float(labels.float().mean()) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    "make", [lambda g: ragged(g, 9, 1, 5, 3).tokens, lambda g: recall(g, 9, 2, 1, 3, 3)[0]]
)
def test_the_same_generator_gives_the_same_rows(make) -> None:  # type: ignore[no-untyped-def]
    assert torch.equal(make(generator(1)), make(generator(1)))
    assert not torch.equal(make(generator(1)), make(generator(2)))
