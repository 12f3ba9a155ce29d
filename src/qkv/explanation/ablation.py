"""What the answer loses when a part is taken out: the measured effect that every other score stands beside.

Parts are named in `parts`: heads, sublayers, feed-forwards, layers, positions, tokens (occlusion),
neurons. What they are replaced with is `Zero()`, `Mean(reference)`, `Resample(reference)`, or
`Blank(token)`. Zeiler and Fergus 2014, section 4.2 (occlusion); Michel et al. 2019 (heads).
"""

from __future__ import annotations

from qkv.explanation.intervention import Blank, Mean, Replacement, Resample, Zero, effects
from qkv.explanation.metric import Metric
from qkv.explanation.parts import Parts, tokens
from qkv.explanation.reading import Reading
from qkv.explanation.result import Evidence

__all__ = ["Blank", "Mean", "Resample", "Zero", "ablate", "occlusion"]


def ablate(reading: Reading, metric: Metric, parts: Parts, by: Replacement = Zero()) -> Evidence:
    """How much of the metric goes with each part: as it is, less with the part replaced.

    Positive: the part supports what is measured. On the axes of the parts. `facts["own"]` is the metric
    with nothing replaced. Parts of one layer run as one batch, from that layer on: `facts["rows"]` are
    the most of a batch, and `facts["bytes"]` what tensors take at most beside the weights, which the
    `memory` of a reading limits.
    """
    values, base, facts = effects(reading, parts, by, metric)
    score = f"{metric.name} as it is, less with the part replaced"
    return Evidence(
        f"ablation of {parts.what}", base - values, parts.axes, score, by.name, metric.name, facts
    )


def occlusion(reading: Reading, metric: Metric, by: Replacement) -> Evidence:
    """How much of the metric goes when a token's embedding is replaced. Axis (token).

    Its place stays, and others see it as they did. `by` is a `Blank` token, most often.
    """
    return ablate(reading, metric, tokens(reading), by)
