"""What must hold for every variant, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.nn import ContiguousCache, Layout, Taps, Transformer, tap_names
from qkv.nn.latent import LatentAttention
from qkv.spec import Attention, Experts, Learned, Model, Sinusoidal
from tests.matrix.variants import BIDIRECTIONAL, ENCODER_DECODERS, VARIANTS, VOCAB
from tests.support import assert_close, random_model

CAUSAL = VARIANTS | ENCODER_DECODERS
ALL = CAUSAL | BIDIRECTIONAL
LENGTH, SOURCE = 13, 9


def built(name: str) -> Transformer:
    """The variant's model; latent attention in the form the name says."""
    model = random_model(ALL[name])
    for part in model.modules():
        if isinstance(part, LatentAttention):
            part.absorbed = "absorbed" in name
    return model


@pytest.fixture(params=CAUSAL)
def causal(request: pytest.FixtureRequest) -> Transformer:
    return built(request.param)


@pytest.fixture(params=ALL)
def any_model(request: pytest.FixtureRequest) -> Transformer:
    return built(request.param)


@pytest.fixture(params=ENCODER_DECODERS)
def paired(request: pytest.FixtureRequest) -> Transformer:
    return built(request.param)


def beside(model: Transformer, batch: int, row: int | None = None) -> dict[str, torch.Tensor]:
    """What a call gives beside its tokens: a source for each row, or for one of them, if it is read."""
    source = some_tokens(batch, SOURCE, seed=7)
    return {"source": source if row is None else source[row : row + 1]} if model.paired else {}


def some_tokens(batch: int, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [1, 12], [4, 1, 8], [3, 3, 3, 3, 1], [7, 6]])
def test_cached_and_chunked_equal_whole(causal: Transformer, sizes: list[int]) -> None:
    tokens = some_tokens(2)
    cache = ContiguousCache(causal.spec.trunk, 2, LENGTH)
    total, given = torch.full((2,), LENGTH), beside(causal, 2)
    pieces = []
    for piece in tokens.split(sizes, dim=1):
        layout = Layout.padded(torch.ones_like(piece), total)
        pieces.append(causal(piece, layout=layout, cache=cache, **({} if pieces else given)))
    assert_close(torch.cat(pieces, 1), causal(tokens, **given))


def test_rows_of_a_cache_go_where_their_texts_go(causal: Transformer) -> None:
    """Case C1: rows are copied and dropped, with their states and what was read for them."""
    tokens, rows = some_tokens(3), torch.tensor([1, 1, 0, 1])
    given = beside(causal, 3)
    cache = ContiguousCache(causal.spec.trunk, 3, LENGTH)
    total = torch.full((4,), LENGTH)
    causal(
        tokens[:, :8],
        layout=Layout.padded(torch.ones(3, 8, dtype=torch.bool), total[:3]),
        cache=cache,
        **given,
    )
    cache.select(rows)
    texts = torch.cat([tokens[rows, :8], some_tokens(4, LENGTH - 8, seed=3)], 1)
    found = causal(
        texts[:, 8:], layout=Layout.padded(torch.ones(4, LENGTH - 8, dtype=torch.bool), total), cache=cache
    )
    assert_close(found, causal(texts, **{name: value[rows] for name, value in given.items()})[:, 8:])


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_equals_unpadded(any_model: Transformer, side: str) -> None:
    tokens, lengths = some_tokens(3), (13, 9, 4)
    present = torch.zeros(3, LENGTH, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = {"left": LENGTH - length, "right": 0, "both": (LENGTH - length) // 2}[side]
        present[row, start : start + length] = True
    padded = any_model(tokens, layout=Layout.padded(present), **beside(any_model, 3))
    for row in range(3):
        alone = any_model(tokens[row : row + 1, present[row]], **beside(any_model, 3, row))
        assert_close(padded[row, present[row]], alone[0])


def test_what_stands_in_the_padding_changes_nothing(any_model: Transformer) -> None:
    tokens, given = some_tokens(1), beside(any_model, 1)
    present = torch.ones(1, LENGTH, dtype=torch.bool)
    present[0, :4] = False
    before = any_model(tokens, layout=Layout.padded(present), **given)
    tokens[0, :4] = (tokens[0, :4] + 1) % VOCAB
    after = any_model(tokens, layout=Layout.padded(present), **given)
    assert torch.equal(before[0, 4:], after[0, 4:])


def test_packed_equals_separate(any_model: Transformer) -> None:
    tokens, lengths = some_tokens(1), [5, 7, 1]
    packed = any_model(tokens, layout=Layout.packed(lengths), **sources_of(any_model, [4, 2, 3]))
    sources = beside(any_model, 1)["source"].split([4, 2, 3], dim=1) if any_model.paired else [None] * 3
    separate = [
        any_model(document, source)
        for document, source in zip(tokens.split(lengths, dim=1), sources, strict=True)
    ]
    assert_close(packed, torch.cat(separate, 1))


def sources_of(model: Transformer, lengths: list[int]) -> dict[str, Any]:
    """One row of as many sources as the tokens have documents, if they are read."""
    if not model.paired:
        return {}
    return {"source": some_tokens(1, sum(lengths), seed=7), "source_layout": Layout.packed(lengths)}


def test_a_document_changes_nothing_in_another(any_model: Transformer) -> None:
    """Case M8: the second document's logits stay the same to the bit."""
    tokens, layout, given = some_tokens(1), Layout.packed([5, 8]), sources_of(any_model, [4, 5])
    before = any_model(tokens, layout=layout, **given)
    tokens[0, :5] = (tokens[0, :5] + 1) % VOCAB
    if any_model.paired:
        given["source"][0, :4] = (given["source"][0, :4] + 1) % VOCAB
    after = any_model(tokens, layout=Layout.packed([5, 8]), **given)
    if any(isinstance(mixer, Experts) for mixer in any_model.spec.trunk.mixers()):
        # how many tokens share an expert's product is up to both, and rounds differently
        assert_close(after[0, 5:], before[0, 5:], 1e-6)
    else:
        assert torch.equal(before[0, 5:], after[0, 5:])
    assert not torch.equal(before[0, :5], after[0, :5])


def test_padded_rows_with_a_cache_equal_each_alone(causal: Transformer) -> None:
    """Prompts of unequal length, padded on the left, then three tokens each, one row stopping early."""
    tokens, present = some_tokens(3), torch.ones(3, LENGTH, dtype=torch.bool)
    present[1, :3], present[2, :8] = False, False
    present[1, 11:] = False  # this row ends two tokens before the others
    cache = ContiguousCache(causal.spec.trunk, 3, LENGTH)
    outputs: list[torch.Tensor] = []
    for piece in (slice(0, 10), slice(10, 11), slice(11, 12), slice(12, 13)):
        layout = Layout.padded(present[:, piece], total=present.sum(-1))
        given = {} if outputs else beside(causal, 3)
        outputs.append(causal(tokens[:, piece], layout=layout, cache=cache, **given))
    batched = torch.cat(outputs, 1)
    for row in range(3):
        alone = causal(tokens[row : row + 1, present[row]], **beside(causal, 3, row))
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
    out = model(some_tokens(1), **beside(model, 1))
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

        def wants(self, name: str) -> bool:
            return True

    out = any_model(tokens, layout=Layout.padded(present), tap=Reader(), **beside(any_model, 2))
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


# --- what is read -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_a_padded_source_equals_an_unpadded_one(paired: Transformer, side: str) -> None:
    """Also with a cache, which keeps where the source's tokens stand."""
    tokens, source, lengths = some_tokens(3, 6), some_tokens(3, SOURCE, seed=7), (9, 5, 2)
    present = torch.zeros(3, SOURCE, dtype=torch.bool)
    for row, length in enumerate(lengths):
        start = {"left": SOURCE - length, "right": 0, "both": (SOURCE - length) // 2}[side]
        present[row, start : start + length] = True
    given = {"source": source, "source_layout": Layout.padded(present)}
    padded = paired(tokens, **given)
    for row in range(3):
        alone = paired(tokens[row : row + 1], source[row : row + 1, present[row]])
        assert_close(padded[row], alone[0])
    cache = ContiguousCache(paired.spec.trunk, 3, 6)
    pieces = [paired(tokens[:, :4], cache=cache, **given)]
    pieces += [paired(token, cache=cache) for token in tokens[:, 4:].split(1, dim=1)]
    assert_close(torch.cat(pieces, 1), padded)


def test_what_stands_in_the_padding_of_a_source_changes_nothing(paired: Transformer) -> None:
    tokens, source = some_tokens(1), some_tokens(1, SOURCE, seed=7)
    present = torch.ones(1, SOURCE, dtype=torch.bool)
    present[0, :4] = False
    before = paired(tokens, source, source_layout=Layout.padded(present))
    source[0, :4] = (source[0, :4] + 1) % VOCAB
    assert torch.equal(paired(tokens, source, source_layout=Layout.padded(present)), before)
    source[0, 4] = (source[0, 4] + 1) % VOCAB
    assert not torch.equal(paired(tokens, source, source_layout=Layout.padded(present)), before)


def test_an_empty_source_adds_nothing_and_no_gradient_is_nan(paired: Transformer) -> None:
    """A row whose source is padding alone: cross-attention gives it zeros."""
    present = torch.ones(2, SOURCE, dtype=torch.bool)
    present[1] = False
    paired.requires_grad_(True)
    points = [name for name in tap_names(paired.spec) if name.endswith("cross.heads")]
    taps = Taps(points, points)
    out = paired(some_tokens(2), some_tokens(2, SOURCE), source_layout=Layout.padded(present), tap=taps)
    assert len(points) == 2 and all((taps[name][1] == 0).all() for name in points)
    assert all((taps[name][0] != 0).any() for name in points)
    out.sum().backward()
    for name, parameter in paired.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_holds_the_bytes_the_description_counts(name: str) -> None:
    """D31, L1, L5. Window layers have room for every token here, and the description counts fewer."""
    model, length = built(name), LENGTH
    cache = ContiguousCache(model.spec.trunk, 3, length)
    model(some_tokens(3), cache=cache, **beside(model, 3))
    counted = 3 * model.spec.cache_bytes(length, bytes_per_value=4, source=SOURCE)
    reaches = [mixer.mask.reach for mixer in model.spec.trunk.mixers() if isinstance(mixer, Attention)]
    if all(reach is None for reach in reaches):
        assert cache.bytes == counted
    else:
        assert cache.bytes > counted


def test_going_back_after_an_error_or_a_wrong_guess_equals_never_having_run(causal: Transformer) -> None:
    """D27: keys, values, states and sources are those of before the last call."""
    tokens, given = some_tokens(2), beside(causal, 2)
    total = torch.full((2,), LENGTH)

    def part(piece: slice, cache: ContiguousCache, **more: Any) -> torch.Tensor:
        layout = Layout.padded(torch.ones_like(tokens[:, piece]), total)
        return causal(tokens[:, piece], layout=layout, cache=cache, **more)

    def fail(*_: object) -> None:
        raise RuntimeError("behind the last layer")

    cache = ContiguousCache(causal.spec.trunk, 2, LENGTH + 4)
    for start in (0, 5):  # with nothing held, and with something
        handle = causal.trunk.layers[-1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="behind the last layer"):
            wrong = beside(causal, 2)
            part(slice(3, 7), cache, **({name: 1 - t % 2 for name, t in wrong.items()} if not start else {}))
        handle.remove()
        assert cache.length == start
        if start == 0:
            first = part(slice(0, 5), cache, **given)
    causal(some_tokens(2, 3, seed=9), cache=cache)
    cache.truncate(5)
    rest = part(slice(5, LENGTH), cache)
    assert_close(torch.cat([first, rest], 1), causal(tokens, **given))
