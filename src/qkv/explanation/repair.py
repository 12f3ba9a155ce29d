"""How much of what a head does later layers make up for when it is taken out: self-repair.

What a head writes reaches the answer by two ways: directly, along the stream, and through all the layers
behind it, which read it too. Taken out, it is often missed by less than it wrote, because those layers
then do something else. Wang et al. 2023, section 3.4 (backup heads); McGrath et al. 2023 (the Hydra
effect); Rushing and Nanda 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace

from torch import Tensor

from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.ablation import ablate
from qkv.explanation.intervention import Change, Replacement, Zero, measure, substituted
from qkv.explanation.metric import Metric
from qkv.explanation.parts import Part, Parts, every_head, every_mixer
from qkv.explanation.reading import Reading
from qkv.explanation.result import Evidence, gathered


def self_repair(
    reading: Reading, metric: Metric, parts: Parts | None = None, by: Replacement = Zero()
) -> Evidence:
    """What later layers make up for with each head replaced: its direct effect less its measured one.

    Positive: less goes than the head wrote; negative: more, for what it wrote was built upon. Axes
    (layer, head), as `ablate` and `direct_effects`, of which it is the difference: nothing behind a
    model's last attention is left to repair it but a feed-forward, and without one it is 0. `parts` are
    heads of the trunk, all of them where not given. `facts["own"]` is the metric with nothing replaced.

    Raises UnsupportedError for heads of an encoder that a decoder reads: only its attention does.
    """
    before = copy(reading.counts)
    parts = every_head(reading, -1) if parts is None else parts
    direct, total = direct_effects(reading, metric, parts, by), ablate(reading, metric, parts, by)
    score = f"{metric.name}: what goes directly with the head replaced, less what goes"
    facts = {"own": total.facts["own"], **reading.since(before)}
    return replace(total, method="self-repair", values=direct.values - total.values, score=score, facts=facts)


def direct_effects(
    reading: Reading, metric: Metric, parts: Parts | None = None, by: Replacement = Zero()
) -> Evidence:
    """How much of the metric goes with each head by the direct way: with all later mixers held as they are.

    Only norms and the head of the model are computed anew, and so any metric and any head will do.
    Where these are linear, it is `direct_attribution`'s share of the head. Axes (layer, head). The
    direct way of path patching: Wang et al. 2023, section 3.1.

    Raises as `self_repair`.
    """
    before = copy(reading.counts)
    parts = every_head(reading.one(), -1) if parts is None else parts
    outputs = _outputs(reading)
    held = {point: value[0] for point, value in reading.read(outputs).items()}
    base, found = float(reading.value(metric)), dict.fromkeys(parts.parts, 0.0)
    groups = [[Part(part.point, part.where) for part in group] for group in parts.parts.values()]
    alternatives = substituted(reading, [part for group in groups for part in group], by)
    for changes in alternatives:
        rest = iter(changes)
        rows = [_row([next(rest) for _ in group], outputs, held) for group in groups]
        for index, value in zip(found, measure(reading, rows, metric), strict=True):
            found[index] += float(value) / len(alternatives)
    values = base - gathered(found, parts.axes)
    score = f"{metric.name} as it is, less with the part replaced and all later mixers as they were"
    facts = {"own": base, **reading.since(before)}
    method = f"direct effects of {parts.what}"
    return Evidence(method, values, parts.axes, score, by.name, metric.name, facts)


def _outputs(reading: Reading) -> list[str]:
    """What each mixer of the trunk adds to the stream, in the order of the computation."""
    side = len(reading.sides) - 1
    return [site.point(reading, "output") for site in every_mixer(reading) if site.side == side]


def _row(changes: Sequence[Change], outputs: Sequence[str], held: Mapping[str, Tensor]) -> list[Change]:
    """The head's own change, and every mixer behind it as it was."""
    own = {change.part.point.rpartition(".")[0] + ".output" for change in changes}
    if len(own) != 1 or any(not change.part.point.endswith(".heads") for change in changes):
        raise RequestError("Direct effects are of heads, those of one attention at a time: see parts.heads.")
    if not own <= set(outputs):
        raise UnsupportedError("Heads of an encoder reach the answer through a decoder's attention alone.")
    later = outputs[outputs.index(own.pop()) + 1 :]
    return [*changes, *(Change(Part(point), held[point]) for point in later)]
