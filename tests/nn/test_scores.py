"""The scores before the scaled dot product, each against a plain loop over queries and keys; masks; sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.errors import RequestError
from qkv.nn.build import build
from qkv.nn.scores import attend
from qkv.spec import Additive, Concat, Dot, General, Location, Node
from tests.support import assert_close

QUERY, KEY = 4, 6  # widths, alike for a dot product
NODES = [Dot(), General(), Additive(5), Concat(5), Location(8)]
ALL = pytest.mark.parametrize("node", NODES, ids=str)


def widths(node: Node) -> tuple[int, int]:
    return (QUERY, QUERY) if isinstance(node, Dot) else (QUERY, KEY)


def filled(node: Node, std: float = 0.7) -> Any:
    module = build(node, *widths(node))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def inputs(node: Node, batch: int = 2, queries: int = 3, keys: int = 7) -> tuple[Tensor, Tensor]:
    query, key = widths(node)
    return torch.randn(batch, queries, query), torch.randn(batch, keys, key)


def of_pair(module: Any, node: Node, query: list[float], key: list[float], place: int) -> float:
    """One score in plain numbers."""

    def times(matrix: Tensor, vector: list[float]) -> list[float]:
        return [sum(w * x for w, x in zip(row, vector, strict=True)) for row in matrix.tolist()]

    if isinstance(node, Dot):
        return sum(q * k for q, k in zip(query, key, strict=True))
    if isinstance(node, General):
        return sum(q * k for q, k in zip(query, times(module.key.weight, key), strict=True))
    if isinstance(node, Location):
        return times(module.query.weight, query)[place]
    if isinstance(node, Concat):
        hidden = times(module.hidden.weight, query + key)
    else:
        of_query, of_key = times(module.query.weight, query), times(module.key.weight, key)
        hidden = [q + k for q, k in zip(of_query, of_key, strict=True)]
    return times(module.output.weight, [math.tanh(x) for x in hidden])[0]


@ALL
@torch.no_grad()
def test_a_score_is_its_formula_for_every_pair(node: Node) -> None:
    module, (queries, keys) = filled(node), inputs(node)
    expected = [
        [
            [of_pair(module, node, query, key, place) for place, key in enumerate(row_keys)]
            for query in row_queries
        ]
        for row_queries, row_keys in zip(queries.tolist(), keys.tolist(), strict=True)
    ]
    assert_close(module(queries, module.prepared(keys)), torch.tensor(expected))


@ALL
@torch.no_grad()
def test_keys_prepared_once_serve_every_query(node: Node) -> None:
    """A query at a time from one preparation, all at once, and each from a preparation of its own."""
    module, (queries, keys) = filled(node), inputs(node)
    together = module(queries, module.prepared(keys))
    prepared = module.prepared(keys)
    kept = prepared.clone()
    alone = torch.cat([module(query, prepared) for query in queries.split(1, 1)], 1)
    anew = torch.cat([module(query, module.prepared(keys)) for query in queries.split(1, 1)], 1)
    assert_close(alone, together)
    assert_close(anew, together)
    assert torch.equal(prepared, kept)


@ALL
@torch.no_grad()
def test_keys_are_prepared_each_for_itself(node: Node) -> None:
    """Fewer keys give the same scores, cut: padding is never read."""
    module, (queries, keys) = filled(node), inputs(node)
    scores = module(queries, module.prepared(keys))
    assert_close(module(queries, module.prepared(keys[:, :4])), scores[..., :4])


@pytest.mark.parametrize("node", NODES[1:4], ids=str)
@torch.no_grad()
def test_what_is_prepared_is_the_map_of_the_keys(node: Node) -> None:
    """As wide as what the query's map gives: nothing of the keys is left for later."""
    module, (queries, keys) = filled(node), inputs(node)
    prepared = module.prepared(keys)
    assert prepared.shape == (2, 7, QUERY if isinstance(node, General) else 5)
    calls: list[int] = []
    if not isinstance(node, Concat):
        module.key.register_forward_hook(lambda *_: calls.append(1))
    module(queries, prepared)
    assert calls == []


def test_concat_is_additive_with_its_two_maps_side_by_side() -> None:
    additive, concat = filled(Additive(5)), filled(Concat(5))
    with torch.no_grad():
        concat.hidden.weight.copy_(torch.cat([additive.query.weight, additive.key.weight], 1))
        concat.output.weight.copy_(additive.output.weight)
    queries, keys = inputs(Additive(5))
    assert_close(concat(queries, concat.prepared(keys)), additive(queries, additive.prepared(keys)))


def test_a_place_is_scored_whatever_stands_there_and_only_so_many_are() -> None:
    module, (queries, keys) = filled(Location(8)), inputs(Location(8), keys=8)
    assert torch.equal(
        module(queries, module.prepared(keys)), module(queries, module.prepared(torch.randn(2, 8, KEY)))
    )
    with pytest.raises(RequestError, match=r"Location scores reach 8 places, and there are 9."):
        module.prepared(torch.randn(2, 9, KEY))


def test_a_dot_product_takes_two_of_one_width() -> None:
    with pytest.raises(RequestError, match=r"A query of 4 has no dot product with a key of 6."):
        build(Dot(), 4, 6)


@ALL
def test_the_description_counts_the_parameters(node: Node) -> None:
    """By name and shape."""
    sizes = widths(node)
    described = {tensor.name: tensor.shape for tensor in node.tensors(*sizes)}
    assert described == {name: tuple(p.shape) for name, p in build(node, *sizes).named_parameters()}


@pytest.mark.parametrize(
    ("node", "count"),
    [
        (Dot(), 0),
        (General(), 1000 * 2000),
        (Additive(1000), 3_001_000),
        (Concat(1000), 3_001_000),
        (Location(50), 50 * 1000),
    ],
    ids=str,
)
def test_parameters_at_the_size_of_the_papers(node: Node, count: int) -> None:
    """A query of 1000 and keys of 2000: Bahdanau's n'n + 2n'n + n'."""
    assert sum(tensor.size for tensor in node.tensors(1000, 2000)) == count
    if not isinstance(node, Dot):
        with torch.device("meta"):
            module = build(node, 1000, 2000)
        assert sum(parameter.numel() for parameter in module.parameters()) == count


# --- masks ------------------------------------------------------------------------------------


@torch.no_grad()
def test_what_is_hidden_takes_no_weight() -> None:
    scores, values = torch.randn(2, 3, 5), torch.randn(2, 5, 4)
    visible = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]])[:, None] == 1
    mixed, weights = attend(scores, values, visible)
    for row, seen in enumerate(([0, 2, 3], [1])):
        shares = scores[row][:, seen].softmax(-1)
        assert_close(weights[row][:, seen], shares)
        assert_close(mixed[row], shares @ values[row, seen])
    assert not weights.masked_select(~visible.expand_as(weights)).any()
    by_query = visible.expand(2, 3, 5).clone()
    by_query[0, 1] = torch.tensor([0, 0, 0, 0, 1]) == 1
    assert_close(attend(scores, values, by_query).mixed[0, 1], values[0, 4])


@ALL
def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients(node: Node) -> None:
    module, (queries, keys) = filled(node), inputs(node)
    queries.requires_grad_(), keys.requires_grad_()
    visible = torch.ones(2, 3, 7, dtype=torch.bool)
    visible[0, 1] = False
    visible[1] = False
    mixed, weights = attend(module(queries, module.prepared(keys)), keys, visible)
    assert not mixed[0, 1].any() and not weights[0, 1].any() and not mixed[1].any()
    assert_close(weights[0, 0].sum(), torch.tensor(1.0))
    mixed.square().sum().backward()
    leaves = [queries, keys, *module.parameters()]
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
    assert len(grads) >= len(leaves) - isinstance(node, Location)
    assert all(bool(grad.isfinite().all()) for grad in grads)
    assert queries.grad is not None and keys.grad is not None
    assert not queries.grad[1].any() and not keys.grad[1].any() and queries.grad[0, 0].any()
