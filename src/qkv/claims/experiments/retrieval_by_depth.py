"""H24: keys with values, then keys again: is the value right, by how many pairs there are and by its depth?

The task is the key-value retrieval of Liu et al. 2023 (section 3), with one token for a key and its value. A
row is n pairs of different keys, then keys of them in another order, each a question whose answer is only a
target: in training all n, in the test one. Two layers are trained on 4 to 16 pairs and tested on up to 128.
Positions are T5's buckets, whose last one begins at 27: all that is further has one bias, so that no distance
of a longer row is new. Depth is where the asked pair stands, in fifths of the row.

Tried before: keys and values as two tokens. Then the value's place has to look at the token before, and
neither rotary positions (2,500 steps) nor buckets (1,100) led there; where questions came again in the same
order, a copy from a fixed distance was learnt instead.

The expectation names what is to be looked at, not an outcome. What we expect, written before measuring: at
trained lengths nearly all is right; beyond them less the more pairs there are; it depends on depth there,
and the middle is worse than the better end (Liu et al. 2023, figure 5); and the weight that the asked pair
gets from the head that gives it most falls with every doubling of the pairs, as softmax weights over more
keys do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.charts.pictures import Series, curves, heat, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, spread, within
from qkv.claims.models import initialised, small_lm
from qkv.claims.training import adam, train, warm_up
from qkv.nn import Taps, Transformer, tap_names

KEYS, VALUES = 128, 8
QUESTION, ANSWER, VOCAB = KEYS * VALUES, KEYS * VALUES + KEYS, KEYS * VALUES + KEYS + VALUES
NEAR = spec.Buckets(16, 32, bidirectional=False)
LEAST, MOST = 4, 16  # pairs in training
PAIRS = (8, 16, 32, 64, 128)
DEPTHS = 5
PLACES = ("first", "second", "middle", "fourth", "last")  # fifths


class Pairs(NamedTuple):
    """Rows of pairs, then of questions, and for each question its answer and where the pair stands."""

    tokens: Tensor  # (rows, pairs + asked)
    answers: Tensor  # (rows, asked): a value, from 0
    places: Tensor  # (rows, asked)


def pairs(generator: torch.Generator, rows: int, count: int, asked: int) -> Pairs:
    """`count` pairs of different keys, one token each, then questions for `asked` of these keys.

    A pair of key and value is the token key * VALUES + value; questions follow all pairs.
    """
    keys = torch.rand(rows, KEYS, generator=generator).argsort(1)[:, :count]
    values = torch.randint(VALUES, (rows, count), generator=generator)
    places = torch.rand(rows, count, generator=generator).argsort(1)[:, :asked]
    tokens = torch.cat([keys * VALUES + values, QUESTION + keys.gather(1, places)], 1)
    return Pairs(tokens, values.gather(1, places), places)


def measure(run: Run) -> Figures:
    model = small_lm(VOCAB, layers=2, width=run.of(64, 16), position=NEAR)
    network = initialised(model, run.generator("weights"))
    steps = run.of(1500, 3)
    curve = train(
        network,
        batches(run),
        answers_loss(network),
        steps,
        adam(network, 2e-3),
        schedule=warm_up(steps // 20 + 1),
        told=run.progress,
        note="4 to 16 pairs",
    )
    found: Figures = {"curve": curve.data(), "right": {}, "weight": {}}
    for count in PAIRS:
        rows = pairs(run.generator(f"test {count}"), run.of(2000, 40), count, 1)
        right, weight = asked_once(network, rows, max(1, 65_536 // count**2))
        depth = rows.places[:, 0] * DEPTHS // count
        found["right"][str(count)] = [float(right[depth == fifth].mean()) for fifth in range(DEPTHS)]
        found["weight"][str(count)] = float(weight.mean(0).max())
    return found


def batches(run: Run) -> Iterator[Pairs]:
    """Of one number of pairs each, all of them asked for."""
    draw = run.generator("batches")
    while True:
        count = int(torch.randint(LEAST, MOST + 1, (), generator=draw))
        yield pairs(draw, run.of(32, 4), count, count)


def answers_loss(network: Transformer) -> Callable[[Pairs], Tensor]:
    def loss(rows: Pairs) -> Tensor:
        logits = network(rows.tokens)[:, -rows.answers.shape[1] :, ANSWER:]
        return F.cross_entropy(logits.flatten(0, 1), rows.answers.flatten())

    return loss


@torch.no_grad()
def asked_once(network: Transformer, rows: Pairs, batch: int) -> tuple[Tensor, Tensor]:
    """Of each row, asked for one key: is the value right, and the weight that each head gave to its pair.

    The weights are (rows, layers * heads), from the question on.
    """
    right, given = [], []
    for tokens, answers, places in zip(*(part.split(batch) for part in rows), strict=True):
        taps = Taps("layers.*.attention.weights", tap_names(network.spec))
        logits = network(tokens, tap=taps, last_only=True)[:, -1, ANSWER:]
        right.append((logits.argmax(-1) == answers[:, 0]).float())
        last = torch.cat([taps[name][:, :, -1] for name in taps], 1)
        pair = places[:, :1].expand(-1, last.shape[1])
        given.append(last.gather(-1, pair[..., None])[..., 0])
    return torch.cat(right), torch.cat(given)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def right(count: int) -> list[float]:
        """% over all depths."""
        return [100 * sum(each["right"][str(count)]) / DEPTHS for each in figures]

    longest = [[100 * share for share in each["right"][str(PAIRS[-1])]] for each in figures]
    trained = [count for count in PAIRS if count <= MOST]
    beyond = [count for count in PAIRS if count >= MOST]
    weights = [[each["weight"][str(count)] for count in PAIRS] for each in figures]
    ends = [max(depths[0], depths[-1]) for depths in longest]
    return (
        *(
            within(f"{count} pairs, as in training: over 95 % are right", right(count), 95, 100, ".1f", " %")
            for count in trained
        ),
        *(
            below(
                f"beyond training: of {2 * count} pairs fewer are right than of {count}",
                right(2 * count),
                right(count),
                ".1f",
                " %",
            )
            for count in beyond[:-1]
        ),
        within(
            "128 pairs: the best and the worst depth are over 5 points apart",
            [max(depths) - min(depths) for depths in longest],
            5,
            100,
            ".1f",
            " points",
        ),
        below(
            "128 pairs: the middle is worse than the better end",
            [depths[DEPTHS // 2] for depths in longest],
            ends,
            ".1f",
            " %",
        ),
        Check(
            "the weight on the asked pair falls with every doubling of the pairs",
            ", ".join(
                f"{count}: {spread([row[i] for row in weights], '.2f')}" for i, count in enumerate(PAIRS)
            ),
            all(after < before for row in weights for before, after in pairwise(row)),
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    def middle(values: list[float]) -> float:
        return sorted(values)[len(values) // 2]

    shares = [
        [middle([each["right"][str(count)][fifth] for each in figures]) for count in PAIRS]
        for fifth in range(DEPTHS)
    ]
    weight = Series(
        "the head that gives most",
        PAIRS,
        [[each["weight"][str(count)] for count in PAIRS] for each in figures],
    )
    right = Series(
        "right", PAIRS, [[sum(each["right"][str(count)]) / DEPTHS for count in PAIRS] for each in figures]
    )
    across = Axis("pairs in the row; trained on 4 to 16", log=True, ticks=PAIRS)
    return {
        "depth": picture(
            heat(
                "Right answers, by where the asked pair stands",
                shares,
                PLACES,
                [str(count) for count in PAIRS],
                "fifth of the row",
                "pairs",
            )
        ),
        "length": picture(
            curves("Right answers", [right], across, Axis("share", low=0, high=1)),
            curves("Weight on the asked pair", [weight], across, Axis("weight", low=0, high=1)),
        ),
    }
