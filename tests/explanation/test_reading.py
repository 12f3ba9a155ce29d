"""Passes over what a model reads: whole or in part, one row or many, they are the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import RequestError
from qkv.explanation import Reading
from qkv.explanation.reading import FIRST, Place
from qkv.nn import Transformer
from qkv.spec import (
    Dense,
    Language,
    Layer,
    Model as Spec,
    Pool,
    SequenceClass,
    Stack,
    Tokens,
    post_norm,
)
from qkv.spec.norms import BatchNorm
from tests.explanation.cases import (
    ALL,
    EVERY,
    METRIC,
    REFERENCE,
    SOURCE,
    TOKENS,
    asked,
    beside,
    network,
    reading,
    tapped,
)
from tests.matrix.variants import ENCODER_LAYER, VOCAB, WIDTH
from tests.support import assert_close, random_model


@pytest.mark.parametrize("variant", sorted(ALL))
def test_a_pass_from_any_layer_is_the_models_own_answer(variant: str) -> None:
    model = network(variant)
    one = reading(variant)
    with torch.no_grad():
        whole = model(TOKENS, **beside(model))
        starts = [FIRST, *(Place(k, i) for k, side in enumerate(one.sides) for i in range(side.depth + 1))]
        for start in starts:
            assert_close(one.run(start=start), whole)


@pytest.mark.parametrize("variant", EVERY)
def test_rows_alike_answer_alike_and_places_are_those_asked_for(variant: str) -> None:
    logits, _ = tapped(variant, [])
    one = reading(variant)
    with torch.no_grad():
        rows = one.run(start=Place(len(one.sides) - 1, 1), rows=3, places=(2, -1))
    assert rows.shape[:2] == (3, 2)
    assert_close(rows, logits[:, [2, -1]].expand(3, -1, -1))


def test_what_was_run_is_counted_layer_by_layer_and_row_by_row() -> None:
    one = reading("grouped")
    one.value(METRIC)
    assert (one.counts.passes, one.counts.layers) == (2, 2)  # once for the states, once for the head
    one.value(METRIC)
    assert (one.counts.passes, one.counts.layers) == (3, 2)
    one.run(start=Place(0, 1), rows=4)
    assert (one.counts.passes, one.counts.layers) == (4, 6)


def test_reading_points_gives_what_taps_give() -> None:
    for variant in ("grouped", "encoder-decoder-pre-norm"):
        names = [n for n in reading(variant).names if n != "logits"]
        _, taps = tapped(variant, names, REFERENCE)
        found = reading(variant, REFERENCE).read(names)
        assert list(found) == names
        for name in names:
            finite = taps[name].isfinite()
            assert_close(found[name][finite], taps[name][finite])


def test_a_head_that_answers_once_is_read_without_a_place() -> None:
    from qkv.explanation import Logit

    tokens = Tokens(VOCAB, WIDTH)
    spec = Spec(Stack(tokens, (ENCODER_LAYER,)), head=SequenceClass(3, Pool("mean")))
    model = random_model(spec)
    one = Reading(model, TOKENS)
    assert float(one.value(Logit(2, None))) == pytest.approx(float(model(TOKENS)[0, 2].detach()), abs=1e-6)
    with pytest.raises(RequestError, match="answers once for the whole sequence"):
        one.value(Logit(2))


@pytest.mark.parametrize(
    "given, problem",
    [
        ((TOKENS.float(),), "whole numbers"),
        (([[1, 2], [3]],), "rows of equal length"),
        (([],), "Tokens must be"),
        (("text",), "Only a loaded model reads texts"),
        ((TOKENS, SOURCE), "no use for a source"),
    ],
)
def test_what_cannot_be_read_is_refused(given: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        Reading(network("grouped"), *given)


def test_other_refusals_name_what_would_be_right() -> None:
    with pytest.raises(RequestError, match="reads a source beside its tokens"):
        Reading(network("encoder-decoder-pre-norm"), TOKENS)
    with pytest.raises(RequestError, match="1 rows of tokens, and 2 of what is read"):
        Reading(network("encoder-decoder-pre-norm"), TOKENS, SOURCE.expand(2, -1))
    with pytest.raises(RequestError, match="no use for types"):
        Reading(network("grouped"), TOKENS, types=TOKENS)
    with pytest.raises(RequestError, match="One prompt is explained at a time, and here are 3"):
        reading("grouped", REFERENCE).one()
    with pytest.raises(RequestError, match="here are 7 and 5"):
        reading("grouped").alike(reading("grouped", TOKENS[:, :5]))
    with pytest.raises(RequestError, match="by the same model"):
        reading("grouped").alike(reading("biased"))
    with pytest.raises(RequestError, match=r"'layers.9.output' is not a point"):
        reading("grouped").place("layers.9.output")


def test_rows_that_would_mix_in_training_are_refused() -> None:
    layer: Layer = post_norm(Dense("relu", 8), norm=BatchNorm())
    model = random_model(Spec(decoder=Stack(Tokens(VOCAB, WIDTH), (layer,)), head=Language(VOCAB)))
    with pytest.raises(RequestError, match=r"call network.eval\(\)"):
        Reading(model, TOKENS)
    assert_close(Reading(model.eval(), TOKENS).run(), model(TOKENS))


def test_types_change_what_is_read() -> None:
    model: Transformer = network("token-types")
    types = (TOKENS % 2).long()
    one = Reading(model, TOKENS, types=types)
    assert float(one.value(METRIC)) == pytest.approx(asked(model(TOKENS, types=types)), abs=1e-6)
    assert abs(float(one.value(METRIC)) - float(reading("token-types").value(METRIC))) > 1e-3
