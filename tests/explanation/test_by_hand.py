"""GPT-2 written with plain tensor operations, and each method done to it by hand: one source beside ours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from qkv.explanation import (
    Difference,
    Mean,
    Reading,
    ablate,
    direct_attribution,
    logit_lens_answers,
    parts,
    patch,
)
from qkv.nn import Transformer
from qkv.nn.norms import LayerNorm as Norm
from qkv.spec import (
    Attention,
    Dense,
    Language,
    LayerNorm,
    Learned,
    Model as Spec,
    Projections,
    Stack,
    Tokens,
    pre_norm,
)
from tests.support import random_model

LAYERS, HEADS, DIM, VOCAB, LENGTH = 3, 4, 6, 40, 9
WIDTH = HEADS * DIM
TOKEN, AGAINST = 7, 31
METRIC = Difference(TOKEN, against=AGAINST)
PROMPT, OTHER, *REFERENCE = torch.randint(
    0, VOCAB, (6, LENGTH), generator=torch.Generator().manual_seed(8)
).unbind()

Change = Callable[[str, Tensor], Tensor]
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> Transformer:
    layer = pre_norm(
        Attention(HEADS, HEADS, DIM, projections=Projections(bias="qkvo")),
        Dense("gelu_tanh", 4 * WIDTH),
        norm=LayerNorm(1e-5),
    )
    tokens = Tokens(VOCAB, WIDTH, position=Learned(16))
    stack = Stack(tokens, (layer,) * LAYERS, LayerNorm(1e-5))
    found = random_model(Spec(decoder=stack, head=Language(VOCAB)))
    with torch.no_grad():
        for norm in (part for part in found.modules() if isinstance(part, Norm)):
            norm.weight += 1  # type: ignore[misc]
    return found


@pytest.fixture(scope="module")
def weights(model: Transformer) -> Weights:
    return {name: value.detach().double() for name, value in model.named_parameters()}


class Plain:
    """One row through GPT-2, in float64: `seen` holds what stood at each name, `change` may replace it."""

    def __init__(self, weights: Weights, tokens: Tensor, change: Change = lambda name, value: value):
        self.weights, self.change = weights, change
        self.seen: dict[str, Tensor] = {}
        x = self.weight("embedding.weight")[tokens] + self.weight("embedding.position.weight")[:LENGTH]
        self.seen["embedding"] = x
        for layer in range(LAYERS):
            x = x + self.attention(layer, self.norm(f"layers.{layer}.attention_before", x))
            x = x + self.feed_forward(layer, self.norm(f"layers.{layer}.feed_forward_before", x))
            x = self.at(f"stream.{layer}", x)
        self.logits = self.answer(x)

    def at(self, name: str, value: Tensor) -> Tensor:
        self.seen[name] = self.change(name, value.clone())
        return self.seen[name]

    def weight(self, name: str) -> Tensor:
        return self.weights[f"decoder.{name}"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weight(f"{name}.weight").T + self.weight(f"{name}.bias")

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        size = (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / size * self.weight(f"{name}.weight") + self.weight(f"{name}.bias")

    def attention(self, layer: int, x: Tensor) -> Tensor:
        name = f"layers.{layer}.attention"
        query, key, value = (self.linear(f"{name}.{part}", x) for part in ("query", "key", "value"))
        heads = []
        for head in range(HEADS):
            one = slice(head * DIM, (head + 1) * DIM)
            scores = query[:, one] @ key[:, one].T / DIM**0.5
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
            heads.append(self.at(f"head.{layer}.{head}", scores.softmax(-1) @ value[:, one]))
        return self.linear(f"{name}.output", torch.cat(heads, -1))

    def feed_forward(self, layer: int, x: Tensor) -> Tensor:
        name = f"layers.{layer}.feed_forward"
        x = self.linear(f"{name}.up", x)
        x = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        self.seen[f"feed_forward.{layer}"] = self.linear(f"{name}.down", x)
        return self.seen[f"feed_forward.{layer}"]

    def answer(self, x: Tensor) -> Tensor:
        return self.norm("norm", x) @ self.weights["head.weight"].T

    @property
    def asked(self) -> float:
        return float(self.logits[-1, TOKEN] - self.logits[-1, AGAINST])


def putting(name: str, new: Tensor, where: slice | int = slice(None)) -> Change:
    def change(at: str, value: Tensor) -> Tensor:
        if at == name:
            value[where] = new
        return value

    return change


def test_it_is_the_same_model(model: Transformer, weights: Weights) -> None:
    with torch.no_grad():
        ours = model(PROMPT[None])[0]
    assert float((Plain(weights, PROMPT).logits - ours).abs().max()) < 1e-5
    assert float(ours.abs().max()) > 1


def test_the_lens_is_the_last_norm_and_the_head_on_each_state(model: Transformer, weights: Weights) -> None:
    plain = Plain(weights, PROMPT)
    states = [plain.seen["embedding"], *(plain.seen[f"stream.{layer}"] for layer in range(LAYERS))]
    found = logit_lens_answers(Reading(model, PROMPT), range(LENGTH)).values
    np.testing.assert_allclose(found, torch.stack([plain.answer(x) for x in states]), atol=1e-5)


def test_each_share_is_its_part_through_the_held_norm(model: Transformer, weights: Weights) -> None:
    plain, reading = Plain(weights, PROMPT), Reading(model, PROMPT)
    found = direct_attribution(reading, METRIC)
    x = plain.seen[f"stream.{LAYERS - 1}"][-1]
    size = ((x - x.mean()).pow(2).mean() + 1e-5).sqrt()
    head = plain.weights["head.weight"]
    direction = (head[TOKEN] - head[AGAINST]) * plain.weight("norm.weight") / size

    def share(written: Tensor) -> float:
        return float((written - written.mean()) @ direction)

    assert float(found.at(component="embedding")) == pytest.approx(
        share(plain.seen["embedding"][-1]), abs=1e-4
    )
    for layer in range(LAYERS):
        output = plain.weight(f"layers.{layer}.attention.output.weight")
        for number in range(HEADS):
            mixed = plain.seen[f"head.{layer}.{number}"][-1]
            written = output[:, number * DIM : (number + 1) * DIM] @ mixed
            ours = float(found.at(component=f"{layer}.attention.{number}"))
            assert ours == pytest.approx(share(written), abs=1e-5)
        ours = float(found.at(component=f"{layer}.feed_forward"))
        assert ours == pytest.approx(share(plain.seen[f"feed_forward.{layer}"][-1]), abs=1e-5)


@pytest.mark.parametrize("by", ["zero", "mean"])
def test_each_heads_ablation_is_a_pass_without_it(model: Transformer, weights: Weights, by: str) -> None:
    reading = Reading(model, PROMPT)
    rows = [Plain(weights, row).seen for row in REFERENCE]
    given = (Mean(Reading(model, torch.stack(REFERENCE))),) if by == "mean" else ()
    found = ablate(reading, METRIC, parts.heads(reading), *given)
    own = Plain(weights, PROMPT).asked
    assert np.abs(found.values).max() > 0.1
    for layer in range(LAYERS):
        for head in range(HEADS):
            name = f"head.{layer}.{head}"
            new = torch.stack([seen[name] for seen in rows]).mean(0) if by == "mean" else torch.zeros(())
            lost = own - Plain(weights, PROMPT, putting(name, new.double())).asked
            assert found.values[layer, head] == pytest.approx(lost, abs=1e-5), name


def test_each_patch_is_a_pass_with_the_other_prompts_part(model: Transformer, weights: Weights) -> None:
    reading, donor = Reading(model, PROMPT), Reading(model, OTHER)
    theirs, own = Plain(weights, OTHER).seen, Plain(weights, PROMPT).asked
    stream = patch(reading, donor, METRIC, parts.stream(reading)).values
    heads = patch(reading, donor, METRIC, parts.heads(reading)).values
    assert np.abs(stream).max() > 0.1 and np.abs(heads).max() > 0.1
    for layer in range(LAYERS):
        for place in range(LENGTH):
            name = f"stream.{layer}"
            moved = Plain(weights, PROMPT, putting(name, theirs[name][place], place)).asked - own
            assert stream[layer, place] == pytest.approx(moved, abs=1e-5)
        for head in range(HEADS):
            name = f"head.{layer}.{head}"
            moved = Plain(weights, PROMPT, putting(name, theirs[name])).asked - own
            assert heads[layer, head] == pytest.approx(moved, abs=1e-5)
