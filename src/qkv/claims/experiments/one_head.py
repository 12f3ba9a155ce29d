"""H28: one head of 64, eight of 8 and 32 of 2: the same parameters, in language models of characters.

What varies is only into how many parts queries, keys and values are cut; the models start from the same
weights and read the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv import spec
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, spread
from qkv.claims.modelling import LENGTH, losses_drawn, reading, trained
from qkv.claims.models import small_lm

WIDTH = 64
HEADS = (1, 8, 32)


def measure(run: Run) -> Figures:
    text = reading(run)
    found: Figures = {"corpus": text.corpus.name}
    for heads in HEADS:
        model = small_lm(text.corpus.vocab, width=WIDTH, heads=heads, position=spec.Learned(LENGTH))
        _, found[str(heads)] = trained(run, named(heads), model, text, run.of(1000, 3))
    return found


def named(heads: int) -> str:
    return f"{heads} head{'s' if heads > 1 else ''} of {WIDTH // heads}"


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    one, eight, many = ([each[str(heads)]["held_out"] for each in figures] for heads in HEADS)
    counts = {each[str(heads)]["parameters"] for each in figures for heads in HEADS}
    return (
        Check(
            "all have the same parameters", " and ".join(f"{count:,}" for count in counts), len(counts) == 1
        ),
        below("the loss of eight heads is below that of one", eight, one, ".4f", " nats"),
        below("the loss of eight heads is below that of 32", eight, many, ".4f", " nats"),
        under_a_tenth(one, eight),
    )


def under_a_tenth(one: Sequence[float | None], eight: Sequence[float | None]) -> Check:
    losses = zip(one, eight, strict=True)
    more = [None if a is None or b is None else 100 * (a / b - 1) for a, b in losses]
    holds = all(each is not None and each < 10 for each in more)
    return Check(
        "the loss of one head is less than 10 % above that of eight", spread(more, ".2f", " %"), holds
    )


def draw(figures: Sequence[Figures]) -> Pictures:
    return {"loss": losses_drawn(figures, {str(heads): named(heads) for heads in HEADS})}
