"""Self-repair: what goes directly with a head, what goes in all, and what later layers make up for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import (
    LogProbability,
    Mean,
    Reading,
    ablate,
    direct_attribution,
    direct_effects,
    parts,
    self_repair,
)
from qkv.nn import Taps, tap_names
from tests.explanation.cases import (
    METRIC,
    REFERENCE,
    TOKENS,
    asked,
    beside,
    network,
    reading,
    tapped,
)
from tests.matrix.variants import VARIANTS
from tests.support import random_model

LOG = LogProbability(3, 6)


def two_passes(variant: str, layer: int, name: str, head: int, by: Tensor | float = 0.0) -> Tensor:
    """By taps: what every mixer adds in one pass, held in a second in which the head alone is replaced."""
    model = network(variant)
    prefix = "decoder." if model.paired else ""
    mixers = [
        f"{prefix}layers.{i}.{n}" for i, node in enumerate(model.spec.trunk.layers) for n, _ in node.mixers()
    ]
    _, taps = tapped(variant, [f"{mixer}.output" for mixer in mixers])
    own = f"{prefix}layers.{layer}.{name}"
    changes = {f"{mixer}.output": taps[f"{mixer}.output"] for mixer in mixers if mixer != own}

    def without(heads: Tensor) -> Tensor:
        heads = heads.clone()
        heads[:, :, head] = by
        return heads

    put = Taps({**changes, f"{own}.heads": without}, tap_names(model.spec))
    with torch.no_grad():
        return model(TOKENS, tap=put, **beside(model))


VARIED = [
    "grouped", "parallel", "post-norm", "sandwich", "experts-softmax", "gated-heads", "attention-only",
    "encoder-decoder-pre-norm", "encoder-with-head",
]  # fmt: skip


@pytest.mark.parametrize("variant", VARIED)
def test_direct_effects_are_those_of_two_passes(variant: str) -> None:
    one = reading(variant)
    found, own = direct_effects(one, METRIC), asked(tapped(variant, [])[0])
    log = direct_effects(one, LOG)
    base = float(tapped(variant, [])[0][0, 6].log_softmax(-1)[3])
    cross = (1, "decoder.1 cross", "cross") if variant.startswith("encoder-decoder") else None
    label = (lambda i: f"decoder.{i}") if cross else (lambda i: i)
    for layer, at, name in ((0, label(0), "attention"), cross or (1, label(1), "attention")):
        for head in (0, 3):
            logits = two_passes(variant, layer, name, head)
            assert float(found.at(layer=at, head=head).values) == pytest.approx(own - asked(logits), abs=1e-5)
            told = float(logits[0, 6].log_softmax(-1)[3])
            assert float(log.at(layer=at, head=head).values) == pytest.approx(base - told, abs=1e-5)


@pytest.mark.parametrize("variant", VARIED)
def test_what_goes_directly_less_what_is_made_up_for_is_what_goes(variant: str) -> None:
    one = reading(variant)
    group = parts.every_head(one, -1)
    repair, direct, total = self_repair(one, METRIC), direct_effects(one, METRIC), ablate(one, METRIC, group)
    np.testing.assert_allclose(direct.values - repair.values, total.values, atol=1e-6)
    assert repair.axes == group.axes and np.abs(repair.values[0]).max() > 1e-3
    assert repair.facts["own"] == pytest.approx(asked(tapped(variant, [])[0]), abs=1e-5)


@pytest.mark.parametrize("variant", ["attention-only", "parallel"])
def test_nothing_behind_the_last_attention_can_make_up_for_it(variant: str) -> None:
    """No feed-forward reads what it writes: all goes directly, for any metric and through the last norm."""
    for metric in (METRIC, LOG):
        found = self_repair(reading(variant), metric)
        assert np.abs(found.values[-1]).max() < 1e-6 < 1e-3 < np.abs(found.values[0]).max()


@pytest.mark.parametrize("variant", ["grouped", "parallel", "alibi"])
def test_direct_effects_of_a_linear_answer_are_direct_attribution(variant: str) -> None:
    """Without a last norm the answer is linear in what each head writes."""
    spec = VARIANTS[variant]
    assert spec.decoder is not None
    model = random_model(replace(spec, decoder=replace(spec.decoder, norm=None)))
    one = Reading(model, TOKENS)
    found, shares = direct_effects(one, METRIC), direct_attribution(one, METRIC)
    for layer in (0, 1):
        for head in range(4):
            share = float(shares.at(component=f"{layer}.attention.{head}").values)
            assert float(found.at(layer=layer, head=head).values) == pytest.approx(share, abs=1e-5)
            assert abs(share) > 1e-4


def test_a_head_can_be_replaced_by_its_mean() -> None:
    one, other = reading("grouped"), reading("grouped", REFERENCE)
    mean = other.read(["layers.0.attention.heads"])["layers.0.attention.heads"].mean(0)
    found = direct_effects(one, METRIC, by=Mean(other))
    logits = two_passes("grouped", 0, "attention", 2, mean[:, 2])
    own = asked(tapped("grouped", [])[0])
    assert float(found.at(layer=0, head=2).values) == pytest.approx(own - asked(logits), abs=1e-5)
    assert found.baseline == "mean over 3 rows"


def test_some_heads_are_enough_and_others_are_not_there() -> None:
    one = reading("grouped")
    group = parts.heads(one)
    some = replace(group, parts={(1, 2): group.parts[1, 2]})
    found = self_repair(one, METRIC, some).values
    assert found[1, 2] == pytest.approx(self_repair(one, METRIC).values[1, 2], abs=1e-6)
    assert np.isnan(found).sum() == found.size - 1


def test_what_has_no_direct_way_is_refused() -> None:
    one = reading("encoder-decoder-pre-norm")
    with pytest.raises(UnsupportedError, match="reach the answer through a decoder's attention alone"):
        self_repair(one, METRIC, parts.heads(one, side=0))
    with pytest.raises(RequestError, match="Direct effects are of heads, those of one attention at a time"):
        direct_effects(one, METRIC, parts.feed_forwards(one, -1))
