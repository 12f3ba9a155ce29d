"""Batches of rows of like lengths: every row comes once, with few that are much longer than others."""

from __future__ import annotations

from itertools import pairwise

import torch

from qkv.claims.tasks import PAD, ragged, reversed_
from qkv.claims.translating import END, FIRST, START, Pairs, like_lengths, paired, trimmed

BATCH, TOGETHER = 8, 5


def drawn() -> Pairs:
    row = ragged(torch.Generator().manual_seed(0), BATCH * TOGETHER, 1, 20, 9, FIRST)
    return paired(row, reversed_(row))


def some_batches() -> list[Pairs]:
    endless = like_lengths(lambda rows: drawn(), BATCH, torch.Generator().manual_seed(1), TOGETHER)
    return [next(endless) for _ in range(TOGETHER)]


def rows(pairs: Pairs) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Sources and targets without padding."""
    return [
        (tuple(source[present].tolist()), tuple(target[there].tolist()))
        for source, present, target, there in zip(*pairs, strict=True)
    ]


def test_every_row_comes_once() -> None:
    found = [row for batch in some_batches() for row in rows(batch)]
    assert sorted(found) == sorted(rows(drawn()))


def test_lengths_of_a_batch_are_neighbours_and_batches_come_in_no_order() -> None:
    lengths = [batch.there.sum(1) for batch in some_batches()]
    spans = sorted((int(length.min()), int(length.max())) for length in lengths)
    assert all(high <= low for (_, high), (low, _) in pairwise(spans))
    longest = [int(length.max()) for length in lengths]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_what_is_padding_in_every_row_is_cut_off() -> None:
    pairs = Pairs(
        torch.tensor([[3, 4, PAD], [5, PAD, PAD]]),
        torch.tensor([[True, True, False], [True, False, False]]),
        torch.tensor([[START, 3, END, PAD], [START, END, PAD, PAD]]),
        torch.tensor([[True, True, True, False], [True, True, False, False]]),
    )
    cut = trimmed(pairs)
    assert cut.source.tolist() == [[3, 4], [5, PAD]] and cut.present.tolist() == [[True, True], [True, False]]
    assert cut.target.tolist() == [[START, 3, END], [START, END, PAD]] and cut.there.shape == (2, 3)
