"""DeBERTa's disentangled attention against transformers' two implementations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention as First
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DisentangledSelfAttention as Second,
    build_relative_position,
    make_log_bucket_position,
)

from qkv import spec
from qkv.errors import ConfigError
from qkv.nn import Layout
from qkv.nn.attention import Attention
from qkv.nn.disentangled import Disentangled
from qkv.spec import Everything, Projections, RelativeTable
from tests.support import assert_close

WIDTH, HEADS = 16, 4
TERMS = {"c2p": "content_to_position", "p2c": "position_to_content"}
EVERY = [["c2p", "p2c"], ["c2p"], ["p2c"]]


def attention(kinds: list[str], most: int, buckets: int | None, own: bool, bias: str) -> Attention:
    terms = tuple(TERMS[kind] for kind in kinds)
    table = RelativeTable(2 * (buckets or most))
    position = spec.Disentangled(table, terms, most, buckets, own)  # type: ignore[arg-type]
    score = spec.Score((WIDTH // HEADS * (1 + len(kinds))) ** -0.5)
    node = spec.Attention(HEADS, HEADS, 4, score, position, Everything(), projections=Projections(bias=bias))
    module = Attention(node, WIDTH)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    nn.init.eye_(module.output.weight)
    if module.output.bias is not None:
        nn.init.zeros_(module.output.bias)
    return module


def config(kind: Any, kinds: list[str], most: int, **more: Any) -> Any:
    return kind(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        relative_attention=True,
        pos_att_type=kinds,
        max_relative_positions=most,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **more,
    )


@pytest.mark.parametrize("kinds", EVERY, ids=str)
@pytest.mark.parametrize(("most", "buckets"), [(64, 16), (12, None), (5, None), (40, None)])
def test_equals_version_2_through_the_contents_projections(
    kinds: list[str], most: int, buckets: int | None
) -> None:
    """30 tokens: beyond the last distance, within it, and in buckets."""
    ours = attention(kinds, most, buckets, own=False, bias="qkv")
    theirs = Second(
        config(hf.DebertaV2Config, kinds, most, position_buckets=buckets or -1, share_att_key=True)
    ).eval()
    with torch.no_grad():
        for name in ("query", "key", "value"):
            getattr(theirs, f"{name}_proj").weight.copy_(getattr(ours, name).weight)
            getattr(theirs, f"{name}_proj").bias.copy_(getattr(ours, name).bias)
    x, mask = torch.randn(2, 30, WIDTH), torch.ones(2, 1, 30, 30)
    places = build_relative_position(x, x, buckets or -1, most)
    table = ours.position.table.weight  # type: ignore[union-attr]
    expected = theirs(x, mask, relative_pos=places, rel_embeddings=table)[0]
    assert_close(ours(x, Layout.unpadded(2, 30)), expected)


@pytest.mark.parametrize("kinds", EVERY, ids=str)
@pytest.mark.parametrize("most", [40, 12])
def test_equals_version_1_through_projections_of_its_own(kinds: list[str], most: int) -> None:
    ours = attention(kinds, most, None, own=True, bias="qv")
    theirs = First(config(hf.DebertaConfig, kinds, most)).eval()
    with torch.no_grad():
        # theirs keeps each head's query, key and value together
        parts = [getattr(ours, name).weight.view(HEADS, 4, WIDTH) for name in ("query", "key", "value")]
        theirs.in_proj.weight.copy_(torch.stack(parts, 1).view(-1, WIDTH))
        theirs.q_bias.copy_(ours.query.bias), theirs.v_bias.copy_(ours.value.bias)
        if "c2p" in kinds:
            theirs.pos_proj.weight.copy_(ours.position.key.weight)  # type: ignore[union-attr]
        if "p2c" in kinds:
            theirs.pos_q_proj.load_state_dict(ours.position.query.state_dict())  # type: ignore[union-attr]
    x, mask = torch.randn(2, 30, WIDTH), torch.ones(2, 1, 30, 30)
    table = ours.position.table.weight  # type: ignore[union-attr]
    expected = theirs(x, mask, relative_pos=build_relative_position(x, x), rel_embeddings=table)[0]
    assert_close(ours(x, Layout.unpadded(2, 30)), expected)


@pytest.mark.parametrize(("most", "buckets"), [(512, 256), (128, 32), (64, 16), (12, 8), (20, 16)])
def test_buckets_are_those_of_version_2(most: int, buckets: int) -> None:
    """Half of a side for one distance each, the other half growing; both ends of the table."""
    node = spec.Disentangled(RelativeTable(2 * buckets), max_distance=most, buckets=buckets)
    behind = torch.arange(-700, 701)
    ours = Disentangled(node, 4, 1, 4).rows(Layout(torch.tensor([[700]]), (700 - behind)[None]))[0, 0]
    theirs = make_log_bucket_position(behind, buckets, most).long() + buckets
    assert torch.equal(ours, theirs.clamp(0, 2 * buckets - 1))


def test_the_first_distances_have_a_bucket_each() -> None:
    """DeBERTa v3: 256 a side of 512 distances: 128 exact, 511 in the 255th, all further ones in the last."""
    node = spec.Disentangled(RelativeTable(512), max_distance=512, buckets=256)
    starts = node.starts()
    assert starts[:129] == tuple(range(1, 130))
    assert starts[254] <= 511 and starts[255] == 512 and len(starts) == 256


def test_both_terms_at_a_distance_read_the_row_of_query_minus_key() -> None:
    """One row of the table is not zero, that of distance 2: only pairs two apart score, in both terms."""
    for kinds in (["c2p"], ["p2c"]):
        module = attention(kinds, 6, None, own=False, bias="")
        table = module.position.table.weight.data  # type: ignore[union-attr]
        table[[row for row in range(12) if row != 6 + 2]] = 0
        x = torch.randn(1, 6, WIDTH)
        bias = module.position.bias(module.as_queries(x), module.as_keys(x), Layout.unpadded(1, 6), module)
        assert bias is not None
        touched = bias[0].abs().amax(0) > 0
        assert torch.equal(touched, torch.diag(torch.ones(4, dtype=torch.bool), -2))


def test_a_norm_of_the_table_is_applied_before_the_projections() -> None:
    plain = attention(["c2p", "p2c"], 6, None, own=False, bias="")
    node = plain.node.position
    assert isinstance(node, spec.Disentangled)
    table = RelativeTable(12, norm=spec.LayerNorm(eps=1e-7))
    normed = Disentangled(spec.Disentangled(table, node.terms, 6), WIDTH, HEADS, 4)
    raw = torch.randn(12, WIDTH)
    with torch.no_grad():
        normed.table.weight.copy_(raw)
        nn.init.ones_(normed.table.norm.weight), nn.init.zeros_(normed.table.norm.bias)
        plain.position.table.weight.copy_(nn.functional.layer_norm(raw, (WIDTH,), eps=1e-7))  # type: ignore[union-attr]
    x, layout = torch.randn(1, 7, WIDTH), Layout.unpadded(1, 7)
    query, key = plain.as_queries(x), plain.as_keys(x)
    assert_close(normed.bias(query, key, layout, plain), plain.position.bias(query, key, layout, plain))


def test_a_table_or_buckets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="A table of 6 rows does not hold 512 a side; it must have 1,024"):
        Disentangled(spec.Disentangled(RelativeTable(6)), 4, 1, 4)
    for buckets, most in ((7, 64), (2, 64), (32, 16)):
        node = spec.Disentangled(RelativeTable(2 * buckets), max_distance=most, buckets=buckets)
        with pytest.raises(ConfigError, match="buckets do not divide distances"):
            Disentangled(node, 4, 1, 4)


def test_heads_of_a_group_read_the_same_keys() -> None:
    """Four heads over two key heads are four over four, each key head standing twice side by side."""
    position = spec.Disentangled(RelativeTable(8), max_distance=4)
    grouped, whole = (
        Attention(spec.Attention(HEADS, kv, 4, position=position, mask=Everything()), WIDTH) for kv in (2, 4)
    )
    for parameter in grouped.parameters():
        nn.init.normal_(parameter, std=0.5)
    state = grouped.state_dict()
    for name in ("key.weight", "value.weight"):
        state[name] = state[name].unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1)
    whole.load_state_dict(state)
    x, layout = torch.randn(2, 7, WIDTH), Layout.unpadded(2, 7)
    assert_close(grouped(x, layout), whole(x, layout))
