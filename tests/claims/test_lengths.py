"""Loss against length: which tokens count, and how much each has before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.claims.lengths import non_overlapping, sliding
from qkv.claims.models import initialised, small_lm
from qkv.errors import RequestError
from qkv.nn import Transformer


def network(position: spec.Position | None = None) -> Transformer:
    model = small_lm(11, width=16, heads=2, layers=1, position=position or spec.Alibi())
    return initialised(model, torch.Generator().manual_seed(0), lambda weight: 0.3)


def text(length: int) -> Tensor:
    return torch.randint(11, (length,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def one(model: Transformer, before: Tensor, token: Tensor) -> float:
    """The loss of a token after these."""
    return float(F.cross_entropy(model(before[None])[0, -1], token))


def test_pieces_are_read_each_by_itself_and_cover_the_text_once() -> None:
    model, tokens = network(), text(25)
    wanted = [
        one(model, tokens[start : at + 1], tokens[at + 1])
        for start in (0, 8, 16)
        for at in range(start, start + 8)
    ]
    assert len(wanted) == 24
    assert non_overlapping(model, tokens, 8) == pytest.approx(sum(wanted) / 24, rel=1e-5)
    # 24 tokens have 23 after them: the third piece would be shorter
    assert non_overlapping(model, tokens[:24], 8) == pytest.approx(sum(wanted[:16]) / 16, rel=1e-5)


def test_a_window_slides_so_that_the_same_tokens_count_at_every_length() -> None:
    model, tokens = network(), text(41)
    ends = (16, 28, 40)
    for length in (4, 16):
        wanted = [
            one(model, tokens[end - length : at], tokens[at])
            for end in ends
            for at in range(end - 2, end + 1)
        ]
        assert sliding(model, tokens, length, 16, 3, 3) == pytest.approx(sum(wanted) / 9, rel=1e-5)


def test_long_texts_are_read_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = network(), text(65)
    whole = non_overlapping(model, tokens, 8), sliding(model, tokens, 8, 16, 5, 2)
    monkeypatch.setattr("qkv.claims.lengths.AT_ONCE", 16)
    assert (non_overlapping(model, tokens, 8), sliding(model, tokens, 8, 16, 5, 2)) == pytest.approx(whole)


def test_what_does_not_fit_is_refused() -> None:
    model = network()
    with pytest.raises(RequestError, match="8 tokens, too few for a piece of 8 and its next"):
        non_overlapping(model, text(8), 8)
    for length, longest, stride in ((8, 16, 9), (17, 16, 2), (8, 20, 2), (8, 16, 0)):
        with pytest.raises(RequestError, match="do not fit a text of 20"):
            sliding(model, text(20), length, longest, 3, stride)
