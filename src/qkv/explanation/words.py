"""Whole words of a prompt, of however many tokens: candidates between which a pronoun might choose, say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qkv.errors import RequestError
from qkv.explanation.ablation import ablate
from qkv.explanation.intervention import Replacement
from qkv.explanation.metric import Metric
from qkv.explanation.parts import Part, Parts
from qkv.explanation.reading import Reading
from qkv.explanation.result import Axis, Evidence
from qkv.text import Tokenizer


@dataclass(frozen=True)
class Word:
    """A word, the places of its tokens, what goes with all of them replaced, and the attention they get."""

    word: str
    places: tuple[int, ...]
    effect: float
    attention: float


def places(tokenizer: Tokenizer, tokens: Sequence[int], word: str) -> tuple[int, ...]:
    """Of the tokens that a word has, wherever it stands: the shortest runs whose text holds it.

    A character may be several tokens, and a token several characters; then it counts for all of them.
    Raises RequestError for a word that is not there, and for none.
    """
    if not word.strip():
        raise RequestError("A word to look at has letters.")
    found: list[int] = []
    most = len(word.encode()) + 2
    start = 0
    while start < len(tokens):
        ends = range(start + 1, min(start + most, len(tokens)) + 1)
        end = next((end for end in ends if word in _text(tokenizer, tokens[start:end])), None)
        if end is None:
            start += 1
            continue
        while word in _text(tokenizer, tokens[start + 1 : end]):
            start += 1
        found += range(start, end)
        start = end
    if not found:
        raise RequestError(f"{word!r} is not in the prompt.")
    return tuple(found)


def _text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special=False)


def word_effects(
    reading: Reading,
    metric: Metric,
    words: Sequence[str],
    tokenizer: Tokenizer,
    seen: Evidence,
    by: Replacement,
    side: int = -1,
) -> tuple[Word, ...]:
    """What goes with each word's tokens replaced together, beside their share of attention.

    `seen` is attention over the tokens of that side, (layer, head, token); its mean over heads is taken.
    Raises RequestError for a word that the prompt has not.
    """
    tokens = reading.sides[side].given[0].tolist()
    where = {word: places(tokenizer, tokens, word) for word in words}
    point = f"{reading.sides[side].prefix}embedding"
    groups: dict[tuple[int, ...], tuple[Part, ...]] = {
        (i,): tuple(Part(point, (place,)) for place in run) for i, run in enumerate(where.values())
    }
    effects = ablate(reading, metric, Parts("words", (Axis("word", tuple(where)),), groups), by).values
    shares = np.nanmean(seen.values, axis=(0, 1))
    return tuple(
        Word(word, run, float(effect), float(shares[list(run)].sum()))
        for (word, run), effect in zip(where.items(), effects, strict=True)
    )
