"""Scaled dot-product attention against independent implementations, and why it is scaled."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qkv.errors import ConfigError, UnsupportedError
from qkv.nn import Layout, NoTap, Taps
from qkv.nn.attention import Attention
from qkv.nn.backends import Reference, normalise
from qkv.spec import (
    Additive,
    Attention as Node,
    Causal,
    Concat,
    Dot,
    Everything,
    General,
    Location,
    LogScale,
    Projections,
    RMSNorm,
    Rotary,
    Score,
)
from tests.support import assert_close


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("mask", [Causal(), Everything()], ids=["causal", "everything"])
def test_equals_torch(heads: int, kv_heads: int, mask: Causal | Everything) -> None:
    """D7, D24b: torch's own attention, grouped heads repeated by interleaving."""
    q, k, v = torch.randn(2, heads, 9, 8), torch.randn(2, kv_heads, 9, 8), torch.randn(2, kv_heads, 9, 5)
    visible = Layout.unpadded(2, 9).visible(mask)
    ours = Reference().attend(q, k, v, visible, Score())
    k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
    assert_close(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None]))


def test_equals_torch_multihead_attention_with_the_same_weights() -> None:
    """D7: nn.MultiheadAttention, biases included."""
    theirs = nn.MultiheadAttention(12, 3, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias), nn.init.normal_(theirs.out_proj.bias)
    ours = Attention(Node(3, 3, 4, mask=Everything(), projections=Projections(bias="qkvo")), 12)
    with torch.no_grad():
        parts = zip(theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True)
        for linear, (weight, bias) in zip((ours.query, ours.key, ours.value), parts, strict=True):
            linear.weight.copy_(weight), linear.bias.copy_(bias)  # type: ignore[union-attr]
        ours.output.weight.copy_(theirs.out_proj.weight), ours.output.bias.copy_(theirs.out_proj.bias)
    x = torch.randn(2, 7, 12)
    assert_close(ours(x, Layout.unpadded(2, 7)), theirs(x, x, x)[0])


def test_heads_in_a_batch_equal_heads_in_a_loop() -> None:
    """D7: the reshape keeps each head's dimensions together."""
    module = Attention(Node(4, 2, 6, mask=Causal()), 10)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, layout = torch.randn(1, 5, 10), Layout.unpadded(1, 5)
    total = torch.zeros(1, 5, 10)
    for head in range(4):
        rows, shared = slice(6 * head, 6 * head + 6), slice(6 * (head // 2), 6 * (head // 2) + 6)
        q, k, v = (x @ w.T for w in (module.query.weight[rows], module.key.weight[shared],
                                     module.value.weight[shared]))  # fmt: skip
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        total = total + mixed @ module.output.weight[:, rows].T
    assert_close(module(x, layout), total)


@pytest.mark.parametrize("dims", [16, 64, 256])
def test_scores_of_unit_variance_vectors_have_unit_variance(dims: int) -> None:
    """D7: unscaled their variance is head_dim, which is why the scale is 1 / sqrt(head_dim)."""
    q, k = torch.randn(1, 1, 200, dims), torch.randn(1, 1, 200, dims)
    for score, variance in ((Dot(), dims), (Score(), 1)):
        taps = Taps(["scores"], ["scores"])
        visible = Layout.unpadded(1, 200).visible(Everything())
        Reference().attend(q, k, torch.zeros_like(q), visible, score, tap=taps)
        assert float(taps["scores"].var()) == pytest.approx(variance, rel=0.1)


def test_equal_inputs_have_equal_outputs_and_their_mean_knows_no_order() -> None:
    """D26: attention sees a set: duplicates are one, and a pooled output has no order."""
    module = attention(Node(2, 1, 4, mask=Everything()))
    x, layout = torch.randn(1, 6, 8), Layout.unpadded(1, 6)
    x[0, 4] = x[0, 1]
    out = module(x, layout)
    assert_close(out[0, 4], out[0, 1], 1e-6)
    assert (out[0, 2] - out[0, 1]).abs().max() > 1e-2
    shuffled = module(x[:, [3, 5, 0, 4, 2, 1]], layout)
    assert_close(shuffled.mean(1), out.mean(1))
    causal = attention(Node(2, 1, 4, mask=Causal()))
    assert (causal(x, layout)[0, 4] - causal(x, layout)[0, 1]).abs().max() > 1e-2


@pytest.mark.parametrize(("head_dim", "scale"), [(16, 1.5), (4, 3.0)])
def test_normalised_queries_and_keys_bound_the_scores(head_dim: int, scale: float) -> None:
    """D24b: |score| <= sqrt(head_dim) * g^2, however large the input; reached where a query is its key."""
    module = attention(Node(2, 2, head_dim, mask=Everything(), projections=Projections(norm=RMSNorm())))
    module.key.weight.data = module.query.weight.data.clone()
    for norm in (module.query_norm, module.key_norm):
        torch.nn.init.constant_(norm.weight, scale)  # type: ignore[union-attr, arg-type]
    taps = Taps(["scores"], ["scores"])
    module(1000 * torch.randn(1, 7, 8), Layout.unpadded(1, 7), tap=taps)
    bound = head_dim**0.5 * scale**2
    assert float(taps["scores"].detach().abs().max()) == pytest.approx(bound, rel=1e-5)
    assert_close(taps["scores"].diagonal(dim1=-2, dim2=-1), torch.full((1, 2, 7), bound))


def test_weights_sum_to_one_where_something_is_visible() -> None:
    scores = torch.randn(2, 3, 5, 7).masked_fill(torch.rand(2, 3, 5, 7) < 0.4, float("-inf"))
    scores[0, 0, 0] = float("-inf")
    weights = normalise(scores)
    visible = (scores > float("-inf")).any(-1)
    assert torch.allclose(weights.sum(-1), visible.float(), atol=1e-6)
    assert (weights[scores == float("-inf")] == 0).all()


def test_large_scores_do_not_overflow() -> None:
    """D7: the row's largest is subtracted first."""
    weights = normalise(torch.tensor([[[[1e4, 1e4, -1e4]]]]))
    assert weights.tolist() == [[[[0.5, 0.5, 0.0]]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_are_scaled_and_normalised_in_fp32(dtype: torch.dtype) -> None:
    """D7: products 8 and 9 times 0.3 are 2.4 and 2.7, which half precision does not have."""
    q, k = torch.ones(1, 1, 1, 1, dtype=dtype), torch.tensor([8.0, 9, 9], dtype=dtype)[None, None, :, None]
    taps = Taps(["scores", "weights"], ["scores", "weights"])
    visible = torch.ones(1, 1, 3, dtype=torch.bool)
    out = Reference().attend(q, k, torch.zeros_like(k), visible, Score(0.3), tap=taps)
    assert taps["scores"].flatten().tolist() == pytest.approx([2.4, 2.7, 2.7], abs=1e-6)
    assert taps["weights"].flatten().tolist() == pytest.approx([0.270291, 0.364855, 0.364855], abs=1e-6)
    assert out.dtype == dtype


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    """One visible score of 0 and a sink of 0: half the weight is left."""
    weights = normalise(torch.zeros(1, 2, 1, 1), torch.tensor([0.0, 1e9]))
    assert weights.flatten().tolist() == [0.5, 0.0]


def test_a_cap_bounds_scores() -> None:
    """Gemma 2: cap * tanh(score / cap)."""
    q, k, v = torch.randn(1, 1, 4, 8) * 30, torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    visible = Layout.unpadded(1, 4).visible(Everything())
    scores = 5.0 * torch.tanh((q @ k.transpose(-1, -2)) * 8**-0.5 / 5.0)
    expected = scores.softmax(-1) @ v
    assert_close(Reference().attend(q, k, v, visible, Score(cap=5.0), tap=NoTap()), expected)


def attention(node: Node, width: int = 8) -> Attention:
    torch.manual_seed(0)
    module = Attention(node, width)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


class Keep(NoTap):
    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self.values.setdefault(name, value)


def test_a_gate_multiplies_the_heads_by_the_input() -> None:
    """Gated attention: output(sigmoid(W x) * heads); at W = 0 half of what it is without a gate."""
    gated, x = attention(Node(2, 2, 4, projections=Projections(gate="sigmoid"))), torch.randn(1, 5, 8)
    plain = attention(Node(2, 2, 4))
    plain.load_state_dict(gated.state_dict(), strict=False)
    layout = Layout.unpadded(1, 5)
    assert gated.gate is not None
    torch.nn.init.zeros_(gated.gate.weight)
    assert_close(gated(x, layout), plain(x, layout) / 2)
    torch.nn.init.eye_(gated.gate.weight)
    kept = Keep()
    plain(x, layout, tap=kept)
    expected = (kept.values["heads"].flatten(-2) * x.sigmoid()) @ plain.output.weight.T
    assert_close(gated(x, layout), expected)


def test_a_norm_after_rotation_sees_the_rotated_heads() -> None:
    """Llama 4 and metatron. The order matters where the scale is not one number."""
    after = Projections(norm=RMSNorm(eps=0.0), norm_after_rotation=True)
    first, second = (
        attention(Node(2, 2, 4, position=Rotary(100.0), projections=p))
        for p in (after, Projections(norm=RMSNorm(eps=0.0)))
    )
    x, layout = torch.randn(1, 6, 8), Layout.unpadded(1, 6)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for module in (first, second):
        for norm in (module.query_norm, module.key_norm):
            norm.weight.data = scale.clone()  # type: ignore[union-attr]
    raw = first.query(x).unflatten(-1, (2, 4)).transpose(1, 2)
    turned = first.position.turn(raw, layout, keys=False)
    expected = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True)) * scale
    kept = Keep()
    out = first(x, layout, tap=kept)
    assert_close(kept.values["query"], expected)
    assert (out - second(x, layout)).abs().max() > 1e-2


def test_queries_grow_with_the_logarithm_of_their_position() -> None:
    """Llama 4: 1 + factor * ln(1 + floor((position + 1) / floor)), 1 below position floor - 1."""
    node = Node(1, 1, 4, score=Score(query_scale=LogScale(4, 0.1)))
    query = attention(node).scaled_by_position(torch.ones(1, 1, 9, 4), Layout.unpadded(1, 9))
    factors = query[0, 0, :, 0]
    assert factors[:3].tolist() == [1, 1, 1]
    assert factors[3:7].tolist() == pytest.approx([1 + 0.1 * math.log(2)] * 4)
    assert factors[7:].tolist() == pytest.approx([1 + 0.1 * math.log(3)] * 2)


@pytest.mark.parametrize(
    "score", [Additive(4), General(), Concat(4), Location(9)], ids=lambda s: type(s).__name__
)
def test_scores_that_cannot_be_run_are_refused_by_name(score: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(score).__name__} scores can be described but not run"):
        attention(Node(2, 2, 4, score=score))


def test_heads_that_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 heads cannot share 2 key/value heads"):
        Attention(Node(3, 2, 4), 8)


def test_a_sink_far_above_the_scores_takes_all_weight_and_keeps_gradients() -> None:
    """The largest of scores and sink is what exponents are measured from: none overflows."""
    scores = torch.tensor([-200.0, -201.0]).view(1, 1, 1, 2).requires_grad_()
    sink = torch.zeros(1, requires_grad=True)
    weights = normalise(scores, sink)
    weights.sum().backward()
    assert weights.flatten().tolist() == [0, 0]
    assert scores.grad is not None and sink.grad is not None
    assert scores.grad.isfinite().all() and sink.grad.isfinite().all()


def test_queries_grow_before_they_meet_keys() -> None:
    """Llama 4: the factor of a place, 1 + 0.2 ln(1 + floor((place + 1) / 3)), is in what is scored."""
    plain = Node(2, 2, 4, mask=Causal())
    grown = Attention(replace(plain, score=Score(query_scale=LogScale(3, 0.2))), 8)
    for parameter in grown.parameters():
        nn.init.normal_(parameter, std=0.5)
    module = Attention(plain, 8)
    module.load_state_dict(grown.state_dict())
    scores, x, layout = [], torch.randn(1, 7, 8), Layout.unpadded(1, 7)
    for part in (grown, module):
        taps = Taps("scores", ["scores"])
        part(x, layout, tap=taps)
        scores.append(taps["scores"].nan_to_num(neginf=0.0))
    factors = [1 + 0.2 * math.log1p((place + 1) // 3) for place in range(7)]
    assert_close(scores[0], scores[1] * torch.tensor(factors)[:, None])
