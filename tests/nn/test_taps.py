"""Taps: every named point can be read and replaced, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import RequestError
from qkv.nn import Taps, Transformer, tap_names
from tests.matrix.variants import BIDIRECTIONAL, ENCODER_DECODERS, VARIANTS, VOCAB
from tests.support import random_model

SPEC = VARIANTS["grouped"]
NAMES = tap_names(SPEC)
TOKENS = torch.randint(0, VOCAB, (2, 5), generator=torch.Generator().manual_seed(4))
SHAPES = {
    "embedding": (2, 5, 16),
    "layers.1.input": (2, 5, 16),
    "layers.1.attention.query": (2, 4, 5, 6),
    "layers.1.attention.key": (2, 2, 5, 6),
    "layers.1.attention.value": (2, 2, 5, 6),
    "layers.1.attention.scores": (2, 4, 5, 5),
    "layers.1.attention.weights": (2, 4, 5, 5),
    "layers.1.attention.heads": (2, 5, 4, 6),
    "layers.1.attention.output": (2, 5, 16),
    "layers.1.middle": (2, 5, 16),
    "layers.1.feed_forward.hidden": (2, 5, 24),
    "layers.1.feed_forward.output": (2, 5, 16),
    "layers.1.output": (2, 5, 16),
    "final": (2, 5, 16),
    "logits": (2, 5, VOCAB),
}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return random_model(SPEC)


def test_the_points_are_those_the_design_names() -> None:
    assert [name for name in NAMES if ".0." not in name] == list(SHAPES)


@pytest.mark.parametrize("name", SHAPES)
def test_reading_gives_the_value_and_changes_nothing(model: Transformer, name: str) -> None:
    taps = Taps([name], NAMES)
    assert torch.equal(model(TOKENS, tap=taps), model(TOKENS))
    assert list(taps) == [name] and tuple(taps[name].shape) == SHAPES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_replacing_with_itself_changes_nothing_and_with_another_does(model: Transformer, name: str) -> None:
    plain = model(TOKENS)
    assert torch.equal(model(TOKENS, tap=Taps({name: lambda x: x.clone()}, NAMES)), plain)

    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.isfinite(), x * 0.5 + 0.1 * torch.arange(x.shape[-1]), x)

    changed = model(TOKENS, tap=Taps({name: other}, NAMES))
    assert (changed - plain).abs().max() > 1e-4


def test_what_is_read_is_what_was_put_there(model: Transformer) -> None:
    taps = Taps({"layers.0.output": lambda x: torch.zeros_like(x), "layers.1.input": None}, NAMES)
    model(TOKENS, tap=taps)
    assert (taps["layers.1.input"] == 0).all()


def test_replaced_keys_are_what_later_tokens_see(model: Transformer) -> None:
    """With a cache too: the replacement is stored."""
    from qkv.nn import ContiguousCache

    changes = {"layers.0.attention.key": lambda x: x * 2}
    whole = model(TOKENS, tap=Taps(changes, NAMES))
    cache = ContiguousCache(SPEC.trunk, 2, 5)
    pieces = [model(TOKENS[:, i : i + 1], cache=cache, tap=Taps(changes, NAMES)) for i in range(5)]
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-5)


def test_weights_are_shares_and_hidden_ones_zero(model: Transformer) -> None:
    taps = Taps(["layers.*.attention.weights"], NAMES)
    model(TOKENS, tap=taps)
    for name in taps:
        assert torch.allclose(taps[name].sum(-1), torch.ones(2, 4, 5), atol=1e-6)
        assert (taps[name].triu(1) == 0).all()


ALL = VARIANTS | BIDIRECTIONAL | ENCODER_DECODERS


def beside(model: Transformer) -> dict[str, torch.Tensor]:
    return {"source": TOKENS[:, :4]} if model.paired else {}


class Copies:
    """Puts a copy in the place of every value that is offered, and keeps it, by name."""

    def __init__(self, prefix: str = "", kept: dict[str, torch.Tensor] | None = None):
        self.prefix, self.kept = prefix, {} if kept is None else kept

    def __call__(self, name: str, value: torch.Tensor) -> torch.Tensor:
        assert self.prefix + name not in self.kept, f"{self.prefix}{name} is offered twice"
        return self.kept.setdefault(self.prefix + name, value.clone())

    def at(self, *names: str | int) -> Copies:
        return Copies(self.prefix + "".join(f"{name}." for name in names), self.kept)

    def wants(self, name: str) -> bool:
        return True


@pytest.mark.parametrize("variant", ALL)
def test_every_point_of_every_variant_is_offered_and_what_is_put_there_flows_on(variant: str) -> None:
    """No name that nothing answers to, no value without a name, and none that is then ignored."""
    network, copies = random_model(ALL[variant]), Copies()
    out = network(TOKENS, tap=copies, **beside(network))
    assert sorted(copies.kept) == sorted(tap_names(ALL[variant]))
    answer = (out * torch.linspace(0.5, 1.5, out.shape[-1])).sum()
    gradients = torch.autograd.grad(answer, list(copies.kept.values()), allow_unused=True)
    for name, gradient in zip(copies.kept, gradients, strict=True):
        assert gradient is not None and gradient.abs().max() > 0, name


def test_gradients_flow_to_what_is_read(model: Transformer) -> None:
    taps = Taps(["layers.0.attention.heads"], NAMES)
    out = model(TOKENS, tap=taps)
    (gradient,) = torch.autograd.grad(out.sum(), taps["layers.0.attention.heads"])
    assert gradient.shape == (2, 5, 4, 6) and gradient.abs().max() > 0


def test_history_holds_one_value_a_pass(model: Transformer) -> None:
    taps = Taps(["final"], NAMES)
    model(TOKENS, tap=taps)
    model(TOKENS[:, :2], tap=taps)
    assert [value.shape[1] for value in taps.history["final"]] == [5, 2]
    assert taps["final"].shape[1] == 2


def test_an_unknown_point_is_an_error_that_lists_those_there_are() -> None:
    with pytest.raises(RequestError, match=r"No point is called 'layers.9.output'.*layers\.\*\.output"):
        Taps(["layers.9.output"], NAMES)


def test_a_replacement_of_another_shape_is_refused(model: Transformer) -> None:
    with pytest.raises(RequestError, match=r"'final' has shape \(2, 16\); it must be \(2, 5, 16\)"):
        model(TOKENS, tap=Taps({"final": lambda x: x[:, 0]}, NAMES))


def test_a_tensor_is_put_in_the_place_of_a_value(model: Transformer) -> None:
    states = torch.randn(2, 5, 16)
    whole = model(TOKENS, tap=Taps({"final": states}, NAMES))
    assert torch.equal(whole, model(TOKENS, tap=Taps({"final": lambda x: states}, NAMES)))
    assert torch.equal(whole, model(TOKENS, tap=Taps({"final": states.double()}, NAMES)))
    with pytest.raises(RequestError, match=r"'final' has shape \(5, 16\); it must be \(2, 5, 16\)"):
        model(TOKENS, tap=Taps({"final": states[0]}, NAMES))


@pytest.mark.parametrize(("given", "kind"), [(None, "None"), (5, "a value of type int")])
def test_a_replacement_that_gives_no_tensor_is_refused(model: Transformer, given: object, kind: str) -> None:
    with pytest.raises(RequestError) as problem:
        model(TOKENS, tap=Taps({"final": lambda x: given}, NAMES))  # type: ignore[dict-item, return-value]
    assert str(problem.value) == f"The replacement for 'final' gives {kind}, not a tensor."


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([3], "The name of a point to tap is a text, not a value of type int."),
        ({3: None}, "The name of a point to tap is a text, not a value of type int."),
        ([None], "The name of a point to tap is a text, not None."),
        ([["final"]], "The name of a point to tap is a text, not a value of type list."),
        (None, "Points are tapped by name, or by a list of names, not by None."),
        (3, "Points are tapped by name, or by a list of names, not by a value of type int."),
        (
            {"final": 5},
            "The replacement for 'final' is a value of type int; it must be a function or a tensor.",
        ),
    ],
)
def test_what_is_no_name_and_no_replacement_is_refused(names: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        Taps(names, NAMES)
    assert str(problem.value) == sentence


def test_one_name_needs_no_list() -> None:
    assert list(Taps("final", NAMES).history) == ["final"]


def test_what_was_not_asked_for_is_not_there(model: Transformer) -> None:
    taps = Taps(["final"], NAMES)
    with pytest.raises(RequestError, match="no pass has run"):
        taps["final"]
    model(TOKENS, tap=taps)
    with pytest.raises(RequestError, match="was not tapped"):
        taps["logits"]


@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("mixtral", ["layers.3.feed_forward.router", "layers.3.feed_forward.output", "layers.3.middle"]),
        (
            "whisper",
            [
                *("encoder.embedding", "encoder.layers.3.attention.weights", "encoder.final"),
                *("decoder.layers.3.cross.query", "decoder.layers.3.cross.weights", "logits"),
                *("decoder.layers.3.cross.key", "decoder.layers.3.cross.output", "decoder.final"),
            ],
        ),
        ("t5", ["encoder.layers.0.input", "decoder.layers.0.cross.scores", "decoder.layers.0.middle"]),
        ("bert", ["embedding", "layers.3.attention.heads", "layers.3.output", "final"]),
    ],
)
def test_points_of_other_architectures_have_the_names_of_the_design(name: str, points: list[str]) -> None:
    from tests.spec import descriptions as of

    assert set(points) <= set(tap_names(of.ALL[name]()))
