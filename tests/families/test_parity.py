"""Families with weights equal transformers: full, padded, in any pieces, gradients; and saved again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import qkv
from qkv.nn import ContiguousCache, Layout
from tests.families.parity import Pair, gradients_of, pair_of, present, tokens
from tests.families.parity_models import MODELS
from tests.support import assert_close


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest) -> Pair:
    return pair_of(request.param)


@pytest.mark.parametrize("length", [1, 14])
def test_full_pass(pair: Pair, length: int) -> None:
    ours, theirs, _ = pair.outputs(2, length)
    assert ours.shape == theirs.shape
    assert_close(ours, theirs, pair.tolerance)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded(pair: Pair, side: str) -> None:
    ours, theirs, there = pair.outputs(3, 12, side)
    if theirs.ndim == 3:
        ours, theirs = ours[there], theirs[there]
    elif side == "left":  # theirs would pool the first place, padding or not
        ours, theirs = ours[:1], theirs[:1]
    assert_close(ours, theirs, pair.tolerance)


def test_in_pieces(pair: Pair) -> None:
    """Token by token and in uneven chunks, against one pass of theirs over all."""
    if not pair.causal:
        return
    _, whole, _ = pair.outputs(2, 13)
    for sizes in ([1] * 13, [5, 1, 7]):
        cache = ContiguousCache(pair.ours.spec.trunk, 2, 13)
        source = {"source": tokens(2, 9, 11), "source_layout": Layout.padded(present(2, 9, "right"))}
        pieces = []
        for piece in tokens(2, 13).split(sizes, dim=1):
            first = source if pair.reads_a_source and not pieces else {}  # the cache keeps what it was
            with torch.no_grad():
                pieces.append(pair.ours(piece, cache=cache, **first))
        assert_close(torch.cat(pieces, 1), whole, pair.tolerance)


def test_gradients(pair: Pair) -> None:
    """Of every parameter, for the same loss."""
    found = gradients_of(pair)
    # where a gradient vanishes, as that of a key's bias, it is all rounding: measured against the largest
    floor = 0.1 * max(float(theirs.abs().max()) for _, theirs in found.values())
    for name, (ours, theirs) in found.items():
        largest = max(float(theirs.abs().max()), floor)
        assert float((ours - theirs).abs().max()) <= pair.tolerance * largest, name


def test_saved_again(pair: Pair, tmp_path: Path) -> None:
    """transformers and we read back what was saved, bit for bit."""
    pair.model.save(tmp_path)
    again = type(pair.theirs).from_pretrained(tmp_path)
    assert isinstance(again, transformers.PreTrainedModel)
    wanted = pair.theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    for name, values in again.state_dict().items():
        assert torch.equal(values, wanted[name]), name
    ours = dict(qkv.load(tmp_path).network.named_parameters())
    for name, values in pair.ours.named_parameters():
        assert torch.equal(ours[name], values), name


def test_parameters_are_counted_as_transformers_counts_them(pair: Pair) -> None:
    assert pair.ours.spec.parameters() == pair.parameters
