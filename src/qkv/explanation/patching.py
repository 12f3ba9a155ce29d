"""What one prompt's answer becomes with parts of another's computation, and by which way it gets there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from qkv.errors import RequestError
from qkv.explanation.footprint import Need
from qkv.explanation.intervention import Change, Resample, effects, measure, needed, record
from qkv.explanation.metric import Metric
from qkv.explanation.parts import Grouped, Part, Parts, every_mixer
from qkv.explanation.reading import Reading
from qkv.explanation.result import Evidence, gathered


def patch(reading: Reading, donor: Reading, metric: Metric, parts: Parts) -> Evidence:
    """How far each part, as the donor has it, moves the metric: with it, less as it is.

    Both prompts have as many tokens, and differ in what is asked about. On the axes of the parts.
    `facts["own"]` and `facts["donor"]` are the metric of both: `recovered` divides by their difference.
    Vig et al. 2020; Meng et al. 2022, section 2 (causal tracing).
    """
    values, own, facts = effects(reading, parts, Resample(donor.one()), metric)
    facts["donor"] = float(donor.value(metric))
    method, score = (
        f"patching of {parts.what}",
        f"{metric.name} with the part of the other prompt, less without",
    )
    return Evidence(method, values - own, parts.axes, score, "the other prompt", metric.name, facts)


def recovered(evidence: Evidence) -> Evidence:
    """Effects of patching as shares of the way to the donor's answer: 1 is all of it.

    Raises RequestError for other results, and where both prompts give the same.
    """
    facts = evidence.facts
    if "donor" not in facts or "own" not in facts:
        raise RequestError(f"Only patching has a donor to recover the answer of, not {evidence.method}.")
    away = facts["donor"] - facts["own"]
    if away == 0:
        raise RequestError(f"Both prompts give the same {evidence.metric}, so there is nothing to recover.")
    score = f"share of the way from one {evidence.metric} to the other"
    return replace(evidence, values=evidence.values / away, score=score)


def attribution_patching(reading: Reading, donor: Reading, metric: Metric, parts: Parts) -> Evidence:
    """What `patch` would give, to first order, for all parts from one pass and its gradient.

    The gradient at the part times how much the donor differs there. Nanda 2023; Kramár et al. 2024,
    section 3. It misses what bends: a saturated softmax has no gradient and still an effect.
    """
    before = copy(reading.counts)
    points = list(dict.fromkeys(part.point for group in parts.parts.values() for part in group))
    reading.one().alike(donor.one())
    own, values, slopes = _slopes(reading, metric, points)
    theirs = donor.read(points)
    moved = {p: slopes[p][0].double() * (theirs[p][0] - values[p][0]).double() for p in points}
    found = {
        index: sum(float(moved[part.point][part.where].sum()) for part in group)
        for index, group in parts.parts.items()
    }
    facts = {"own": own, "donor": float(donor.value(metric)), **reading.since(before)}
    method, score = f"attribution patching of {parts.what}", f"change of the {metric.name}, to first order"
    shares = gathered(found, parts.axes)
    return Evidence(method, shares, parts.axes, score, "the other prompt", metric.name, facts)


def path_patching(
    reading: Reading,
    donor: Reading,
    metric: Metric,
    senders: Parts,
    receivers: Sequence[Part] = (),
    frozen: Sequence[str] | None = None,
) -> Evidence:
    """How far each sender, as the donor has it, moves the metric by way of the receivers alone.

    First the sender is the donor's and `frozen` points are held as they are; what the receivers then
    get is put there in a second pass, and nothing else. Without receivers the way ends at the answer.
    Frozen are the heads of every attention unless given, so a way goes through feed-forwards and norms,
    which are computed anew. On the axes of the senders. Wang et al. 2023, section 3.1 and appendix B;
    Goldowsky-Dill et al. 2023.

    Raises RequestError for a receiver that is frozen itself: take its queries, keys or values.
    """
    before = copy(reading.counts)
    reading.one().alike(donor.one())
    held = _held(reading) if frozen is None else list(frozen)
    for part in receivers:
        if part.point in held:
            raise RequestError(f"{part.point!r} is frozen, so that nothing would reach it as a receiver.")
    rows = _sent(reading, donor, senders, held)
    need = Need()
    if receivers:
        points = list(dict.fromkeys(part.point for part in receivers))
        need = needed(reading, rows, points=points)
        got = record(reading, rows, points)
        rows = [[Change(part, row[part.point][part.where]) for part in receivers] for row in got]
        del got
    need = max(need, needed(reading, rows, metric))
    own, values = float(reading.value(metric)), measure(reading, rows, metric)
    facts = {"own": own, "donor": float(donor.value(metric)), **reading.since(before), **need.facts()}
    shares = gathered(dict(zip(senders.parts, values - own, strict=True)), senders.axes)
    ends = ", ".join(dict.fromkeys(part.point for part in receivers)) or "the answer"
    score = f"{metric.name} with the way from the part to {ends} of the other prompt, less without"
    method = f"path patching of {senders.what}"
    return Evidence(method, shares, senders.axes, score, "the other prompt", metric.name, facts)


def everything(reading: Reading) -> Parts:
    """All embeddings and all that any mixer adds, as one part without axes."""
    points = [f"{side.prefix}embedding" for side in reading.sides]
    points += [site.point(reading, "output") for site in every_mixer(reading)]
    whole: Grouped = {(): tuple(Part(point) for point in points)}
    return Parts("everything", (), whole)


def _sent(reading: Reading, donor: Reading, senders: Parts, held: Sequence[str]) -> list[list[Change]]:
    """The changes of each sender's first pass."""
    points = list(dict.fromkeys(part.point for group in senders.parts.values() for part in group))
    theirs = {point: value[0] for point, value in donor.read(points).items()}
    ours = {point: value[0] for point, value in reading.read(held).items()}
    return [_first(reading, group, theirs, ours) for group in senders.parts.values()]


def _held(reading: Reading) -> list[str]:
    return [
        site.point(reading, "heads") for site in every_mixer(reading) if site.mixer.role != "feed_forward"
    ]


def _first(
    reading: Reading, group: Sequence[Part], theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]
) -> list[Change]:
    """All that is frozen behind a sender as it is, then the sender as the donor has it."""
    start = min(reading.place(part.point) for part in group)
    held = [Change(Part(point), value) for point, value in ours.items() if reading.place(point) >= start]
    return held + [Change(part, theirs[part.point][part.where]) for part in group]


def _slopes(
    reading: Reading, metric: Metric, points: Sequence[str]
) -> tuple[float, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The metric, the values of the points, and its gradient at each."""
    leaves = [x.detach().clone().requires_grad_() for x in reading.embeddings]
    taps, places = reading.taps(points), reading.places(metric)
    with torch.enable_grad():
        value = metric(reading.run(taps, inputs=leaves, places=places))
        slopes = torch.autograd.grad(value.sum(), [taps[point] for point in points])
    values = {point: taps[point].detach() for point in points}
    return float(value.detach()), values, dict(zip(points, slopes, strict=True))
