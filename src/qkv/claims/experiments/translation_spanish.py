"""H33: translators from English to Spanish with and without attention, by the length of the source.

18,198 verses of up to 30 words of the Bible (King James, Reina-Valera 1909), nine tenths to learn from;
1,000 batches of 64 are almost four times all of them. BLEU counts words in lower case. One seed: verses are
three times as long as H32's sentences, and three seeds would see each verse once or twice. Greedy, not beams.
ConvS2S and the Transformer are H36's: with them there would be time for two rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from qkv.claims.claim import Check, Figures, Run
from qkv.claims.experiments.translation_chinese import FIRST, LUONG, PLAIN, attention_helps
from qkv.claims.ranking import draw, one_seed
from qkv.claims.translators import SPANISH, measured

__all__ = ["draw", "judge", "measure"]

SYSTEMS = (PLAIN, FIRST, LUONG)


def measure(run: Run) -> Figures:
    return measured(run, SPANISH, SYSTEMS)


def judge(figures: Sequence[Figures]) -> tuple[Check, ...]:
    return (*attention_helps(figures, SYSTEMS), one_seed())
