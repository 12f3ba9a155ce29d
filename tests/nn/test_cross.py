"""Encoder and decoder: cross-attention against torch, what a cache keeps of a source, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from qkv.errors import RequestError, UnsupportedError
from qkv.nn import ContiguousCache, Layout, Taps, Transformer, tap_names
from qkv.nn.attention import CrossAttention
from qkv.nn.layers import Layer
from qkv.nn.layout import Source
from qkv.spec import (
    Attention,
    CrossAttention as Node,
    Dense,
    Projections,
    RMSNorm,
    Score,
    Window,
    post_norm,
    pre_norm,
)
from tests.matrix.variants import BIDIRECTIONAL, ENCODER_DECODERS, VARIANTS, VOCAB
from tests.nn.test_layers import of_attention, pair
from tests.support import assert_close, random_model

WIDTH = 12
BIASED = Projections(bias="qkvo")
SPEC = ENCODER_DECODERS["encoder-decoder-pre-norm"]


def ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def filled(module: Any) -> Any:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


@pytest.mark.parametrize("first", [True, False], ids=["pre", "post"])
@torch.no_grad()
def test_a_decoder_layer_equals_torch(first: bool) -> None:
    """Causal self-attention, cross-attention over a source padded on the right, feed-forward."""
    theirs = filled(nn.TransformerDecoderLayer(WIDTH, 3, 20, 0.0, batch_first=True, norm_first=first))
    slot = "before" if first else "post"
    mixers = (
        Attention(3, 3, 4, projections=BIASED),
        Node(3, 3, 4, WIDTH, projections=BIASED),
        Dense("relu", 20),
    )
    ours: Any = Layer((pre_norm if first else post_norm)(*mixers), WIDTH)
    ours.load_state_dict(
        of_attention(theirs.self_attn, "attention")
        | of_attention(theirs.multihead_attn, "cross")
        | pair("feed_forward.up", theirs.linear1)
        | pair("feed_forward.down", theirs.linear2)
        | pair(f"attention_{slot}", theirs.norm1)
        | pair(f"cross_{slot}", theirs.norm2)
        | pair(f"feed_forward_{slot}", theirs.norm3)
    )
    x, states = torch.randn(2, 7, WIDTH), torch.randn(2, 5, WIDTH)
    present = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) == 1
    places = Layout.unpadded(2, 7)
    layout = Layout(
        places.positions, places.positions, source=Source(states, Layout.padded(present).positions)
    )
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    expected = theirs(x, states, tgt_mask=future, memory_key_padding_mask=~present)
    assert_close(ours(x, layout), expected)


@torch.no_grad()
def test_a_source_of_another_width_and_grouped_heads() -> None:
    """Keys and values of 20 wide rows; each key/value head serves two query heads."""
    module = filled(CrossAttention(Node(4, 2, 6, 20, value_dim=3), WIDTH))
    x, states = torch.randn(2, 3, WIDTH), torch.randn(2, 5, 20)
    layout = Layout(
        torch.zeros(2, 3).long(), torch.zeros(2, 3).long(), source=Source(states, torch.zeros(2, 5).long())
    )
    query = module.query(x).unflatten(-1, (4, 6)).transpose(1, 2)
    key, value = (
        (states @ w.T).unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(2, 1)
        for w in (module.key.weight, module.value.weight)
    )
    mixed = (query @ key.transpose(-1, -2) / 6**0.5).softmax(-1) @ value
    assert_close(module(x, layout), mixed.transpose(1, 2).flatten(-2) @ module.output.weight.T)


@torch.no_grad()
def test_a_mask_may_compare_places_of_both_streams() -> None:
    """Query i sees rows i - 1 to i + 1 of the source, by position and not by slot: it is padded left by 2."""
    module = CrossAttention(Node(1, 1, 1, 1, mask=Window(2, 1)), 1)
    for part in (module.query, module.key):
        nn.init.zeros_(part.weight)
    for part in (module.value, module.output):
        nn.init.ones_(part.weight)
    states = torch.tensor([9.0, 9, 1, 2, 3, 4]).view(1, 6, 1)
    source = Source(states, torch.tensor([[-1, -1, 0, 1, 2, 3]]))
    places = Layout.unpadded(1, 4)
    layout = Layout(places.positions, places.positions, source=source)
    assert module(torch.ones(1, 4, 1), layout).flatten().tolist() == [1.5, 2, 3, 3.5]


# --- the source and the cache -----------------------------------------------------------------


@torch.no_grad()
def test_the_encoder_runs_once_and_its_states_are_let_go() -> None:
    """Later calls read the kept keys and values: nothing of the encoder is run or held."""
    model = random_model(SPEC)
    calls: list[int] = []
    model.encoder.layers[0].register_forward_hook(lambda *_: calls.append(1))
    model.decoder.layers[1].cross.key.register_forward_hook(lambda *_: calls.append(2))
    cache, tokens = ContiguousCache(SPEC.trunk, 2, 6), ids(2, 6)
    model(tokens[:, :3], ids(2, 4), cache=cache)
    for token in tokens[:, 3:].split(1, dim=1):
        model(token, cache=cache)
    assert calls == [1, 2]
    kept = 2 * 4 * 2 * (2 * 2 * 6) * 4  # rows, source, layers, keys and values, bytes
    assert cache.bytes == kept + 2 * 6 * 2 * (2 * 2 * 6) * 4


def test_gradients_reach_the_encoder_from_the_first_call_only() -> None:
    """What a cache keeps of a source is a constant to later calls, as earlier tokens are."""
    model = random_model(SPEC)
    cache, tokens = ContiguousCache(SPEC.trunk, 1, 6), ids(1, 6)
    for part, reached in ((slice(0, 4), True), (slice(4, 6), False)):
        model.zero_grad()
        out = model(tokens[:, part], **({"source": ids(1, 5)} if reached else {}), cache=cache)
        out.square().sum().backward()
        table = model.encoder.embedding.weight.grad
        assert (table is not None and bool(table.abs().max() > 0)) is reached


@torch.no_grad()
def test_a_failed_first_call_leaves_no_source_behind() -> None:
    """After an error the cache is as before: the next call's own source is read."""
    model, tokens = random_model(SPEC), ids(1, 5)
    cache = ContiguousCache(SPEC.trunk, 1, 5)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        model(torch.full((1, 3), VOCAB), ids(1, 4, seed=8), cache=cache)
    again = model(tokens, ids(1, 4, seed=9), cache=cache)
    assert_close(again, model(tokens, ids(1, 4, seed=9)))
    assert cache.length == 5


@torch.no_grad()
def test_a_reset_cache_reads_another_source() -> None:
    model, tokens = random_model(SPEC), ids(1, 5)
    cache = ContiguousCache(SPEC.trunk, 1, 5)
    model(tokens, ids(1, 4, seed=8), cache=cache)
    cache.reset()
    with pytest.raises(RequestError, match="reads a source beside its tokens, and none was given"):
        model(tokens, cache=cache)
    assert_close(model(tokens, ids(1, 6), cache=cache), model(tokens, ids(1, 6)))


def test_what_would_be_ignored_or_mixed_up_is_refused() -> None:
    model, tokens = random_model(SPEC), ids(2, 4)
    cache = ContiguousCache(SPEC.trunk, 2, 8)
    with torch.no_grad():
        first = model(tokens, ids(2, 3), cache=cache)
        with pytest.raises(RequestError, match="already holds what is read: give it at the first call only"):
            model(tokens, ids(2, 3), cache=cache)
        assert_close(torch.cat([first, model(tokens, cache=cache)], 1), model(tokens.repeat(1, 2), ids(2, 3)))
    with pytest.raises(RequestError, match="2 rows of tokens, and 3 of what is read"):
        model(tokens, ids(3, 3))
    with pytest.raises(
        RequestError, match="both the tokens and what they read are packed documents, or neither"
    ):
        model(tokens[:1], ids(1, 3), layout=Layout.packed([2, 2]))
    with pytest.raises(
        RequestError, match="both the tokens and what they read are packed documents, or neither"
    ):
        model(tokens[:1], ids(1, 3), source_layout=Layout.packed([2, 1]))
    with pytest.raises(RequestError, match="no use for source"):
        random_model(VARIANTS["grouped"])(tokens, ids(2, 3))
    module = CrossAttention(Node(1, 1, 2, 4), 4)
    with pytest.raises(UnsupportedError, match="Cross-attention has nothing to read"):
        module(torch.randn(1, 2, 4), Layout.unpadded(1, 2))


@torch.no_grad()
def test_taps_of_both_stacks() -> None:
    """encoder. and decoder. in front, and cross as attention, over query and source."""
    model = random_model(SPEC)
    points = [
        "encoder.layers.1.attention.weights",
        "decoder.layers.0.cross.weights",
        "decoder.layers.0.cross.key",
    ]
    taps = Taps(points, tap_names(SPEC))
    model(ids(2, 5), ids(2, 4), tap=taps)
    assert [tuple(taps[point].shape) for point in points] == [(2, 4, 4, 4), (2, 4, 5, 4), (2, 2, 4, 6)]
    assert_close(taps[points[1]].sum(-1), torch.ones(2, 4, 5))


@torch.no_grad()
def test_an_encoder_alone_gives_states() -> None:
    model: Transformer = random_model(BIDIRECTIONAL["encoder-only"])
    out = model(ids(2, 5))
    assert out.shape == (2, 5, 16) and not model.paired
    # the last step is a norm with scale and bias: undone, every state has mean 0 and variance 1
    norm: Any = model.encoder.layers[-1].feed_forward_post
    plain = (out - norm.bias) / norm.weight
    assert plain.mean(-1).abs().max() < 1e-4
    assert_close(plain.var(-1, correction=0), torch.ones(2, 5), 1e-3)


def test_a_sink_takes_weight_from_what_is_read() -> None:
    """softmax over the scores and one more logit, of which the last has no value."""
    node = Node(2, 2, 3, WIDTH, score=Score(sink=True))
    module, x, states = (
        filled(CrossAttention(node, WIDTH)),
        torch.randn(1, 4, WIDTH),
        torch.randn(1, 5, WIDTH),
    )
    layout = replace(Layout.unpadded(1, 4), source=Source(states, torch.arange(5)[None]))
    query, key, value = module.as_queries(x), module.as_keys(states), module.as_values(states)
    scores = query @ key.transpose(-1, -2) * 3**-0.5
    sink = module.sink[None, :, None, None].expand(1, 2, 4, 1)
    heads = torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ value
    assert_close(module(x, layout), module.output(heads.transpose(1, 2).flatten(-2)))


@torch.no_grad()
def test_norms_after_rotation_are_not_left_out_where_nothing_rotates() -> None:
    norm = RMSNorm(eps=0.0)
    first, second = (
        CrossAttention(
            Node(2, 2, 4, WIDTH, projections=Projections(norm=norm, norm_after_rotation=late)), WIDTH
        )
        for late in (True, False)
    )
    filled(first)
    second.load_state_dict(first.state_dict())
    source = Source(torch.randn(1, 5, WIDTH), torch.arange(5)[None])
    x, layout = torch.randn(1, 3, WIDTH), replace(Layout.unpadded(1, 3), source=source)
    assert_close(first(x, layout), second(x, layout))
    lengths = first.as_queries(x) / first.query_norm.weight  # type: ignore[union-attr, operator]
    assert_close(lengths.square().mean(-1), torch.ones(1, 2, 3))
