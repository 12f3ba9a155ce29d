"""H36: translators that read and learn all places at once, from English to Spanish: data and sizes of H33."""

from __future__ import annotations

from collections.abc import Sequence

from qkv.claims.claim import Check, Figures, Run
from qkv.claims.ranking import above, draw, one_seed
from qkv.claims.translators import SPANISH, measured

__all__ = ["draw", "judge", "measure"]

RECURRENT, CONVOLUTIONAL, ATTENTIVE = "global, general", "ConvS2S", "Transformer"


def measure(run: Run) -> Figures:
    return measured(run, SPANISH, (RECURRENT, CONVOLUTIONAL, ATTENTIVE))


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    both = [("ConvS2S is above Luong's", CONVOLUTIONAL, RECURRENT)]
    both += [("the Transformer is above ConvS2S", ATTENTIVE, CONVOLUTIONAL)]
    checks = [
        above(f"{what} in {name}", figures, high, low, metric)
        for metric, name in (("bleu", "BLEU"), ("chrf", "chrF"))
        for what, high, low in both
    ]
    return (*checks, one_seed())
