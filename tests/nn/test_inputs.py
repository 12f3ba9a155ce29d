"""What tokens become before the first layer, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import RequestError
from qkv.nn import ContiguousCache, Layout, Taps, Transformer, tap_names
from qkv.spec import (
    Attention,
    Axes,
    Dense,
    Everything,
    Language,
    LayerNorm,
    Learned,
    Model,
    Patches,
    Project,
    Rotary,
    Stack,
    Tokens,
    pre_norm,
)
from tests.support import assert_close, random_model

LAYER = pre_norm(Attention(2, 2, 4), Dense("gelu", 12))
EVERYTHING = Tokens(
    11,
    8,
    scale=3.0,
    position=Learned(9, 1),
    types=3,
    norm=LayerNorm(),
    projection=Project(6),
    table_width=5,
)
TOKENS = torch.tensor([[3, 0, 10, 7], [5, 5, 1, 2]])
TYPES = torch.tensor([[0, 2, 1, 0], [1, 1, 0, 2]])


def model(tokens: Tokens) -> Transformer:
    return random_model(Model(decoder=Stack(tokens, (LAYER,)), head=Language(11)))


def embedded(network: Transformer, *given: Any, **more: Any) -> torch.Tensor:
    taps = Taps("embedding", tap_names(network.spec))
    network(*given, tap=taps, **more)
    return taps["embedding"]


def test_rows_are_scaled_widened_summed_normalised_and_projected_in_this_order() -> None:
    network = model(EVERYTHING)
    part: Any = network.decoder.embedding  # type: ignore[union-attr]
    wide = 3.0 * part.weight[TOKENS] @ part.widen.weight.T
    total = wide + part.position.weight[1:5] + part.types.weight[TYPES]
    normed = torch.nn.functional.layer_norm(total, (8,), part.norm.weight, part.norm.bias, eps=1e-5)
    expected = normed @ part.projection.linear.weight.T + part.projection.linear.bias
    assert_close(embedded(network, TOKENS, types=TYPES), expected)


def test_types_are_those_of_the_call_with_a_cache_too() -> None:
    network = model(EVERYTHING)
    cache = ContiguousCache(network.spec.trunk, 2, 4)
    halves = [
        network(TOKENS[:, part], types=TYPES[:, part], cache=cache) for part in (slice(0, 3), slice(3, 4))
    ]
    assert_close(torch.cat(halves, 1), network(TOKENS, types=TYPES))
    assert (network(TOKENS, types=TYPES) - network(TOKENS)).abs().max() > 1e-2


def test_types_in_the_padding_change_nothing() -> None:
    network = model(EVERYTHING)
    layout = Layout.padded(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]))
    other = TYPES.clone()
    other[0, 0] = 2
    before, after = (network(TOKENS, types=types, layout=layout) for types in (TYPES, other))
    assert torch.equal(before[0, 1:], after[0, 1:]) and torch.equal(before[1], after[1])


@pytest.mark.parametrize(
    ("types", "sentence"),
    [
        (TYPES + 1, "Type 3 at place 1 of row 0 is not one of this model's 3."),
        (TYPES - 1, "Type -1 at place 0 of row 0 is not one of this model's 3."),
        (TYPES[:, :3], "Types must be one for each token, (2, 4); got (2, 3)."),
    ],
)
def test_wrong_types_are_refused(types: torch.Tensor, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        model(EVERYTHING)(TOKENS, types=types)
    assert str(problem.value) == sentence


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": TOKENS, "types": TYPES}, "This model has no use for types."),
        ({"tokens": TOKENS, "source": TOKENS}, "This model has no use for source."),
        ({"tokens": TOKENS, "features": torch.zeros(1)}, "This model has no use for features."),
        ({}, "This model reads tokens, and the call gives none."),
        ({"tokens": TOKENS[0]}, "Tokens must be (batch, length), both at least 1; got (4,)."),
        (
            {"tokens": TOKENS + 1},
            "Token 11 at place 2 of row 0 is outside the vocabulary of 11 entries.",
        ),
    ],
)
def test_what_a_plain_model_has_no_use_for_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        model(Tokens(11, 8))(**given)
    assert str(problem.value) == sentence


def seeing(**parts: Any) -> Transformer:
    position = Rotary(100.0, axes=Axes((1, 1), own=True))
    layer = pre_norm(Attention(2, 2, 4, position=position, mask=Everything()), Dense("gelu", 12))
    return random_model(Model(encoder=Stack(Patches(2, 8, (4, 6), channels=3, **parts), (layer,))))


def test_patches_equal_a_convolution_of_torch() -> None:
    network, images = seeing(bias=True), torch.randn(2, 3, 4, 6)
    patch = network.encoder.embedding.patch  # type: ignore[union-attr]
    weight = patch.weight.view(8, 3, 2, 2)  # type: ignore[union-attr, operator]
    expected = torch.conv2d(images, weight, patch.bias, stride=2).flatten(2).mT  # type: ignore[union-attr]
    assert_close(embedded(network, features=images), expected)


def test_patches_stand_at_places_down_and_across() -> None:
    """Positions on two axes see how far apart patches are: rows may be moved together, not alone."""
    network = seeing()
    layout = network.encoder.embedding.layout(torch.zeros(1, 3, 4, 6))  # type: ignore[union-attr, operator]
    assert layout.axes[:, 0].tolist() == [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    images = torch.randn(1, 3, 4, 6, generator=torch.Generator().manual_seed(1))
    plain = network(features=images)
    moved = network(features=images, layout=layout.on_axes(layout.axes + 5))
    assert_close(moved, plain)
    other = network(features=images, layout=layout.on_axes(layout.axes * torch.tensor([[[3]], [[1]]])))
    assert (other - plain).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"tokens": TOKENS}, "This model has no use for tokens."),
        ({}, "This model reads images, as features, and the call gives none."),
        (
            {"features": torch.zeros(1, 4, 4, 6)},
            "Images must be (batch, 3, 4, 6); got (1, 4, 4, 6).",
        ),
    ],
)
def test_a_model_of_images_reads_nothing_else(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        seeing()(**given)
    assert str(problem.value) == sentence
