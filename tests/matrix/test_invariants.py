"""What must hold for every variant, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.nn import ContiguousCache, Layout, Transformer
from qkv.spec import Learned, Model, Sinusoidal
from tests.matrix.variants import BIDIRECTIONAL, VARIANTS, VOCAB
from tests.support import assert_close, random_model

ALL = VARIANTS | BIDIRECTIONAL
LENGTH = 13


@pytest.fixture(params=VARIANTS)
def causal(request: pytest.FixtureRequest) -> Transformer:
    return random_model(VARIANTS[request.param])


@pytest.fixture(params=ALL)
def any_model(request: pytest.FixtureRequest) -> Transformer:
    return random_model(ALL[request.param])


def some_tokens(batch: int, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [1, 12], [4, 1, 8], [3, 3, 3, 3, 1], [7, 6]])
def test_cached_and_chunked_equal_whole(causal: Transformer, sizes: list[int]) -> None:
    tokens = some_tokens(2)
    cache = ContiguousCache(causal.spec.trunk, 2, LENGTH)
    total = torch.full((2,), LENGTH)
    pieces = [
        causal(piece, layout=Layout.padded(torch.ones_like(piece), total), cache=cache)
        for piece in tokens.split(sizes, dim=1)
    ]
    assert_close(torch.cat(pieces, 1), causal(tokens))


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_equals_unpadded(any_model: Transformer, side: str) -> None:
    tokens, lengths = some_tokens(3), (13, 9, 4)
    present = torch.zeros(3, LENGTH, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = {"left": LENGTH - length, "right": 0, "both": (LENGTH - length) // 2}[side]
        present[row, start : start + length] = True
    padded = any_model(tokens, layout=Layout.padded(present))
    for row in range(3):
        alone = any_model(tokens[row : row + 1, present[row]])
        assert_close(padded[row, present[row]], alone[0])


def test_what_stands_in_the_padding_changes_nothing(any_model: Transformer) -> None:
    tokens = some_tokens(1)
    present = torch.ones(1, LENGTH, dtype=torch.bool)
    present[0, :4] = False
    before = any_model(tokens, layout=Layout.padded(present))
    tokens[0, :4] = (tokens[0, :4] + 1) % VOCAB
    after = any_model(tokens, layout=Layout.padded(present))
    assert torch.equal(before[0, 4:], after[0, 4:])


def test_packed_equals_separate(any_model: Transformer) -> None:
    tokens, lengths = some_tokens(1), [5, 7, 1]
    packed = any_model(tokens, layout=Layout.packed(lengths))
    separate = [any_model(document) for document in tokens.split(lengths, dim=1)]
    assert_close(packed, torch.cat(separate, 1))


def test_a_document_changes_nothing_in_another(any_model: Transformer) -> None:
    """Case M8: the second document's logits stay the same to the bit."""
    tokens, layout = some_tokens(1), Layout.packed([5, 8])
    before = any_model(tokens, layout=layout)
    tokens[0, :5] = (tokens[0, :5] + 1) % VOCAB
    after = any_model(tokens, layout=Layout.packed([5, 8]))
    assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, :5], after[0, :5])


def test_padded_rows_with_a_cache_equal_each_alone(causal: Transformer) -> None:
    """Prompts of unequal length, padded on the left, then three tokens each, one row stopping early."""
    tokens, present = some_tokens(3), torch.ones(3, LENGTH, dtype=torch.bool)
    present[1, :3], present[2, :8] = False, False
    present[1, 11:] = False  # this row ends two tokens before the others
    cache = ContiguousCache(causal.spec.trunk, 3, LENGTH)
    outputs = []
    for piece in (slice(0, 10), slice(10, 11), slice(11, 12), slice(12, 13)):
        layout = Layout.padded(present[:, piece], total=present.sum(-1))
        outputs.append(causal(tokens[:, piece], layout=layout, cache=cache))
    batched = torch.cat(outputs, 1)
    for row in range(3):
        alone = causal(tokens[row : row + 1, present[row]])
        assert_close(batched[row, present[row]], alone[0])


def test_nothing_flows_from_the_future(causal: Transformer) -> None:
    """The Jacobian of each output with respect to later inputs is zero; to its own input it is not."""
    gradients = _input_gradients(causal)
    for query in range(LENGTH):
        assert gradients[query][query + 1 :].abs().max() == 0 if query + 1 < LENGTH else True
        assert gradients[query][query].abs().max() > 0


def _input_gradients(model: Transformer) -> list[torch.Tensor]:
    """For each place, the gradient of its output's sum with respect to every embedded input."""
    kept: dict[str, torch.Tensor] = {}

    def leaf(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        kept["x"] = output.detach().requires_grad_()
        return kept["x"]

    handle = model.decoder.embedding.register_forward_hook(leaf)
    out = model(some_tokens(1))
    handle.remove()
    weights = torch.linspace(0.5, 1.5, out.shape[-1])
    return [
        torch.autograd.grad((out[0, query] * weights).sum(), kept["x"], retain_graph=True)[0][0]
        for query in range(LENGTH)
    ]


def test_a_row_that_sees_nothing_gives_zeros_and_finite_gradients(any_model: Transformer) -> None:
    """Padding rows see nothing: attention adds nothing there, and no gradient is NaN."""
    tokens, present = some_tokens(2), torch.ones(2, LENGTH, dtype=torch.bool)
    present[0, :5], present[1] = False, False
    any_model.requires_grad_(True)
    seen: dict[str, torch.Tensor] = {}

    class Reader:
        def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
            seen[name] = value
            return value

        def at(self, *names: Any) -> Reader:
            return self

    out = any_model(tokens, layout=Layout.padded(present), tap=Reader())
    heads = seen["heads"]
    assert (heads[0, :5] == 0).all() and (heads[1] == 0).all() and (heads[0, 5:] != 0).any()
    assert out.isfinite().all()
    out.sum().backward()
    for name, parameter in any_model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


def _ordered(model: Model) -> bool:
    """Whether anything in the model knows order."""
    stack = model.trunk
    placed = isinstance(getattr(stack.input, "position", None), Learned | Sinusoidal)
    return placed or any(getattr(mixer, "position", None) is not None for mixer in stack.mixers())


@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_permuting_the_inputs_permutes_the_outputs_only_without_positions(name: str) -> None:
    """D26: f(PX) = P f(X) for unmasked attention without positions; with positions it does not hold."""
    model, tokens = random_model(BIDIRECTIONAL[name]), some_tokens(1)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(5))
    permuted, expected = model(tokens[:, order]), model(tokens)[:, order]
    if _ordered(BIDIRECTIONAL[name]):
        assert (permuted - expected).abs().max() > 1e-2
    else:
        assert_close(permuted, expected)


def test_a_causal_mask_alone_gives_order() -> None:
    """D26, E10: without positions, permuting still changes a causal model's outputs."""
    model, tokens = random_model(VARIANTS["none"]), some_tokens(1)
    order = torch.arange(LENGTH - 1, -1, -1)
    assert (model(tokens[:, order]) - model(tokens)[:, order]).abs().max() > 1e-2
