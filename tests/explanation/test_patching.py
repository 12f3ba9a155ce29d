"""Parts of one prompt's run put into another's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation import (
    Change,
    Part,
    Parts,
    Reading,
    ablate,
    attribution_patching,
    measure,
    parts,
    patch,
    path_patching,
    recovered,
)
from qkv.explanation.intervention import record
from qkv.explanation.patching import everything
from qkv.spec import Rotary, pre_norm
from tests.explanation.cases import EVERY, METRIC, OTHER, TOKENS, asked, reading, tapped
from tests.matrix.variants import attention, model
from tests.support import assert_close, random_model


def pair(variant: str) -> tuple[Reading, Reading]:
    return reading(variant), reading(variant, OTHER)


def both(variant: str) -> tuple[float, float]:
    return asked(tapped(variant, [])[0]), asked(tapped(variant, [], OTHER)[0])


@pytest.mark.parametrize("variant", EVERY)
def test_patching_everything_restores_the_other_run(variant: str) -> None:
    one, donor = pair(variant)
    own, theirs = both(variant)
    found = patch(one, donor, METRIC, everything(one))
    assert float(found) == pytest.approx(theirs - own, abs=1e-5) and abs(theirs - own) > 1e-3
    assert (found.facts["own"], found.facts["donor"]) == pytest.approx((own, theirs), abs=1e-5)
    assert float(recovered(found)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("variant", EVERY)
def test_the_whole_stream_behind_any_layer_restores_it_too_and_nothing_nothing(variant: str) -> None:
    one, donor = pair(variant)
    stream = parts.stream(one)
    depth, places = len(stream.axes[0].labels), len(stream.axes[1].labels)
    whole = {
        (layer,): tuple(stream.parts[layer, place][0] for place in range(places)) for layer in range(depth)
    }
    found = recovered(patch(one, donor, METRIC, Parts("layers", stream.axes[:1], whole)))
    np.testing.assert_allclose(found.values, 1, atol=1e-3)
    none = patch(one, reading(variant), METRIC, stream)
    np.testing.assert_allclose(none.values, 0, atol=1e-6)


@pytest.mark.parametrize("variant", ["grouped", "parallel", "alibi", "post-norm", "encoder-decoder-pre-norm"])
def test_each_patch_is_that_of_a_pass_of_its_own(variant: str) -> None:
    one, donor = pair(variant)
    group = parts.stream(one)
    _, theirs = tapped(variant, ["*.output"], OTHER)
    found = patch(one, donor, METRIC, group)
    own = both(variant)[0]
    for index, (part,) in group.parts.items():

        def put(value: torch.Tensor, part: Part = part) -> torch.Tensor:
            value = value.clone()
            value[0][part.where] = theirs[part.point][0][part.where]
            return value

        changed = asked(tapped(variant, {part.point: put})[0])
        assert found.values[index] == pytest.approx(changed - own, abs=1e-5)


@pytest.mark.parametrize("which", ["key", "value"])
def test_a_kv_heads_patch_touches_just_its_group(which: str) -> None:
    """Case I7: 4 query heads over 2 are [0, 0, 1, 1]: there are 2 parts a layer, each alters just 2 heads."""
    one, donor = pair("grouped")
    group = parts.projected(one, which)  # type: ignore[arg-type]
    assert group.axes[1].labels == (0, 1)
    assert parts.projected(one, "query").axes[1].labels == (0, 1, 2, 3)
    own = one.read(["layers.1.attention.heads"])["layers.1.attention.heads"][0]
    theirs = donor.read([f"layers.1.attention.{which}"])[f"layers.1.attention.{which}"][0]
    for head in (0, 1):
        (part,) = group.parts[1, head]
        rows = [[Change(part, theirs[part.where])]]
        changed = record(one, rows, ["layers.1.attention.heads"])[0]["layers.1.attention.heads"]
        moved = [(changed[:, h] - own[:, h]).abs().max() > 1e-4 for h in range(4)]
        assert moved == [h // 2 == head for h in range(4)]
        for h in range(4):
            if not moved[h]:
                assert_close(changed[:, h], own[:, h])


@pytest.mark.parametrize("variant", ["grouped", "biased", "parallel", "alibi", "post-norm"])
def test_attribution_patching_is_the_slope_of_patching(variant: str) -> None:
    """A thousandth of the way to the donor, and back, moves the metric by a thousandth of it."""
    one, donor = pair(variant)
    for group in (parts.heads(one), parts.stream(one), parts.projected(one, "key")):
        found = attribution_patching(one, donor, METRIC, group)
        points = [part.point for some in group.parts.values() for part in some]
        ours, theirs = one.read(points), donor.read(points)
        rows = []
        for some in group.parts.values():
            for step in (1e-2, -1e-2):
                way = {p: ours[p][0] + step * (theirs[p][0] - ours[p][0]) for p in points}
                rows.append([Change(part, way[part.point][part.where]) for part in some])
        ahead, back = measure(one, rows, METRIC).reshape(-1, 2).T
        slopes = (ahead - back) / 2e-2
        scale = np.abs(slopes).max()
        np.testing.assert_allclose([found.values[i] for i in group.parts], slopes, atol=0.01 * scale)
    facts = attribution_patching(*pair(variant), METRIC, parts.stream(one)).facts
    assert (facts["own"], facts["donor"]) == pytest.approx(both(variant), abs=1e-5)


def by_way(variant: str, sender: Part, receiver: Part | None) -> float:
    """Two full passes by taps: the sender the donor's, all later heads as they are; then the receiver."""
    _, ours = tapped(variant, ["*.heads"])
    _, theirs = tapped(variant, ["*.heads"], OTHER)
    held = {name: ours[name] for name in ours.history}
    value = held[sender.point].clone()
    value[0][sender.where] = theirs[sender.point][0][sender.where]
    changes: dict[str, torch.Tensor | None] = {**held, sender.point: value}
    if receiver is None:
        return asked(tapped(variant, changes)[0])
    _, got = tapped(variant, {**changes, receiver.point: None})
    received = got[receiver.point]

    def put(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value[0][receiver.where] = received[0][receiver.where]
        return value

    return asked(tapped(variant, {receiver.point: put})[0])


@pytest.mark.parametrize("variant", ["grouped", "biased", "parallel", "alibi", "post-norm"])
def test_a_path_is_followed_in_two_passes(variant: str) -> None:
    one, donor = pair(variant)
    senders, own = parts.heads(one), both(variant)[0]
    receiver = Part("layers.1.attention.value", (1,))
    direct = path_patching(one, donor, METRIC, senders)
    through = path_patching(one, donor, METRIC, senders, [receiver])
    for index, (sender,) in senders.parts.items():
        assert direct.values[index] == pytest.approx(by_way(variant, sender, None) - own, abs=1e-5)
        assert through.values[index] == pytest.approx(by_way(variant, sender, receiver) - own, abs=1e-5)
    assert (np.abs(through.values[0]) > 1e-5).all()
    np.testing.assert_allclose(through.values[1], 0, atol=1e-6)  # a head does not send to its own layer


def test_the_direct_way_of_a_last_head_is_all_its_effect() -> None:
    one, donor = pair("grouped")
    senders = parts.heads(one)
    np.testing.assert_allclose(
        path_patching(one, donor, METRIC, senders).values[1],
        patch(one, donor, METRIC, senders).values[1],
        atol=1e-6,
    )


def test_ways_through_all_receivers_and_the_direct_one_are_all_there_is() -> None:
    """Attention alone, two layers: with the sender's way to every query, key and value of the second layer
    and its direct way both open, everything that the head does is done."""
    spec = model(*(pre_norm(attention(4, 2, position=Rotary(100.0))),) * 2)
    network_ = random_model(spec)
    one, donor = Reading(network_, TOKENS), Reading(network_, OTHER)
    senders = Parts("head", (), {(): parts.heads(one).parts[0, 2]})
    held = ["layers.1.attention.heads"]
    closed = path_patching(one, donor, METRIC, senders, frozen=held)
    opened = path_patching(one, donor, METRIC, senders, frozen=[])
    whole = patch(one, donor, METRIC, senders)
    assert float(opened) == pytest.approx(float(whole), abs=1e-6)
    assert abs(float(closed) - float(whole)) > 1e-4


def test_paths_begin_at_the_sender_and_end_at_the_receiver() -> None:
    """Nothing before the first, and behind the second once only."""
    one, donor = pair("grouped")
    one.value(METRIC), one.read(["layers.0.attention.heads"])
    senders = Parts("heads", (), {(): parts.heads(one).parts[0, 0]})
    facts = path_patching(one, donor, METRIC, senders, [Part("layers.0.feed_forward.output")]).facts
    # the heads and the receiver as they are (2 + 2), the sender up to layer 0 (1), the receiver (2)
    assert facts["layers"] == 7
    late = Parts("heads", (), {(): parts.heads(one).parts[1, 0]})
    assert path_patching(one, donor, METRIC, late).facts["layers"] == 2 + 1


def test_what_cannot_be_patched_is_refused() -> None:
    one, donor = pair("grouped")
    with pytest.raises(RequestError, match="here are 7 and 5"):
        patch(one, reading("grouped", OTHER[:, :5]), METRIC, parts.heads(one))
    with pytest.raises(RequestError, match="by the same model"):
        patch(one, reading("biased", OTHER), METRIC, parts.heads(one))
    with pytest.raises(RequestError, match="frozen, so that nothing would reach it"):
        path_patching(one, donor, METRIC, parts.heads(one), [Part("layers.1.attention.heads")])
    with pytest.raises(UnsupportedError, match="shares its keys and values between all heads"):
        parts.projected(reading("latent"), "key")
    with pytest.raises(RequestError, match="there is nothing to recover"):
        recovered(patch(one, reading("grouped"), METRIC, parts.heads(one)))
    with pytest.raises(RequestError, match="Only patching has a donor"):
        recovered(ablate(one, METRIC, parts.heads(one)))
