"""Parts taken out: measured one full pass at a time beside it, and how little is run for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import (
    Blank,
    Change,
    Logit,
    Mean,
    Part,
    Parts,
    Reading,
    Resample,
    Zero,
    ablate,
    measure,
    occlusion,
    parts,
)
from qkv.explanation.intervention import Replacement
from qkv.explanation.reading import TOKENS as MOST
from qkv.nn import Layout
from qkv.spec import Gated, pre_norm
from tests.explanation.cases import EVERY, METRIC, REFERENCE, TOKENS, asked, network, reading, tapped
from tests.matrix.variants import attention, model
from tests.support import random_model


def lost(variant: str, group: Sequence[Part], by: Callable[[str, Tensor], Tensor]) -> float:
    """One full pass with these parts replaced, by taps of functions."""

    def put(name: str, wheres: Sequence[tuple[int | slice, ...]]) -> Callable[[Tensor], Tensor]:
        def change(value: Tensor) -> Tensor:
            value, new = value.clone(), by(name, value)
            for where in wheres:
                value[0][where] = new[0][where]
            return value

        return change

    points = {part.point for part in group}
    changes = {name: put(name, [part.where for part in group if part.point == name]) for name in points}
    return asked(tapped(variant, [])[0]) - asked(tapped(variant, changes)[0])


def zero(name: str, value: Tensor) -> Tensor:
    return torch.zeros_like(value)


UNITS: dict[str, Callable[[Reading], Parts]] = {
    "heads": parts.heads,
    "sublayers": parts.sublayers,
    "layers": parts.layers,
    "positions": lambda one: parts.positions(one, one.sides[-1].node.layers[-1].mixers()[-1][1].role),
    "tokens": parts.tokens,
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("variant", EVERY)
def test_each_effect_is_that_of_a_pass_of_its_own(variant: str, unit: str) -> None:
    one = reading(variant)
    group = UNITS[unit](one)
    found = ablate(one, METRIC, group)
    assert found.facts["own"] == pytest.approx(asked(tapped(variant, [])[0]), abs=1e-5)
    assert np.isnan(found.values).sum() == found.values.size - len(group.parts)
    for index, some in group.parts.items():
        assert found.values[index] == pytest.approx(lost(variant, some, zero), abs=1e-5), index


@pytest.mark.parametrize("variant", EVERY)
def test_ablating_nothing_changes_nothing(variant: str) -> None:
    """No change at all, and each part replaced with what stands there anyway."""
    one = reading(variant)
    own = asked(tapped(variant, [])[0])
    assert measure(one, [[], []], METRIC) == pytest.approx([own, own], abs=1e-6)
    for unit in (parts.heads, parts.sublayers, parts.tokens):
        found = ablate(one, METRIC, unit(one), Resample(reading(variant)))
        np.testing.assert_allclose(found.values[~np.isnan(found.values)], 0, atol=1e-6)


@pytest.mark.parametrize("variant", ["grouped", "post-norm", "encoder-decoder-pre-norm"])
def test_the_mean_and_each_row_of_a_reference_stand_in(variant: str) -> None:
    one = reading(variant)
    group = parts.heads(one)
    _, taps = tapped(variant, ["*.heads"], REFERENCE)
    mean = ablate(one, METRIC, group, Mean(reading(variant, REFERENCE)))
    each = ablate(one, METRIC, group, Resample(reading(variant, REFERENCE)))
    assert (mean.baseline, each.baseline) == ("mean over 3 rows", "each of 3 other rows")
    for index, some in group.parts.items():
        middle = lost(variant, some, lambda name, _: taps[name].mean(0, keepdim=True))
        rows = [lost(variant, some, lambda name, _, r=r: taps[name][r : r + 1]) for r in range(3)]  # type: ignore[misc]
        assert mean.values[index] == pytest.approx(middle, abs=1e-5)
        assert each.values[index] == pytest.approx(np.mean(rows), abs=1e-5)


@pytest.mark.parametrize(
    "variant", ["grouped", "alibi", "bidirectional-buckets", "encoder-decoder-post-norm"]
)
def test_occlusion_by_a_token_is_the_prompt_with_that_token_there(variant: str) -> None:
    found = occlusion(reading(variant), METRIC, Blank(2))
    own = asked(tapped(variant, [])[0])
    offset = 4 if network(variant).paired else 0  # the source's tokens come first
    assert len(found.values) == offset + 7
    for place in range(7):
        other = TOKENS.clone()
        other[0, place] = 2
        changed = asked(tapped(variant, [], other)[0])
        assert found.values[offset + place] == pytest.approx(own - changed, abs=1e-5)


def test_a_later_change_is_made_to_what_an_earlier_one_led_to() -> None:
    group = [Part("layers.0.attention.heads", (slice(None), 1)), Part("layers.1.feed_forward.output", (6,))]
    found = measure(reading("grouped"), [[Change(part, torch.zeros(())) for part in group]], METRIC)
    own = asked(tapped("grouped", [])[0])
    assert own - found[0] == pytest.approx(lost("grouped", group, zero), abs=1e-5)


def test_the_order_of_rows_and_how_they_are_batched_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    one = reading("grouped")
    group = [some for unit in (parts.heads, parts.tokens) for some in unit(one).parts.values()]
    rows = [[Change(part, torch.zeros(())) for part in some] for some in [*group, ()]]
    found = measure(one, rows, METRIC)
    np.testing.assert_allclose(measure(one, rows[::-1], METRIC)[::-1], found, atol=1e-6)
    monkeypatch.setattr("qkv.explanation.reading.TOKENS", 14)
    assert one.most_rows == 2
    np.testing.assert_allclose(measure(one, rows, METRIC), found, atol=1e-6)


def test_a_sweep_over_all_heads_runs_each_layer_once_from_there_on() -> None:
    """64 tokens, 6 layers of 4 heads: 7 batches and 90 layers, not 25 passes and 150 layers."""
    depth, heads = 6, 4
    spec = model(*(pre_norm(attention(heads), Gated("silu", 24)),) * depth)
    one = Reading(random_model(spec), torch.arange(64) % 50)
    assert heads * 64 <= MOST
    facts = ablate(one, METRIC, parts.heads(one)).facts
    assert facts["passes"] == depth + 2  # one for the states, one head call for the metric as it is
    assert facts["layers"] == depth + heads * sum(range(1, depth + 1))
    again = ablate(one, METRIC, parts.heads(one)).facts
    assert again["passes"] == depth + 1 and again["layers"] == heads * sum(range(1, depth + 1))


def test_only_the_places_that_are_asked_about_reach_the_head() -> None:
    one, seen = reading("grouped"), []
    hook = network("grouped").head.register_forward_hook(lambda m, given, out: seen.append(out.shape[:2]))  # type: ignore[union-attr]
    try:
        ablate(one, METRIC, parts.heads(one))
    finally:
        hook.remove()
    assert seen == [(1, 0), (1, 1), (4, 1), (4, 1)]


def test_changes_do_not_leak_between_rows_or_stay() -> None:
    one = reading("grouped")
    before = asked(tapped("grouped", [])[0])
    group = parts.heads(one)
    both = ablate(one, METRIC, group)
    alone = [ablate(one, METRIC, Parts("one", (), {(): some})).values.item() for some in group.parts.values()]
    np.testing.assert_allclose(both.values.reshape(-1), alone, atol=1e-6)
    assert asked(tapped("grouped", [])[0]) == before


def test_neurons_and_feed_forwards_can_be_knocked_out() -> None:
    one = reading("grouped")
    whole = ablate(one, METRIC, parts.feed_forwards(one))
    np.testing.assert_allclose(
        whole.values, ablate(one, METRIC, parts.sublayers(one)).values[:, 1], atol=1e-6
    )
    some = ablate(one, METRIC, parts.neurons(one, 1, [4, 9]))
    assert some.axes[0].labels == (4, 9)
    for row, neuron in enumerate((4, 9)):
        part = Part("layers.1.feed_forward.hidden", (slice(None), neuron))
        assert some.values[row] == pytest.approx(lost("grouped", [part], zero), abs=1e-5)
    every = Parts("all", (), {(): tuple(p for g in parts.neurons(one, 1).parts.values() for p in g)})
    assert float(ablate(one, METRIC, every)) == pytest.approx(float(whole.at(layer=1)), abs=1e-5)


@pytest.mark.parametrize("by", [Mean, Resample])
def test_a_reference_of_another_length_is_refused(by: Callable[[Reading], Replacement]) -> None:
    one = reading("grouped")
    with pytest.raises(RequestError, match="here are 7 and 5"):
        ablate(one, METRIC, parts.heads(one), by(reading("grouped", REFERENCE[:, :5])))


def test_what_is_not_there_is_refused_by_name() -> None:
    one = reading("grouped")
    with pytest.raises(UnsupportedError, match="no cross to look at here"):
        parts.heads(one, "cross")
    with pytest.raises(UnsupportedError, match="feed-forward"):
        parts.feed_forwards(reading("attention-only"))
    with pytest.raises(RequestError, match="Layer 1 has no neuron 24: it has 24"):
        parts.neurons(one, 1, [24])
    with pytest.raises(UnsupportedError, match="Experts have no hidden units"):
        parts.neurons(reading("experts-softmax"), 0)
    with pytest.raises(RequestError, match="no 'output'"):
        parts.projected(one, "output")  # type: ignore[arg-type]
    wrong = Change(Part("layers.0.attention.heads", (slice(None), 9)), torch.zeros(()))
    with pytest.raises(RequestError, match=r"'layers.0.attention.heads' holds \(7, 4, 6\) in a row"):
        measure(one, [[wrong]], METRIC)
    with pytest.raises(RequestError, match="cannot become a value of shape"):
        measure(one, [[Change(Part("layers.0.output"), torch.zeros(3, 2))]], METRIC)


def test_layers_are_ablated_whole() -> None:
    """A pre-norm layer whose mixers add nothing hands on what it got."""
    one = reading("grouped")
    found = ablate(one, METRIC, parts.layers(one), Zero())
    layers = network("grouped").trunk.layers
    layout = Layout.unpadded(1, 7)
    with torch.no_grad():
        model_ = network("grouped")
        for skipped in (0, 1):
            x = layers[1 - skipped](one.embeddings[0], layout)
            skipped_answer = asked(model_.head(model_.trunk.norm(x)))  # type: ignore[misc]
            assert found.facts["own"] - found.values[skipped] == pytest.approx(skipped_answer, abs=1e-5)


def test_tokens_behind_the_place_that_answers_do_nothing() -> None:
    found = occlusion(reading("grouped"), Logit(3, place=2), Zero())
    assert (np.abs(found.values[:3]) > 1e-4).all()
    np.testing.assert_allclose(found.values[3:], 0, atol=1e-6)
