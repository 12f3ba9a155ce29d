"""Every backend equals the reference, over every variant; what one lacks it refuses by name."""

from __future__ import annotations

import math

import pytest
import torch

from qkv.errors import UnsupportedError
from qkv.nn import ContiguousCache, Layout, Taps, Transformer, tap_names
from qkv.nn.backends import Backend, Reference
from qkv.nn.choice import use
from qkv.nn.flex import Flex
from qkv.nn.sdpa import SDPA
from qkv.spec import Score
from tests.matrix.test_invariants import ALL, LENGTH, beside, built, some_tokens
from tests.support import assert_close, relative

BACKENDS: dict[str, Backend] = {"sdpa": SDPA(), "flex": Flex(compiled=False)}
LACKING = {("sdpa", "cap"): "a soft cap"} | {
    (backend, name): "positions on the values"
    for backend in BACKENDS
    for name in ALL
    if "shaw" in name and "keys-only" not in name
}


def layouts() -> dict[str, Layout]:
    present = torch.ones(2, LENGTH, dtype=torch.bool)
    present[0, :4], present[1, 9:] = False, False
    return {"whole": Layout.unpadded(2, LENGTH), "padded": Layout.padded(present)}


def on(backend: str, name: str) -> Transformer:
    network = built(name)
    use(network, BACKENDS[backend])
    return network


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ALL)
def test_equals_the_reference(backend: str, name: str) -> None:
    missing = LACKING.get((backend, name))
    if missing is not None:
        with pytest.raises(UnsupportedError, match=f"{backend} backend lacks {missing}"):
            on(backend, name)
        return
    reference, fast, tokens = built(name), on(backend, name), some_tokens(2)
    with torch.no_grad():  # flex computes forward only here
        for layout in layouts().values():
            given = beside(reference, 2)
            assert_close(fast(tokens, layout=layout, **given), reference(tokens, layout=layout, **given))


@pytest.mark.parametrize("name", [name for name in ALL if ("sdpa", name) not in LACKING])
def test_gradients_equal_the_reference(name: str) -> None:
    reference, fast, tokens = built(name), on("sdpa", name), some_tokens(2)
    for model in (reference, fast):
        model.double()  # a gradient that all but cancels out is rounding otherwise, more on some processors
        model(tokens, layout=layouts()["padded"], **beside(model, 2)).square().sum().backward()
    gradients = {
        place: (found.grad, expected.grad)
        for (place, expected), found in zip(reference.named_parameters(), fast.parameters(), strict=True)
        if expected.grad is not None and expected.grad.abs().max() > 0
    }
    largest = max(float(expected.abs().max()) for _, expected in gradients.values())
    for place, (found, expected) in gradients.items():
        assert found is not None and relative(found, expected) < 1e-4, place
        # of gradients that all but cancel out, what is left is rounding
        size = max(float(expected.abs().max()), 0.01 * largest)
        assert float((found - expected).abs().max()) <= 1e-5 * size, place


@pytest.mark.parametrize("name", ["grouped", "sink"])
def test_cached_equals_whole(name: str) -> None:
    fast, tokens = on("sdpa", name), some_tokens(2)
    cache = ContiguousCache(fast.spec.trunk, 2, LENGTH)
    pieces = [fast(piece, cache=cache) for piece in tokens.split([5, 1, 7], dim=1)]
    assert_close(torch.cat(pieces, 1), built(name)(tokens))


def test_a_tap_of_weights_is_answered_by_the_reference() -> None:
    fast, tokens = on("sdpa", "grouped"), some_tokens(1)
    taps = Taps(["layers.0.attention.weights", "layers.1.attention.heads"], tap_names(fast.spec))
    fast(tokens, tap=taps)
    assert_close(taps["layers.0.attention.weights"].sum(-1), torch.ones(1, 4, LENGTH))
    assert len(taps) == 2


@pytest.mark.parametrize("point", ["scores", "weights"])
def test_either_tap_alone_is_answered_by_the_reference(point: str) -> None:
    seen = []
    for network in (on("sdpa", "grouped"), built("grouped")):
        taps = Taps([f"layers.1.attention.{point}"], tap_names(network.spec))
        network(some_tokens(1), tap=taps)
        seen.append(taps[f"layers.1.attention.{point}"].nan_to_num(neginf=0.0))
    assert_close(*seen)


def test_what_a_backend_lacks_changes_nothing() -> None:
    network = built("cap")
    with pytest.raises(UnsupportedError, match="use the reference"):
        use(network, SDPA())
    assert all(layer.attention.backend.name == "reference" for layer in network.trunk.layers)  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "window", "cap", "sink", "bidirectional-window"])
def test_compiled_flex_equals_the_reference(name: str) -> None:
    network, tokens = built(name), some_tokens(2)
    with torch.no_grad():
        for layout in layouts().values():
            use(network, Reference())
            expected = network(tokens, layout=layout)
            use(network, Flex())
            assert_close(network(tokens, layout=layout), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_bias_is_not_rounded_with_the_stream(backend: str) -> None:
    """In bfloat16 a penalty of 256.75 would be 256, and near keys would weigh as much as nearer ones."""
    visible = torch.ones(1, 1, 2, dtype=torch.bool)
    query, key = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1, 2, 4, dtype=torch.bfloat16)
    value = torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16).expand(2, 4)[None, None]
    bias = torch.tensor([[[[-256.75, -256.0]]]])
    out = BACKENDS[backend].attend(query, key, value, visible, Score(), bias=bias)
    assert out.dtype == torch.bfloat16
    assert out[0, 0, 0].tolist() == pytest.approx([1 / (1 + math.exp(-0.75))] * 4, abs=2e-3)
