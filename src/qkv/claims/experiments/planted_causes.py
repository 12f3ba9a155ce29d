"""H22: what attention says of causes that are known, against what taking tokens out in fact does.

A row is 16 tokens and a question at its end: four of the tokens have values (-4 to 4, without 0), the others
are fillers without any, and the answer is if the values' sum is above 0. So each answer has four causes of
known and different weight. A network of four layers without a causal mask learns it; then for single rows the
scores of the 16 tokens are compared by Spearman's rank correlation with the size of what occlusion by a
filler does to the difference of both answers' logits (rows are compared one by one, then the mean is taken):
attention from the question in each layer (mean of the heads), rollout up to each layer, and the size of
integrated gradients, from that filler on.

Adversarial attention (Jain and Wallace 2019): other weights of all heads of a layer at the question, that
move the answer's probabilities by at most 0.01, as far from the own ones as can be found. It keeps the output
where they are half as far away as weights can be (ln 2 / 2 nats), for over half of the rows in a layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.charts.pictures import Series, curves, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, within
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import adam, cosine, train, warm_up
from qkv.explanation import (
    Blank,
    Difference,
    Reading,
    adversarial_attention,
    attention_maps,
    integrated_gradients,
    occlusion,
    rollout,
    spearman,
)
from qkv.nn import Transformer

LAYERS, LENGTH, CAUSES, FILLERS = 4, 16, 4, 8
VALUES = (-4, -3, -2, -1, 1, 2, 3, 4)  # of tokens 0 to 7; fillers follow them
BLANK = len(VALUES)
NO, YES, ASK = range(len(VALUES) + FILLERS, len(VALUES) + FILLERS + 3)
VOCAB = ASK + 1
MOST, FAR = 0.01, math.log(2) / 2
LEARNED = 0.95


def measure(run: Run) -> Figures:
    model = small_lm(VOCAB, layers=LAYERS, position=spec.Learned(LENGTH + 1), mask=spec.Everything())
    network = initialised(model, run.generator("weights"))
    drawn, steps = run.generator("batches"), run.of(1000, 3)
    curve = train(
        network,
        (rows(drawn, 64) for _ in range(steps)),
        lambda batch: F.cross_entropy(network(batch[0])[:, -1], batch[1]),
        steps,
        adam(network, 1e-3),
        schedule=warm_up(steps // 10 + 1, cosine(steps)),
        told=run.progress,
        note="training",
    )
    given, answers = rows(run.generator("test"), 512)
    with torch.no_grad():
        right = float((network(given)[:, -1].argmax(-1) == answers).float().mean())
    return {"curve": curve.data(), "right": right} | explained(run, network, given)


def rows(generator: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Rows with four causes whose sum is not 0, and their answers."""
    tokens = BLANK + torch.randint(FILLERS, (count, LENGTH), generator=generator)
    places = torch.rand(count, LENGTH, generator=generator).argsort(1)[:, :CAUSES]
    chosen = torch.randint(len(VALUES), (count, CAUSES), generator=generator)
    worth = torch.tensor(VALUES)
    even = worth[chosen].sum(-1) == 0
    chosen[even, 0] = (chosen[even, 0] + 1) % len(VALUES)  # any other value: no longer even
    tokens.scatter_(1, places, chosen)
    answers = torch.where(worth[chosen].sum(-1) > 0, YES, NO)
    return torch.cat([tokens, torch.full((count, 1), ASK)], 1), answers


def explained(run: Run, network: Transformer, given: Tensor) -> Figures:
    """Correlations with the measured effects by method, layer by layer where it has any, and adversaries."""
    count, few = run.of((60, 6), (2, 1))
    found: dict[str, list[np.ndarray | float]] = {"raw": [], "rollout": [], "gradients": [], "known": []}
    for place, row in enumerate(given[:count]):
        for name, value in correlations(network, row).items():
            found[name].append(value)
        if place % 10 == 0:
            run.progress(place, count, "scores of tokens")
    far = []
    for row in given[:few]:
        tries = [
            adversarial_attention(Reading(network, row), layer, most=MOST, steps=run.of(150, 5))
            for layer in range(LAYERS)
        ]
        far.append([each.facts["divergence"] for each in tries])
    means = {name: np.nanmean(np.array(values), 0).tolist() for name, values in found.items()}
    return {"agreement": means, "divergence": far}


def correlations(network: Transformer, row: Tensor) -> dict[str, np.ndarray | float]:
    """Of one row: with the effect of each of the 16 tokens, the question left out."""
    reading, metric, blank = Reading(network, row), Difference(YES, NO), Blank(BLANK)
    effects = size(occlusion(reading, metric, blank).values)
    raw = attention_maps(reading).values.mean(1)[:, -1, :LENGTH]  # (layer, key)
    rolled = rollout(reading).values[:, -1, :LENGTH]
    gradients = size(integrated_gradients(reading, metric, blank, tolerance=0.05, most=256).values)
    known = np.array([abs(VALUES[token]) if token < BLANK else 0 for token in row[:LENGTH].tolist()])
    return {
        "raw": np.array([spearman(layer, effects) for layer in raw]),
        "rollout": np.array([spearman(layer, effects) for layer in rolled]),
        "gradients": spearman(gradients, effects),
        "known": spearman(known, effects),
    }


def size(values: np.ndarray) -> np.ndarray:
    return np.abs(values[:LENGTH])


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    found = [each["agreement"] for each in figures]
    first, last = ([one["raw"][layer] for one in found] for layer in (0, -1))
    return (
        within(
            "the task is learned, over 95 % right",
            [100 * each["right"] for each in figures],
            100 * LEARNED,
            form=".1f",
            unit=" %",
        ),
        within(
            "occlusion finds the planted causes: correlation with their values over 0.7",
            [one["known"] for one in found],
            0.7,
            form=".2f",
        ),
        below("raw attention: correlation in the last layer is below that in the first", last, first, ".2f"),
        below(
            "in the last layer raw attention is below rollout", last, [o["rollout"][-1] for o in found], ".2f"
        ),
        below(
            "raw attention in the last layer is below integrated gradients",
            last,
            [one["gradients"] for one in found],
            ".2f",
        ),
        *(kept(figures, layer) for layer in range(LAYERS)),
    )


def kept(figures: Sequence[Figures], layer: int) -> Check:
    """Whether most rows have weights that are far away and answer the same."""
    shares = [float(np.mean([row[layer] > FAR for row in each["divergence"]])) for each in figures]
    what = f"layer {layer}: over half of the rows have attention half of ln 2 away that keeps the output"
    return within(what, [100 * share for share in shares], 50 + 1e-9, form=".0f", unit=" % of the rows")


def draw(figures: Sequence[Figures]) -> Pictures:
    found = [each["agreement"] for each in figures]
    layers = list(range(1, LAYERS + 1))
    series = [
        Series("raw attention", layers, [one["raw"] for one in found]),
        Series("rollout", layers, [one["rollout"] for one in found]),
        Series("integrated gradients", layers, [[one["gradients"]] * LAYERS for one in found]),
    ]
    far = [np.mean(each["divergence"], 0).tolist() for each in figures]
    bound = Axis("nats", low=0, marks={"as far as can be": math.log(2)})
    return {
        "agreement": picture(
            curves("Rank correlation with occlusion", series, Axis("layer"), Axis("Spearman"))
        ),
        "adversarial": picture(
            curves(
                "How far other weights with the same answer are",
                [Series("mean of the rows", layers, far)],
                Axis("layer"),
                bound,
            )
        ),
    }
