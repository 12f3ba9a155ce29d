"""Positions that bias the score: slopes, buckets, Shaw's vectors and Transformer-XL's sinusoids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from qkv import spec
from qkv.errors import ConfigError
from qkv.nn import ContiguousCache, Layout, Taps, tap_names
from qkv.nn.attention import Attention
from qkv.nn.backends import normalise
from qkv.nn.biases import Buckets, steps
from qkv.nn.positions import sinusoids
from qkv.spec import Causal, Everything
from tests.matrix.variants import BIASES, VARIANTS, VOCAB
from tests.support import assert_close, random_model, relative

WIDTH = 16


def attention(position: spec.Position | None, heads: int = 4, kv_heads: int = 4, **parts: Any) -> Attention:
    """With random weights, large enough that a bias shows."""
    module = Attention(spec.Attention(heads, kv_heads, 4, position=position, **parts), WIDTH)
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def bias_of(module: Attention, x: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
    layout = layout or Layout.unpadded(*x.shape[:2])
    bias = module.position.bias(module.as_queries(x), module.as_keys(x), layout, module)
    assert bias is not None and bias.dtype == torch.float32
    return bias


# --- ALiBi (D14) ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (3, [1 / 16, 1 / 256, 1 / 4]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [2.0**-i for i in range(1, 9)] + [0.707107, 0.353553, 0.176777, 0.088388]),
    ],
)
def test_slopes_of_any_number_of_heads(heads: int, slopes: list[float]) -> None:
    """D14, case P14."""
    assert spec.Alibi().slopes(heads) == pytest.approx(slopes, abs=5e-7)


@pytest.mark.parametrize("heads", [1, 4, 5, 6, 8, 12, 16, 112])
def test_slopes_are_those_of_mpt_and_bloom(heads: int) -> None:
    ours = torch.tensor(spec.Alibi().slopes(heads))
    mpt = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert torch.allclose(ours, mpt, rtol=1e-6, atol=0) and torch.allclose(ours, bloom, rtol=1e-6, atol=0)
    steeper = -build_mpt_alibi_tensor(heads, 2, alibi_bias_max=16)[:, 0, 0]
    assert torch.allclose(torch.tensor(spec.Alibi(16.0).slopes(heads)), steeper, rtol=1e-6, atol=0)


def test_slopes_are_not_trained() -> None:
    """D14: they are constants of the description; there is nothing to learn or to store."""
    module = attention(spec.Alibi())
    assert not list(module.position.parameters()) and not module.position.state_dict()


def test_a_cached_query_is_penalised_from_where_it_stands() -> None:
    """Case P14: a query at 5 and slope .5: -2.5 ... 0, and a constant on the row changes no weight."""
    module = attention(spec.Alibi(), 8, 8)
    layout = Layout(torch.tensor([[5]]), torch.arange(6)[None])
    bias = module.position.bias(torch.zeros(1, 8, 1, 4), torch.zeros(1, 8, 6, 4), layout, module)
    assert bias is not None
    assert bias[0, 0, 0].tolist() == [-2.5, -2, -1.5, -1, -0.5, 0]
    assert torch.allclose(normalise(bias), normalise(bias + 7.0), atol=1e-6)


def test_slopes_times_the_key_alone_give_the_same_weights_under_a_causal_mask() -> None:
    """D14: BLOOM's form, by shift invariance."""
    module, x = attention(spec.Alibi()), torch.randn(2, 9, WIDTH)
    layout, bias = Layout.unpadded(2, 9), bias_of(module, x)
    scores = module.as_queries(x) @ module.as_keys(x).transpose(-1, -2) * module.scale
    theirs = torch.tensor(spec.Alibi().slopes(4))[:, None, None] * torch.arange(9)
    hidden = ~layout.visible(Causal())[:, None]
    ours = normalise((scores + bias).masked_fill(hidden, float("-inf")))
    assert_close(ours, normalise((scores + theirs).masked_fill(hidden, float("-inf"))))


@pytest.mark.parametrize("position", [spec.Alibi(), spec.Buckets(8, 10)], ids=["alibi", "buckets"])
def test_slopes_and_buckets_are_not_scaled_with_the_scores(position: spec.Position) -> None:
    """D13, D14: the bias is what is added, whatever the scale."""
    x, layout = torch.randn(1, 6, WIDTH), Layout.unpadded(1, 6)
    module = attention(position, mask=Everything())
    taps = Taps(["scores"], ["scores"])
    nn.init.zeros_(module.query.weight)
    module(x, layout, tap=taps)
    assert torch.equal(taps["scores"], bias_of(module, x))


def test_looking_both_ways_a_key_costs_its_distance() -> None:
    bias = bias_of(attention(spec.Alibi()), torch.randn(1, 5, WIDTH))
    assert torch.equal(bias, bias.transpose(-1, -2)) and (bias[..., 0, 1:] < 0).all()


# --- T5 (D13) ---------------------------------------------------------------------------------


def bucket(node: spec.Buckets, distance: int) -> int:
    layout = Layout(torch.tensor([[1000]]), torch.tensor([[1000 + distance]]))
    return int(Buckets(node, 1, 1, 1).of(layout))


def test_where_buckets_start_looking_both_ways() -> None:
    """D13: 8:8, 9:12, ...; distance is key minus query."""
    node = spec.Buckets()
    assert node.starts()[7:] == (8, 12, 16, 23, 32, 46, 64, 91)
    for place, start in enumerate(node.starts()[7:], 8):
        assert bucket(node, -start) == place and bucket(node, -start + 1) == place - 1
        assert bucket(node, start) == place + 16
    expected = {1: 17, -1: 1, 8: 24, 128: 31, -128: 15, 500: 31, -500: 15, 0: 0}
    assert {d: bucket(node, d) for d in expected} == expected


def test_where_buckets_start_looking_back() -> None:
    """D13: 16:16, 17:19, 18:21, 19:24, 20:27, 24:46, 28:77, 31:113; the future has bucket 0."""
    node = spec.Buckets(bidirectional=False)
    expected = {16: 16, 17: 19, 18: 21, 19: 24, 20: 27, 24: 46, 28: 77, 31: 113}
    assert {place: node.starts()[place - 1] for place in expected} == expected
    assert [bucket(node, d) for d in (1, 50, 0, -15, -16, -18, -19, -113, -112)] == [
        0,
        0,
        0,
        15,
        16,
        16,
        17,
        31,
        30,
    ]


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 10), (16, 64), (32, 1000), (64, 256)])
def test_buckets_are_those_of_transformers(both: bool, buckets: int, furthest: int) -> None:
    """Theirs goes through fp32 logarithms, which agree at these sizes."""
    ahead = torch.arange(-1200, 1201)
    layout = Layout(torch.tensor([[1200]]), (1200 + ahead)[None])
    ours = Buckets(spec.Buckets(buckets, furthest, both), 1, 1, 1).of(layout)[0, 0]
    theirs = T5Attention._relative_position_bucket(ahead, both, buckets, furthest)
    assert torch.equal(ours, theirs)


def test_a_bucket_whose_start_is_whole_begins_there() -> None:
    """4 * (40,000 / 4)^(k / 4) is 40, 400, 4000."""
    assert spec.Buckets(8, 40_000, bidirectional=False).starts() == (1, 2, 3, 4, 40, 400, 4000)


def test_buckets_that_hold_nothing_are_refused() -> None:
    for node in (spec.Buckets(2, 128), spec.Buckets(32, 8), spec.Buckets(1, 4, bidirectional=False)):
        with pytest.raises(ConfigError, match="buckets do not divide distances"):
            attention(node)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_t5s_attention(causal: bool) -> None:
    config = hf.T5Config(d_model=WIDTH, d_kv=4, num_heads=4, is_decoder=causal, attn_implementation="eager")
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    mask = Causal() if causal else Everything()
    ours = attention(spec.Buckets(bidirectional=not causal), score=spec.Dot(), mask=mask)
    pairs = {"query": theirs.q, "key": theirs.k, "value": theirs.v, "output": theirs.o}
    with torch.no_grad():
        for name, linear in pairs.items():
            linear.weight.copy_(getattr(ours, name).weight)
        theirs.relative_attention_bias.weight.copy_(ours.position.weight)
    x, layout = torch.randn(2, 150, WIDTH), Layout.unpadded(2, 150)
    additive = torch.zeros(150, 150).masked_fill(~layout.visible(mask)[0], float("-inf"))
    expected = theirs(x, mask=additive[None, None])[0]
    assert_close(ours(x, layout), expected)


def test_buckets_are_worked_out_once_a_call_and_the_shared_table_learns_from_every_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, of = [], Buckets.of
    monkeypatch.setattr(Buckets, "of", lambda self, layout: calls.append(1) or of(self, layout))
    shared, apart = random_model(VARIANTS["buckets"]), random_model(VARIANTS["buckets-each"])
    apart.load_state_dict(shared.state_dict())
    tokens = torch.randint(0, VOCAB, (2, 7))
    for model in (shared, apart):
        model(tokens).square().sum().backward()
    assert len(calls) == 2  # one a model, of two layers each
    tables = [
        [layer.attention.position.weight for layer in model.decoder.layers]  # type: ignore[union-attr]
        for model in (shared, apart)
    ]
    assert tables[0][0] is tables[0][1] and tables[1][0] is not tables[1][1]
    assert all(table.grad.abs().max() > 0 for table in tables[1])
    assert_close(tables[0][0].grad, tables[1][0].grad + tables[1][1].grad)


# --- Shaw (D11) -------------------------------------------------------------------------------


def test_rows_of_clipped_distances() -> None:
    """D11: k = 2 and five tokens."""
    rows = attention(spec.Shaw(2)).position.clipped(Layout.unpadded(1, 5))[0]  # type: ignore[operator]
    assert rows.tolist() == [
        [2, 3, 4, 4, 4],
        [1, 2, 3, 4, 4],
        [0, 1, 2, 3, 4],
        [0, 0, 1, 2, 3],
        [0, 0, 0, 1, 2],
    ]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_a_vector_for_every_pair(per_head: bool, values: bool, kv_heads: int) -> None:
    """D11: the efficient form equals q . (k + a) and weights . (v + a) written out."""
    module = attention(spec.Shaw(3, values, per_head), 4, kv_heads)
    x, layout = torch.randn(2, 9, WIDTH), Layout.unpadded(2, 9)
    place, groups = torch.arange(9), 4 // kv_heads
    rows = (place[None] - place[:, None]).clamp(-3, 3) + 3

    def pairwise(table: torch.Tensor) -> torch.Tensor:
        chosen = table[rows]  # (query, key, [heads,] dim)
        return chosen.permute(2, 0, 1, 3) if per_head else chosen[None]

    query = module.as_queries(x)
    key, value = (t.repeat_interleave(groups, 1) for t in (module.as_keys(x), module.as_values(x)))
    keys = key[:, :, None] + pairwise(module.position.key.weight)  # type: ignore[union-attr]
    scores = (query[:, :, :, None] * keys).sum(-1) / 4**0.5
    weights = normalise(scores.masked_fill(~layout.visible(Causal())[:, None], float("-inf")))
    mixed = value[:, :, None].expand(-1, -1, 9, -1, -1)
    if values:
        mixed = mixed + pairwise(module.position.value.weight)  # type: ignore[union-attr]
    heads = (weights[..., None] * mixed).sum(-2)
    expected = heads.transpose(1, 2).flatten(-2) @ module.output.weight.T
    assert_close(module(x, layout), expected)


def test_vectors_of_zero_are_no_positions() -> None:
    """D11: w = 0 gives attention without positions."""
    module, plain = attention(spec.Shaw(3)), attention(None)
    plain.load_state_dict(module.state_dict(), strict=False)
    for table in module.position.parameters():
        nn.init.zeros_(table)
    x, layout = torch.randn(1, 8, WIDTH), Layout.unpadded(1, 8)
    assert_close(module(x, layout), plain(x, layout))


def test_vectors_on_values_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="values of size 6"):
        attention(spec.Shaw(3), value_dim=6)
    attention(spec.Shaw(3, values=False), value_dim=6)


# --- Transformer-XL (D12) ---------------------------------------------------------------------


def shifted(products: torch.Tensor, queries: int) -> torch.Tensor:
    """The paper's appendix B: one zero column, reshaped, the first row dropped."""
    *rows, keys = products.shape
    padded = torch.cat([products.new_zeros(*rows, 1), products], -1)
    return padded.view(*rows[:-1], keys + 1, queries)[..., 1:, :].reshape(*rows, keys)


def test_equals_the_relative_shift() -> None:
    """D12: distances from K - 1 down to 0, shifted; entries past the causal line are rubbish."""
    module, x = attention(spec.RelativeSinusoidal()), torch.randn(2, 9, WIDTH)
    layout = Layout(torch.arange(4, 9).expand(2, 5), torch.arange(9).expand(2, 9))  # a memory of four
    query, key, position = module.as_queries(x)[:, :, 4:], module.as_keys(x), module.position
    u, v = position.biases.content[:, None], position.biases.distance[:, None]  # type: ignore[union-attr]
    r = position.key(sinusoids(torch.arange(8, -1, -1), WIDTH, 1e4, "halves"))  # type: ignore[operator]
    r = r.unflatten(-1, (4, 4)).transpose(0, 1)
    terms = (u @ key.transpose(-1, -2)) + shifted((query + v) @ r.transpose(-1, -2), 5)
    bias = position.bias(query, key, layout, module)
    assert bias is not None
    seen = layout.visible(Causal())[:, None].expand_as(bias)
    assert_close(bias[seen], terms[seen] / 2)
    assert (bias[~seen] - terms[~seen] / 2).abs().max() > 1e-2


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_the_four_terms_written_out(kv_heads: int) -> None:
    """D12: E_i Wq . (W_E E_j + W_R R_ij) + u . W_E E_j + v . W_R R_ij, all over sqrt(head_dim)."""
    module = attention(spec.RelativeSinusoidal(), 4, kv_heads, mask=Everything())
    x, position = torch.randn(1, 6, WIDTH), module.position
    query, key = module.as_queries(x)[0], module.as_keys(x)[0]
    taps = Taps(["scores"], ["scores"])
    module(x, Layout.unpadded(1, 6), tap=taps)
    u, v = position.biases.content, position.biases.distance  # type: ignore[union-attr]
    for head in range(4):
        shared = head // (4 // kv_heads)
        for i in range(6):
            for j in range(6):
                sinusoid = sinusoids(torch.tensor(i - j), WIDTH, 1e4, "halves")
                r = position.key(sinusoid).unflatten(-1, (4, 4))[head]  # type: ignore[operator]
                score = query[head, i] @ (key[shared, j] + r) + u[head] @ key[shared, j] + v[head] @ r
                assert float(taps["scores"][0, head, i, j].detach()) == pytest.approx(
                    float(score.detach()) / 2, abs=1e-5
                )


def test_equals_xlnets_attention() -> None:
    """Another implementation of the same four terms, looking both ways."""
    module = attention(spec.RelativeSinusoidal(), mask=Everything())
    config = hf.XLNetConfig(d_model=WIDTH, n_head=4, d_head=4, d_inner=8, n_layer=1, dropout=0.0)
    theirs, x = XLNetRelativeAttention(config), torch.randn(2, 11, WIDTH)
    position, by_head = module.position, (WIDTH, 4, 4)
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(theirs, name[0]).copy_(getattr(module, name).weight.T.reshape(by_head))
        theirs.r.copy_(position.key.weight.T.reshape(by_head))  # type: ignore[union-attr]
        theirs.o.copy_(module.output.weight.reshape(by_head))
        theirs.r_w_bias.copy_(position.biases.content)  # type: ignore[union-attr]
        theirs.r_r_bias.copy_(position.biases.distance)  # type: ignore[union-attr]
    q, k, v = (torch.einsum("bih,hnd->ibnd", x, w) for w in (theirs.q, theirs.k, theirs.v))
    r = sinusoids(torch.arange(11, -11, -1), WIDTH, 1e4, "halves")[:, None].expand(-1, 2, -1)
    heads = theirs.rel_attn_core(q, k, v, torch.einsum("ibh,hnd->ibnd", r, theirs.r))
    expected = torch.einsum("ibnd,hnd->bih", heads, theirs.o)
    assert_close(module(x, Layout.unpadded(2, 11)), expected)


def test_segments_with_memory_equal_one_pass_at_every_layer() -> None:
    """D12: a memory at least as long as the segment."""
    model = random_model(VARIANTS["transformer-xl"])
    tokens, names = torch.randint(0, VOCAB, (2, 12)), tap_names(model.spec)
    whole = Taps(["layers.*.output"], names)
    model(tokens, tap=whole)
    cache, parts = ContiguousCache(model.spec.trunk, 2, 12), Taps(["layers.*.output"], names)
    for segment in tokens.split(6, dim=1):
        model(segment, cache=cache, tap=parts)
    for name in whole:
        assert_close(torch.cat(parts.history[name], 1), whole[name])


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_model_is_near_the_exact_one(name: str, dtype: torch.dtype) -> None:
    """Biases are fp32 whatever the stream; whole and through a cache."""
    exact, half = (random_model(VARIANTS[name], std=0.2) for _ in range(2))
    tokens, half = torch.randint(0, VOCAB, (2, 12)), half.to(dtype)
    cache = ContiguousCache(half.spec.trunk, 2, 12, dtype)
    cached = torch.cat([half(piece, cache=cache) for piece in tokens.split([5, 7], dim=1)], 1)
    assert cached.dtype == dtype
    assert relative(half(tokens), exact(tokens)) < 2e-2
    assert relative(cached, exact(tokens)) < 2e-2


def test_steps_count_the_starts_that_are_reached() -> None:
    assert steps((1, 2, 5, 5), torch.tensor([0, 1, 2, 4, 5, 9])).tolist() == [0, 1, 2, 2, 4, 4]


def test_shaw_scales_its_keys_as_the_content_is_scaled() -> None:
    """With a scale of its own: q . (k + key[distance]) times that, by a loop."""
    node = spec.Attention(1, 1, 4, score=spec.Score(0.2), position=spec.Shaw(2, values=False))
    module = Attention(node, 4)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.7)
    x, table = torch.randn(1, 5, 4), module.position.key.weight
    q, k, v = module.query(x)[0], module.key(x)[0], module.value(x)[0]
    rows = []
    for i in range(5):
        scores = torch.stack([0.2 * q[i] @ (k[j] + table[max(j - i, -2) + 2]) for j in range(i + 1)])
        rows.append(scores.softmax(0) @ v[: i + 1])
    assert_close(module(x, Layout.unpadded(1, 5))[0], module.output(torch.stack(rows)))
