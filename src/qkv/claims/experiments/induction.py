"""H17: attention-only decoders, of two layers and of one, on random tokens that are repeated.

A row is a random prefix of 8 to 28 different tokens of 64, again and again: the second copy can be told
from the first by who looks up what followed the token the last time. Tokens are different within a prefix,
so that this is certain. What is measured is the loss on the second copy but for its first token, which
nothing announces. Positions are rotary. Matrices start at 1 / sqrt(inputs): at GPT-2's 0.02 the second
layer of one seed in three had found nothing to match after 2,500 steps.

Abrupt is a fall that takes less time than what came before it: from 80 to 20 % of the loss that one layer
ends at, in fewer steps than it took to come below 80 %. A head is an induction head from a prefix matching
score of over a half on, by the expectation's own bound; where there is none, the highest is taken. To
remove it, its part of what the output map reads is set to 0. The loss without the other heads of the last
layer is drawn beside that, and not judged: often all of them are induction heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qkv import spec
from qkv.charts.pictures import Bar, Series, bars, curves, heat, picture
from qkv.charts.scales import Axis
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.heads import all_heads, token_losses, weights_by_layer, without
from qkv.claims.judging import spread, within
from qkv.claims.models import attention_only, initialised, small_lm
from qkv.claims.tasks import Repeated, repeated
from qkv.claims.training import adam, next_token_loss, train, warm_up
from qkv.explanation import roles
from qkv.nn import NoTap, Tap, Transformer

VOCAB, LENGTH, BATCH = 64, 64, 32
SHORTEST, LONGEST, FIXED = 8, 28, 18
EVERY = 50  # steps between two looks at the second copy
CHANCE = math.log(VOCAB)
MATCHES = 0.5  # the score from which on a head is an induction head
TWO, ONE, CHEAT = "two layers", "one layer", "one layer, fixed period"
VARIANTS = {TWO: (2, SHORTEST, LONGEST), ONE: (1, SHORTEST, LONGEST), CHEAT: (1, FIXED, FIXED)}


def measure(run: Run) -> Figures:
    found: Figures = {}
    for name, (layers, shortest, longest) in VARIANTS.items():
        test = repeated(run.generator("test"), run.of(256, 8), LENGTH + 1, VOCAB, shortest, longest)
        network, curve = trained(run, name, layers, (shortest, longest), test)
        found[name] = {**curve, **by_head(network, test)}
    return found


def described(layers: int) -> spec.Model:
    """Pre-norm attention alone; d = 64, 4 heads."""
    return small_lm(VOCAB, layers=layers, position=spec.Rotary(), arrange=attention_only)


def trained(
    run: Run, name: str, layers: int, periods: tuple[int, int], test: Repeated
) -> tuple[Transformer, Figures]:
    """The network, and the loss on the second copy every so many steps, from before the first on."""
    network = initialised(described(layers), run.generator("weights"))
    batches, optimiser = endless(run.generator("batches"), *periods), adam(network)
    steps, every = run.of(2500, 4), run.of(EVERY, 2)
    few = Repeated(test.tokens[:64], test.periods[:64])
    seen, losses = [0], [second_copy(network, few)]
    for start in range(0, steps, every):
        curve = train(
            network,
            batches,
            next_token_loss(network),
            every,
            optimiser,
            schedule=lambda step, start=start: warm_up(100)(start + step),  # type: ignore[misc]
            points=1,
        )
        if curve.diverged is not None:
            return network, {"steps": seen, "losses": losses, "last": None}
        seen.append(start + every)
        losses.append(second_copy(network, few))
        run.progress(start + every, steps, f"{name}, second copy {losses[-1]:.3f}")
    return network, {"steps": seen, "losses": losses, "last": second_copy(network, test)}


def endless(draw: torch.Generator, shortest: int, longest: int) -> Iterator[Tensor]:
    while True:
        yield repeated(draw, BATCH, LENGTH + 1, VOCAB, shortest, longest).tokens


def second_copy(network: Transformer, rows: Repeated, tap: Tap = NoTap()) -> float:
    """The mean loss in nats on the second copy, without its first token."""
    losses = token_losses(network, rows.tokens, tap)  # at place i, of token i + 1
    period, place = rows.periods[:, None], torch.arange(losses.shape[1])
    return float(losses[(place >= period) & (place < 2 * period - 1)].mean())


def by_head(network: Transformer, test: Repeated) -> Figures:
    """Scores of every head (layer, head), and the loss without the induction heads, and without others."""
    weights = weights_by_layer(network, test.tokens[:64, :-1])
    tokens = test.tokens[:64, :-1]
    matching = [roles.prefix_matching(each, tokens).tolist() for each in weights]
    scores = {(i, head): score for i, layer in enumerate(matching) for head, score in enumerate(layer)}
    last = {head: scores[head] for head in all_heads(network.spec) if head[0] == len(weights) - 1}
    chosen = [head for head, score in scores.items() if score > MATCHES] or [
        max(scores, key=lambda head: scores[head])
    ]
    others = [head for head in last if head not in chosen]
    return {
        "matching": matching,
        "previous": [roles.previous_token(each).tolist() for each in weights],
        "induction heads": len(chosen),
        "without them": second_copy(network, test, without(network.spec, chosen)),
        "without others": second_copy(network, test, without(network.spec, others)),
    }


def fall(steps: Sequence[int], losses: Sequence[float], level: float) -> tuple[int, int] | None:
    """The first steps with a loss under 80 and under 20 % of a level; None where it never comes there."""
    high = [step for step, loss in zip(steps, losses, strict=True) if loss < 0.8 * level]
    low = [step for step, loss in zip(steps, losses, strict=True) if loss < 0.2 * level]
    return (high[0], low[0]) if low else None


def abrupt(figures: Sequence[Figures]) -> Check:
    what = "two layers: the fall takes fewer steps than came before it"
    falls = [
        fall(each[TWO]["steps"], each[TWO]["losses"], each[ONE]["last"]) if each[ONE]["last"] else None
        for each in figures
    ]
    starts = [None if one is None else float(one[0]) for one in falls]
    lengths = [None if one is None else float(one[1] - one[0]) for one in falls]
    holds = all(one is not None and one[1] - one[0] < one[0] for one in falls)
    none = "never came down"
    words = f"{spread(lengths, ',.0f', ' steps', none)} after {spread(starts, ',.0f', ' steps', none)}"
    return Check(what, words, holds)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    def of(name: str, what: str) -> list[float | None]:
        return [each[name][what] for each in figures]

    best = [max(max(layer) for layer in each[TWO]["matching"]) for each in figures]
    half, unit = CHANCE / 2, " nats"
    return (
        within(
            "two layers: the second copy's loss ends under 0.2 nats", of(TWO, "last"), 0, 0.2, ".3f", unit
        ),
        abrupt(figures),
        within("two layers: a head's prefix matching is over 0.5", best, MATCHES, 1, ".2f"),
        within("one layer: the loss ends over half of that of chance", of(ONE, "last"), low=half, unit=unit),
        within(
            "two layers: without the induction heads it is over half of that of chance",
            of(TWO, "without them"),
            low=half,
            unit=unit,
        ),
        within(
            "one layer and a fixed period: the loss ends under 0.2 nats",
            of(CHEAT, "last"),
            0,
            0.2,
            ".3f",
            unit,
        ),
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    first = figures[0]
    losses = [
        Series(name, first[name]["steps"], [each[name]["losses"] for each in figures]) for name in VARIANTS
    ]
    removed = [
        Bar(label, [each[TWO][what] for each in figures if each[TWO][what] is not None] or [0.0])
        for label, what in (
            ("all heads", "last"),
            ("without the induction heads", "without them"),
            ("without the other heads of the last layer", "without others"),
        )
    ]
    layers, heads = ("layer 0", "layer 1"), [str(head) for head in range(len(first[TWO]["matching"][0]))]
    axis = Axis("nats a token", low=0, marks={"chance": round(CHANCE, 2)})
    return {
        "training": picture(curves("Loss on the second copy", losses, Axis("step"), axis)),
        "heads": picture(
            heat("Prefix matching, seed 0", first[TWO]["matching"], layers, heads, "layer", "head"),
            heat("Previous token, seed 0", first[TWO]["previous"], layers, heads, "layer", "head"),
            bars("Two layers, loss on the second copy", removed, axis),
        ),
    }
