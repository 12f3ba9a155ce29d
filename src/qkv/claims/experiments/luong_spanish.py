"""H35: Luong's scores and where they look, from English to Spanish: data and sizes of H33, systems of H34.

D is 8, a third of a verse of 25 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv.claims.claim import Check, Figures, Run
from qkv.claims.experiments.luong_chinese import MONOTONIC, PREDICTIVE, SYSTEMS, scores_rank
from qkv.claims.ranking import draw, near, one_seed
from qkv.claims.translators import SPANISH, measured

__all__ = ["draw", "judge", "measure"]


def measure(run: Run) -> Figures:
    return measured(run, SPANISH, SYSTEMS)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (
        *scores_rank(figures),
        near("local-m is within 2 BLEU of local-p", figures, MONOTONIC, PREDICTIVE, 2),
        one_seed(),
    )
