"""H34: Luong's scores and where they look, from English to Chinese characters: data and sizes of H32.

Without input feeding, which would let every target token wait for the one before: it costs half as much
again and is the same for all. The source is not reversed, since local-m counts along it. D is 3, a third of
a source of nine tokens, as the paper's 10 is of its sentences. The two local ones score by general.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv.claims.claim import Check, Figures, Run
from qkv.claims.ranking import above, draw, gap_grows, not_below, one_seed
from qkv.claims.translators import CHINESE, measured

__all__ = ["draw", "judge", "measure"]

DOT, GENERAL, CONCAT, LOCATION = (f"global, {score}" for score in ("dot", "general", "concat", "location"))
MONOTONIC, PREDICTIVE = "local-m", "local-p"
SYSTEMS = (DOT, GENERAL, CONCAT, LOCATION, MONOTONIC, PREDICTIVE)


def measure(run: Run) -> Figures:
    return measured(run, CHINESE, SYSTEMS)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (
        *scores_rank(figures),
        above("local-m is below local-p", figures, PREDICTIVE, MONOTONIC),
        gap_grows(
            "local-p's lead over local-m is larger on the longest sentences than on the shortest",
            figures,
            PREDICTIVE,
            MONOTONIC,
        ),
        one_seed(),
    )


def scores_rank(figures: Sequence[Figures]) -> list[Check]:
    """What both languages expect of scores."""
    return [
        above("dot is above location", figures, DOT, LOCATION),
        above("general is above location", figures, GENERAL, LOCATION),
        not_below("dot is not below concat", figures, DOT, CONCAT),
        not_below("general is not below concat", figures, GENERAL, CONCAT),
        not_below("local-p is not below global attention by the same score", figures, PREDICTIVE, GENERAL),
    ]
