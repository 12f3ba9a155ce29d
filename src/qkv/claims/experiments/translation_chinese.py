"""H32: five translators from English to Chinese characters, by the length of the source.

21,111 pairs of Tatoeba, nine tenths to learn from; 1,200 batches of 64 are four times all of them. BLEU
counts characters. One seed: three would leave a system 40 seconds. Greedy, not beams. Simplified and
traditional characters are mixed in the corpus, which costs every system the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv.claims.claim import Check, Figures, Run
from qkv.claims.ranking import above, draw, gap_grows, keeps_more, near, not_below, one_seed
from qkv.claims.translators import CHINESE, measured

__all__ = ["draw", "judge", "measure"]

PLAIN, FIRST, LUONG = "RNNencdec", "Bahdanau", "global, general"
PARALLEL = ("ConvS2S", "Transformer")
SYSTEMS = (PLAIN, FIRST, LUONG, *PARALLEL)


def measure(run: Run) -> Figures:
    return measured(run, CHINESE, SYSTEMS)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (
        *attention_helps(figures, SYSTEMS),
        *(not_below(f"{system} is not below {FIRST}", figures, system, FIRST) for system in PARALLEL),
        one_seed(),
    )


def attention_helps(figures: Sequence[Figures], systems: Sequence[str]) -> list[Check]:
    """What both languages expect of attention."""
    checks = [
        above(f"{system} is above {PLAIN} in {name}", figures, system, PLAIN, metric)
        for metric, name in (("bleu", "BLEU"), ("chrf", "chrF"))
        for system in systems
        if system != PLAIN
    ]
    return [
        *checks,
        gap_grows(
            f"{FIRST}'s lead over {PLAIN} is larger on the longest sentences than on the shortest",
            figures,
            FIRST,
            PLAIN,
        ),
        keeps_more(f"{PLAIN} keeps less of its BLEU on the longest than {FIRST}", figures, FIRST, PLAIN),
        near(f"Luong's global attention is within 3 BLEU of {FIRST}", figures, LUONG, FIRST, 3),
    ]
