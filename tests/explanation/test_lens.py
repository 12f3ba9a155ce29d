"""The logit lens, and norms folded into the head."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import Logit, Reading, logit_lens, logit_lens_answers
from qkv.explanation.lens import Readout, centred, folded, readout
from qkv.nn.norms import LayerNorm, RMSNorm
from qkv.spec import LayerNorm as LayerNode, RMSNorm as RMSNode
from tests.explanation.cases import EVERY, METRIC, asked, network, reading, tapped
from tests.support import assert_close


@pytest.mark.parametrize("variant", EVERY)
def test_each_layer_is_read_through_the_last_norm_and_the_head(variant: str) -> None:
    """By hand: the model's own norm and head on the state behind each layer."""
    one = reading(variant)
    side = one.sides[-1]
    points = [f"{side.prefix}embedding", *(f"{side.prefix}layers.{i}.output" for i in range(side.depth))]
    logits, taps = tapped(variant, points)
    found = logit_lens(one, METRIC)
    assert found.axes[0].labels == ("embedding", *range(side.depth))
    model = network(variant)
    with torch.no_grad():
        for point, value in zip(points, found.values, strict=True):
            states = taps[point] if side.stack.norm is None else side.stack.norm(taps[point])
            assert value == pytest.approx(asked(model.head(states)), abs=1e-5)  # type: ignore[misc]
    assert found.values[-1] == pytest.approx(asked(logits), abs=1e-5)
    assert found.facts["own"] == found.values[-1]


def test_all_answers_are_shown_where_they_are_asked_for() -> None:
    logits, _ = tapped("grouped", [])
    found = logit_lens_answers(reading("grouped"), places=(-1, 0))
    assert found.values.shape == (3, 2, 50)
    assert_close(found.at(layer=1).values, logits[0, [-1, 0]])
    best = found.at(layer=1, place=0).top(1, key=np.positive)[0]
    assert best.labels["answer"] == str(int(logits[0, -1].argmax()))


def test_the_worked_example_of_folding() -> None:
    """Case I5: g = [2, 1], beta = [1, -1], W = [1, 3], b = .5 give W' = [2, 3], b' = -1.5; [3, 1] is -2.5."""
    norm = LayerNorm(LayerNode(eps=0.0), 2)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, 1.0]))  # type: ignore[union-attr]
        norm.bias.copy_(torch.tensor([1.0, -1.0]))  # type: ignore[union-attr]
    read = Readout(torch.tensor([[1.0, 3.0]]).double(), torch.tensor([0.5]).double())
    new = folded(norm, read)
    assert new.weight.tolist() == [[2, 3]] and new.bias.tolist() == [-1.5]
    x = torch.tensor([3.0, 1.0])
    plain = LayerNorm(LayerNode(eps=0.0, scale=False, bias=False), 2)
    assert float(norm(x).detach().double() @ read.weight[0] + read.bias) == pytest.approx(-2.5)
    assert float(plain(x).double() @ new.weight[0] + new.bias) == pytest.approx(-2.5)
    even = centred(norm, new)
    assert float(plain(x).double() @ even.weight[0] + even.bias) == pytest.approx(-2.5)
    assert even.weight.tolist() == [[-0.5, 0.5]]


def test_only_a_layer_norm_lets_the_head_be_centred() -> None:
    norm = RMSNorm(RMSNode(scale=False), 2)
    read = Readout(torch.tensor([[2.0, 3.0]]).double(), torch.zeros(1).double())
    y = norm(torch.tensor([3.0, 1.0])).double()
    even = read.weight - read.weight.mean()
    assert abs(float(y @ read.weight[0] - y @ even[0])) > 1  # it would differ
    with pytest.raises(RequestError, match="behind RMSNorm, centring the head would change"):
        centred(norm, read)
    with pytest.raises(RequestError, match="behind no norm"):
        centred(None, read)


@pytest.mark.parametrize(
    "variant", ["grouped", "rms-norm-offset", "layer-norm-without-bias", "scale-norm", "post-norm"]
)
def test_folding_the_last_norm_changes_no_answer(variant: str) -> None:
    """The folded head on what the norm measures alone: x less its mean, or x, over its length."""
    logits, taps = tapped(variant, ["layers.1.output"])
    model = network(variant)
    norm, x = model.trunk.norm, taps["layers.1.output"].double()
    read = folded(norm, readout(model.head))
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    elif isinstance(norm, RMSNorm):
        x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    elif norm is not None:
        x = x / x.norm(dim=-1, keepdim=True)
    assert_close(x @ read.weight.T + read.bias, logits)


def test_what_has_no_head_or_answers_no_token_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no head to read a layer with"):
        logit_lens(reading("encoder-only"), Logit(0))
    with pytest.raises(UnsupportedError, match="gives no answer for a token"):
        logit_lens_answers(Reading(network("encoder-only"), [1, 2]))
    with pytest.raises(UnsupportedError, match="not linear in the states"):
        readout(network("masked-language").head)
