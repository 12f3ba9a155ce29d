"""Attention weights and what is made of them, each beside plain loops."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import Reading, attention_flow, attention_maps, norm_weighted, rollout
from qkv.explanation.flow import most_flow
from qkv.nn import Transformer
from qkv.nn.choice import named, use
from qkv.spec import Causal, pre_norm
from tests.explanation.cases import ENCODERS, TOKENS, network, reading, tapped
from tests.matrix.variants import VARIANTS, attention, model
from tests.support import assert_close, random_model

MAPS = ["grouped", "biased", "parallel", "alibi", "post-norm", "window", "cap", "latent", *ENCODERS]


@pytest.mark.parametrize("variant", MAPS)
def test_maps_are_the_models_weights_rows_sum_to_one_and_hidden_keys_get_none(variant: str) -> None:
    found = attention_maps(reading(variant))
    assert [axis.name for axis in found.axes] == ["layer", "head", "query", "key"]
    np.testing.assert_allclose(found.values.sum(-1), 1, atol=1e-6)
    for layer in found.axes[0].labels:
        point = f"layers.{layer}.attention.weights"
        _, taps = tapped(variant, [point])
        assert_close(found.at(layer=layer).values, taps[point][0])
    if isinstance(network(variant).spec.trunk.layers[0].mixers()[0][1].mask, Causal):
        assert (np.triu(found.values, 1) == 0).all()


def test_a_sink_takes_its_part_of_a_row() -> None:
    rows = attention_maps(reading("sink")).values.sum(-1)
    assert (rows < 1).all() and (rows > 0).all()


def test_weights_are_shown_where_a_fused_kernel_runs_and_the_answer_is_unchanged() -> None:
    """Case I1: the right weights, and the same answer before, while and after they are asked for."""
    fused = random_model(VARIANTS["grouped"])
    use(fused, named("sdpa"))
    before = fused(TOKENS)
    found = attention_maps(Reading(fused, TOKENS))
    assert_close(found.values, attention_maps(reading("grouped")).values)
    assert torch.equal(fused(TOKENS), before)
    assert_close(before, network("grouped")(TOKENS))


def test_equal_scores_share_attention_among_what_is_seen() -> None:
    """Case I1: [1, 0, 0], [.5, .5, 0], [1/3, 1/3, 1/3]."""
    even = random_model(VARIANTS["grouped"])
    with torch.no_grad():
        for name, parameter in even.named_parameters():
            if "attention.query" in name:
                parameter.zero_()
    found = attention_maps(Reading(even, TOKENS[:, :3])).at(layer=1, head=2).values
    np.testing.assert_allclose(found, [[1, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3], atol=1e-6)


def test_layers_with_other_heads_have_nothing_there() -> None:
    spec = model(pre_norm(attention(4, 2)), pre_norm(attention(2, 2)))
    found = attention_maps(Reading(random_model(spec), TOKENS))
    assert found.values.shape[:2] == (2, 4)
    assert np.isnan(found.at(layer=1).values[2:]).all() and not np.isnan(found.at(layer=1).values[:2]).any()


def test_an_encoder_decoder_shows_each_of_its_three_attentions() -> None:
    one = reading("encoder-decoder-pre-norm")
    assert attention_maps(one).values.shape == (2, 4, 7, 7)
    assert attention_maps(one, side=0).values.shape == (2, 4, 4, 4)
    cross = attention_maps(one, role="cross")
    assert cross.values.shape == (2, 4, 7, 4)
    assert cross.axes[0].labels == ("decoder.0", "decoder.1")
    np.testing.assert_allclose(cross.values.sum(-1), 1, atol=1e-6)


def rolled(weights: np.ndarray) -> np.ndarray:
    """Abnar and Zuidema 2020, section 3.1, entry by entry; weights (layer, head, query, key)."""
    layers, heads, size, _ = weights.shape
    before = [[float(i == j) for j in range(size)] for i in range(size)]
    out = []
    for layer in range(layers):
        step = [[0.0] * size for _ in range(size)]
        for i in range(size):
            for j in range(size):
                step[i][j] = 0.5 * sum(weights[layer, h, i, j] for h in range(heads)) / heads + 0.5 * (i == j)
            total = sum(step[i])
            step[i] = [one / total for one in step[i]]
        before = [
            [sum(step[i][m] * before[m][j] for m in range(size)) for j in range(size)] for i in range(size)
        ]
        out.append(before)
    return np.array(out)


@pytest.mark.parametrize("variant", [*MAPS, "sink", "deep-norm"])
def test_rollout_is_the_product_of_halved_steps_and_its_rows_sum_to_one(variant: str) -> None:
    found = rollout(reading(variant))
    assert [axis.name for axis in found.axes] == ["layer", "query", "key"]
    np.testing.assert_allclose(found.values.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(found.values, rolled(attention_maps(reading(variant)).values), atol=1e-6)


def test_rollout_of_an_encoder_that_a_decoder_reads() -> None:
    found = rollout(reading("encoder-decoder-pre-norm"), side=0)
    weights = attention_maps(reading("encoder-decoder-pre-norm"), side=0).values
    np.testing.assert_allclose(found.values, rolled(weights), atol=1e-6)


@pytest.mark.parametrize(
    "variant, what", [("delta-then-attention", "GatedDelta"), ("encoder-decoder-pre-norm", "CrossAttention")]
)
def test_rollout_is_refused_where_more_than_self_attention_mixes(variant: str, what: str) -> None:
    for method in (rollout, attention_flow):
        with pytest.raises(UnsupportedError, match=f"mixes tokens by {what} too"):
            method(reading(variant))


def least_cut(steps: list[np.ndarray], query: int, key: int) -> float:
    """Of all ways to part the nodes in two, the least capacity across: Ford and Fulkerson 1956."""
    size, depth = len(steps[0]), len(steps)
    nodes = [(d, t) for d in range(depth + 1) for t in range(size)]
    inner = [node for node in nodes if node not in ((depth, query), (0, key))]
    best = float("inf")
    for count in range(len(inner) + 1):
        for chosen in combinations(inner, count):
            side = {(depth, query), *chosen}
            across = sum(
                steps[d - 1][i][j]
                for d in range(1, depth + 1)
                for i in range(size)
                for j in range(size)
                if (d, i) in side and (d - 1, j) not in side
            )
            best = min(best, across)
    return best


@pytest.mark.parametrize("query, key", [(2, 0), (1, 1), (0, 2)])
def test_the_most_that_flows_is_the_least_that_can_be_cut(query: int, key: int) -> None:
    generator = np.random.default_rng(1)
    steps = [row / row.sum(-1, keepdims=True) for row in generator.random((3, 3, 3)) ** 3]
    assert most_flow(steps, query, key) == pytest.approx(least_cut(steps, query, key), abs=1e-9)


def test_a_flow_that_must_turn_back_is_found() -> None:
    """The shortest way first taken blocks the two others, unless it gives back what it took."""
    up = np.array([[1.0, 1.0], [0.0, 0.0]])
    across = np.array([[1.0, 0.0], [1.0, 0.0]])
    assert most_flow([across, up], 0, 0) == 2
    assert most_flow([np.eye(2), up], 0, 1) == 1


def test_flow_of_a_model_is_over_its_halved_steps() -> None:
    found = attention_flow(reading("grouped", TOKENS[:, :3]), queries=[-1, 0])
    weights = attention_maps(reading("grouped", TOKENS[:, :3])).values.mean(1)
    steps = list((weights + np.eye(3)) / 2)
    assert found.values.shape == (2, 3)
    for row, query in enumerate((2, 0)):
        for key in range(3):
            assert found.values[row, key] == pytest.approx(least_cut(steps, query, key), abs=1e-6)
    with pytest.raises(RequestError, match="up to 64 tokens, and here are 65"):
        attention_flow(reading("grouped", TOKENS[:, :1].expand(1, 65)))


def added(variant: str, layer: int) -> tuple[np.ndarray, torch.Tensor]:
    """Vectors each key adds to each query, (head, query, key, width), by loops, and what they sum to."""
    names = [f"layers.{layer}.attention.{name}" for name in ("weights", "value", "output")]
    _, taps = tapped(variant, names)
    weights, value, output = (taps[name][0] for name in names)
    module: Transformer = network(variant)
    linear = module.trunk.layers[layer].get_submodule("attention").get_submodule("output")
    matrix, bias = linear.get_parameter("weight").detach(), linear._parameters.get("bias")
    heads, dim = len(weights), value.shape[-1]
    vectors = np.zeros((*weights.shape, len(matrix)))
    for h in range(heads):
        for i in range(weights.shape[1]):
            for j in range(weights.shape[2]):
                mixed = weights[h, i, j] * value[h // (heads // len(value)), j]
                vectors[h, i, j] = (matrix[:, h * dim : (h + 1) * dim] @ mixed).numpy()
    return vectors, output - (0 if bias is None else bias.detach())


@pytest.mark.parametrize("variant", ["grouped", "biased", "post-norm", "values-are-keys", "values-scaled"])
def test_norm_weighted_attention_is_the_length_of_what_a_key_adds(variant: str) -> None:
    """And those vectors sum to the output, less its bias."""
    found = norm_weighted(reading(variant))
    for layer in (0, 1):
        vectors, output = added(variant, layer)
        assert_close(vectors.sum((0, 2)), output)
        assert_close(found.at(layer=layer).values, np.linalg.norm(vectors, axis=-1))


@pytest.mark.parametrize(
    "variant, why",
    [("gated-heads", "gates its heads"), ("shaw", "vectors of distances"), ("latent", "latent")],
)
def test_norm_weighted_attention_is_refused_where_shares_are_no_products(variant: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        norm_weighted(reading(variant))


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no attention to look at"):
        attention_maps(reading("gated-delta"))
