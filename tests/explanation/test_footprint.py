"""What a sweep says that it takes of memory: held against what torch's allocator gave out meanwhile."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from qkv.errors import RequestError
from qkv.explanation import (
    Change,
    Evidence,
    Loss,
    Mean,
    Part,
    Reading,
    Resample,
    ablate,
    occlusion,
    parts,
    patch,
    path_patching,
)
from qkv.explanation.footprint import Footprint
from qkv.explanation.intervention import Replacement, needed
from qkv.nn.choice import named, use
from tests.explanation.cases import EVERY, METRIC, OTHER, REFERENCE, SOURCE, TOKENS, network, reading
from tests.matrix.variants import VOCAB

LONG = torch.randint(0, VOCAB, (1, 32), generator=torch.Generator().manual_seed(9))


def peak(work: Callable[[], Evidence]) -> tuple[int, Evidence]:
    """Bytes that were given out and not given back, at most, by what the allocator reports."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        found = work()
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]  # type: ignore[union-attr]
    sizes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return int(np.cumsum(sizes).max()), found


def obeyed(work: Callable[[], Evidence]) -> Evidence:
    most, found = peak(work)
    assert most <= found.facts["bytes"]
    return found


def limited(variant: str, memory: int | None = None, tokens: Tensor = LONG) -> Reading:
    model = network(variant)
    return Reading(model, tokens, SOURCE if model.paired else None, memory=memory)


@pytest.mark.parametrize("variant", EVERY)
def test_a_sweep_takes_no_more_than_it_says(variant: str) -> None:
    one = limited(variant)
    first = obeyed(lambda: ablate(one, METRIC, parts.heads(one)))
    again = obeyed(lambda: ablate(one, METRIC, parts.layers(one)))
    assert 0 < again.facts["bytes"] != first.facts["bytes"] > one.first.row


@pytest.mark.parametrize("variant", ["grouped", "alibi", "experts-softmax", "encoder-decoder-pre-norm"])
def test_patches_and_references_are_counted_with_what_they_keep(variant: str) -> None:
    one, donor, reference = reading(variant), reading(variant, OTHER), reading(variant, REFERENCE)
    donor.value(METRIC), reference.embeddings
    heads = parts.heads(one)
    obeyed(lambda: patch(one, donor, METRIC, parts.stream(one)))
    obeyed(lambda: ablate(one, METRIC, heads, Mean(reference)))
    obeyed(lambda: path_patching(one, donor, METRIC, heads))
    side = one.sides[-1].prefix
    receivers = [Part(f"{side}layers.1.attention.value"), Part(f"{side}layers.1.feed_forward.output")]
    obeyed(lambda: path_patching(one, donor, METRIC, heads, receivers))


def test_what_the_head_answers_at_every_place_is_counted() -> None:
    metric = Loss(tuple(LONG[0, 1:].tolist()))
    one = limited("grouped")
    whole = obeyed(lambda: ablate(one, metric, parts.heads(one)))
    last = obeyed(lambda: ablate(one, METRIC, parts.heads(one)))
    assert whole.facts["bytes"] - last.facts["bytes"] >= 4 * 30 * VOCAB * whole.facts["rows"]


def test_a_fused_attention_is_counted_as_it_runs() -> None:
    """It holds no scores, unless they are what is changed."""
    model = copy.deepcopy(network("grouped"))
    use(model, named("sdpa"))
    one, plain = Reading(model, LONG), limited("grouped")
    most, fused = peak(lambda: ablate(one, METRIC, parts.heads(one)))
    within = (
        4 * 32 * (512 + 64) * torch.get_num_threads()
    )  # the kernel's own blocks of scores, in each thread
    assert most <= fused.facts["bytes"] + within
    assert 2 * fused.facts["bytes"] < ablate(plain, METRIC, parts.heads(plain)).facts["bytes"]
    weights = parts.Parts("weights", (), {(): (Part("layers.0.attention.weights"),)})
    shown = obeyed(lambda: ablate(one, METRIC, weights))
    scores = 4 * 32 * 32 * 4
    assert shown.facts["bytes"] > 3 * scores > fused.facts["bytes"] / 4


@pytest.mark.parametrize("variant", ["grouped", "encoder-decoder-pre-norm"])
def test_a_limit_makes_batches_smaller_and_changes_nothing(variant: str) -> None:
    free = limited(variant)
    heads = parts.heads(free)
    whole = ablate(free, METRIC, heads)
    nothing = torch.zeros(())
    need = needed(free, [[Change(part, nothing) for part in some] for some in heads.parts.values()], METRIC)
    assert need.rows == whole.facts["rows"] == 4
    for most in (1, 2, 3):
        memory = need.kept + most * need.row + need.row // 2
        one = limited(variant, memory)
        found = obeyed(lambda one=one: ablate(one, METRIC, heads))  # type: ignore[misc]
        assert found.facts["rows"] == most and found.facts["bytes"] <= memory
        np.testing.assert_allclose(found.values, whole.values, atol=1e-6)
    with pytest.raises(RequestError, match=f"give at least {need.kept + need.row:,}"):
        ablate(limited(variant, need.kept + need.row - 1), METRIC, heads)


@pytest.mark.parametrize("by", [Mean, Resample])
def test_a_limit_holds_for_the_reference_that_is_read(by: Callable[[Reading], Replacement]) -> None:
    """Some rows of it at a time, as few as a limit allows: a mean needs their sum, the others all of them."""
    rows = torch.randint(0, VOCAB, (40, 32), generator=torch.Generator().manual_seed(3))
    reference, free = limited("grouped", tokens=rows), limited("grouped")
    assert len(reference.embeddings) == 1
    most, whole = peak(lambda: ablate(free, METRIC, parts.heads(free), by(reference)))
    one = limited("grouped", memory=3 * most // 4)
    less, found = peak(lambda: ablate(one, METRIC, parts.heads(one), by(reference)))
    assert less <= 3 * most // 4 and found.facts["bytes"] <= 3 * most // 4
    np.testing.assert_allclose(found.values, whole.values, atol=1e-6)


def test_occlusion_needs_the_prompt_and_the_token_that_is_put() -> None:
    from qkv.explanation import Blank

    one = limited("grouped")
    obeyed(lambda: occlusion(one, METRIC, Blank(2)))


def test_memory_is_counted_once_and_given_back() -> None:
    before = torch.zeros(10)
    with Footprint() as footprint:
        a = before + 1
        b = a.view(2, 5)
        before.add_(1)
        assert (footprint.now, footprint.most) == (40, 40)
        del a
        assert footprint.now == 40
        c = b * 2
        assert footprint.now == 80
        del b
        assert (footprint.now, footprint.most) == (40, 80)
        footprint.release(c)
        assert footprint.now == 0
        del c
    assert (footprint.now, footprint.most) == (0, 80)


@pytest.mark.parametrize("memory", [0, -5, 2.5, True])
def test_a_memory_that_is_no_number_of_bytes_is_refused(memory: object) -> None:
    with pytest.raises(RequestError, match="memory must be a whole number of bytes"):
        Reading(network("grouped"), TOKENS, memory=memory)  # type: ignore[arg-type]
