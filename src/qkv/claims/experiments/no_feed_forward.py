"""H30: language models of characters without a feed-forward: as deep as one with it, and as large.

A layer's attention has 4 d^2 parameters and its feed-forward 8 d^2, so 6 layers of attention alone are as
large as 2 whole ones. All read the same batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv import spec
from qkv.claims.claim import Check, Figures, Pictures, Run
from qkv.claims.judging import below, spread
from qkv.claims.modelling import LENGTH, losses_drawn, reading, trained
from qkv.claims.models import attention_only, small_lm

WHOLE, SHALLOW, DEEP = "with feed-forward, 2 layers", "attention, 2 layers", "attention, 6 layers"
VARIANTS = {WHOLE: (2, spec.pre_norm), SHALLOW: (2, attention_only), DEEP: (6, attention_only)}


def measure(run: Run) -> Figures:
    text = reading(run)
    found: Figures = {"corpus": text.corpus.name, "unigrams": text.unigrams}
    for name, (layers, arrange) in VARIANTS.items():
        model = small_lm(text.corpus.vocab, layers=layers, position=spec.Learned(LENGTH), arrange=arrange)
        _, found[name] = trained(run, name, model, text, run.of(1000, 3))
    return found


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    whole, shallow, deep = ([each[name]["held_out"] for each in figures] for name in VARIANTS)
    return (
        below("equal depth: the loss with a feed-forward is lower", whole, shallow, ".3f", " nats"),
        same_size(figures),
        closer(whole, shallow, deep),
        below(
            "attention alone learns: its loss is under three quarters of unigram entropy",
            shallow,
            [each["unigrams"] for each in figures],
            ".3f",
            " nats",
            by=4 / 3,
        ),
    )


def same_size(figures: Sequence[Figures]) -> Check:
    large, deep = (figures[0][name]["parameters"] for name in (WHOLE, DEEP))
    what = "6 layers of attention have the parameters of 2 whole ones, within 2 %"
    return Check(what, f"{deep:,} against {large:,}", abs(deep / large - 1) <= 0.02)


def closer(
    whole: Sequence[float | None], shallow: Sequence[float | None], deep: Sequence[float | None]
) -> Check:
    """What is left of the difference at equal depth; below 0 attention alone is better."""
    what = "equal parameters: less than half of the difference at equal depth is left"
    left: list[float | None] = []
    for full, few, many in zip(whole, shallow, deep, strict=True):
        known = full is not None and few is not None and many is not None and few > full
        left.append(100 * (many - full) / (few - full) if known else None)  # type: ignore[operator]
    holds = all(each is not None and each < 50 for each in left)
    return Check(what, spread(left, ".0f", " % of it", "no difference"), holds)


def draw(figures: Sequence[Figures]) -> Pictures:
    return {"loss": losses_drawn(figures, {name: name for name in VARIANTS})}
