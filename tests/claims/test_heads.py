"""Reading and removing heads: against the model itself, and against an output map without their columns."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from qkv import spec
from qkv.claims.heads import all_heads, token_losses, weights_by_layer, without
from qkv.claims.models import attention_only, initialised, small_lm
from qkv.claims.tasks import repeated
from qkv.claims.training import mean_loss
from qkv.errors import RequestError
from qkv.nn import Transformer

WIDTH, HEADS = 16, 4


def network() -> Transformer:
    """Two layers, the second without a feed-forward."""
    model = small_lm(13, width=WIDTH, heads=HEADS, position=spec.Rotary(), arrange=attention_only)
    whole = small_lm(13, width=WIDTH, heads=HEADS, position=spec.Rotary())
    assert model.decoder is not None and whole.decoder is not None
    layers = (whole.decoder.layers[0], model.decoder.layers[0])
    stack = spec.Stack(whole.decoder.input, layers, whole.decoder.norm)
    mixed = spec.Model(decoder=stack, head=whole.head)
    return initialised(mixed, torch.Generator().manual_seed(0), lambda weight: 0.3)


def tokens() -> torch.Tensor:
    return torch.randint(13, (3, 10), generator=torch.Generator().manual_seed(1))


def test_all_heads_are_those_of_every_layer_in_order() -> None:
    assert all_heads(network().spec) == [(layer, head) for layer in range(2) for head in range(HEADS)]


def test_attention_only_leaves_out_the_feed_forward_and_nothing_else() -> None:
    model = small_lm(13, width=WIDTH, heads=HEADS, arrange=attention_only)
    assert model.decoder is not None
    assert [name for name, _ in model.decoder.layers[0].mixers()] == ["attention"]
    assert model.decoder.norm is not None


def test_weights_come_by_layer_and_are_causal_shares() -> None:
    weights = weights_by_layer(network(), tokens())
    assert [tuple(each.shape) for each in weights] == [(3, HEADS, 10, 10)] * 2
    for each in weights:
        assert torch.allclose(each.sum(-1), torch.ones(3, HEADS, 10)) and each.triu(1).abs().max() == 0
    assert not torch.allclose(weights[0], weights[1])


@pytest.mark.parametrize("heads", [[(0, 1)], [(1, 3)], [(0, 0), (0, 2), (1, 1)]])
def test_a_removed_head_is_one_whose_columns_of_the_output_map_are_zero(heads: list[tuple[int, int]]) -> None:
    model = network()
    found = model(tokens(), tap=without(model.spec, heads))
    whole = model(tokens())
    size = WIDTH // HEADS
    with torch.no_grad():
        for layer, head in heads:
            weight = model.get_parameter(f"decoder.layers.{layer}.attention.output.weight")
            weight[:, head * size : (head + 1) * size] = 0
    assert torch.allclose(found, model(tokens()), atol=1e-6)
    assert not torch.allclose(found, whole, atol=1e-3)


def test_removing_none_changes_nothing() -> None:
    model = network()
    assert torch.equal(model(tokens(), tap=without(model.spec, [])), model(tokens()))


def test_a_head_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match=r"There is no head 4 in layer 1; there are 8 heads\."):
        without(network().spec, [(1, 4)])


def test_token_losses_are_of_each_next_token() -> None:
    model = network()
    losses = token_losses(model, tokens())
    assert losses.shape == (3, 9)
    assert float(losses.mean()) == pytest.approx(mean_loss(model, tokens()), rel=1e-5)
    logits = model(tokens()[:, :-1])[2, 4]
    assert float(losses[2, 4]) == pytest.approx(
        float(F.cross_entropy(logits, tokens()[2, 5]).detach()), rel=1e-5
    )


def test_repeated_rows_begin_again_after_their_period_and_no_earlier() -> None:
    rows = repeated(torch.Generator().manual_seed(2), 200, 30, 20, 4, 9)
    assert sorted(set(rows.periods.tolist())) == [4, 5, 6, 7, 8, 9]
    for row, period in zip(rows.tokens.tolist(), rows.periods.tolist(), strict=True):
        assert row[period:] == row[:-period] and len(set(row)) == period
    assert len({tuple(row[:4]) for row in rows.tokens.tolist()}) > 190
    assert int(rows.tokens.max()) == 19 and int(rows.tokens.min()) == 0


def test_a_period_longer_than_there_are_symbols_is_refused() -> None:
    with pytest.raises(RequestError, match="There are 5 symbols, too few for 6 different ones in a row"):
        repeated(torch.Generator(), 1, 10, 5, 4, 6)
