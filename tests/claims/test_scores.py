"""BLEU and chrF: worked by hand, what sacreBLEU 2.6.0 gives, and that counts of sentences add up."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qkv.claims.scores import Row, bleu, bleu_row, chrf, chrf_row, corpus, resampled
from qkv.errors import RequestError

SAID = ["el perro come carne roja", "la casa es muy grande .", "no sé nada de eso", "ayer"]
REFERENCES = ["el perro negro come carne", "la casa es grande .", "yo no sé nada de eso", "vino ayer mismo"]
SACREBLEU, SACRECHRF, SACRECHRF_OF_THE_LAST = 45.69723173332707, 65.94517669610657, 24.926807998172798


def counted(said: str, reference: str) -> Row:
    return bleu_row(said.split(), reference.split())


def test_an_n_gram_matches_no_more_often_than_the_reference_has_it() -> None:
    """Papineni et al. 2002, section 2.1: the modified unigram precision is 2/7."""
    row = counted("the the the the the the the", "the cat is on the mat")
    assert row.tolist() == [2, 0, 0, 0, 7, 6, 5, 4, 7, 6]


def test_bleu_by_hand() -> None:
    """Precisions 5/6, 3/5, 2/4 and 1/3, six symbols of seven."""
    row = counted("a b c d x e", "a b c d e f g")
    assert row.tolist() == [5, 3, 2, 1, 6, 5, 4, 3, 6, 7]
    assert bleu(row) == pytest.approx(100 * math.exp(1 - 7 / 6) * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_what_is_too_long_has_no_penalty_but_its_precision() -> None:
    row = counted("a b c d e f", "a b c d e")
    assert bleu(row) == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25)


def test_precisions_without_a_match_count_half_a_quarter_of_one() -> None:
    """3/4, 1/3, 1/2 of 2, 1/4 of 1."""
    row = counted("a b x c", "a b c d")
    assert row[:4].tolist() == [3, 1, 0, 0]
    assert bleu(row) == pytest.approx(100 * (3 / 4 * 1 / 3 * 0.5 / 2 * 0.25 / 1) ** 0.25)


@pytest.mark.parametrize("said", ["", "x y z w", "a b c"])
def test_nothing_right_and_nothing_of_four_symbols_is_nothing(said: str) -> None:
    assert bleu(counted(said, "a b c d")) == 0


def test_all_right_is_100() -> None:
    row = counted("a b c d", "a b c d")
    assert bleu(row) == pytest.approx(100) and chrf(chrf_row("abcdef", "abcdef")) == pytest.approx(100)


def test_chrf_by_hand() -> None:
    """abcd for abde: 3 of 4 characters, 1 of 3 pairs, no triple of 2, not the whole; recall is the same."""
    row = chrf_row("ab cd", "abd e")
    assert row.tolist() == [4, 4, 3, 3, 3, 1, 2, 2, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert chrf(row) == pytest.approx(100 * (3 / 4 + 1 / 3) / 4)


def test_recall_counts_twice_as_much() -> None:
    """Popović 2015, equation 1: a said, abc wanted; precision 1 and recall 1/3 of the one order both have."""
    assert chrf(chrf_row("a", "abc")) == pytest.approx(100 * 5 * (1 / 3) / (4 + 1 / 3))
    assert chrf(chrf_row("abc", "a")) == pytest.approx(100 * 5 * (1 / 3) / (4 / 3 + 1))
    assert chrf(chrf_row("", "abc")) == 0


def test_what_the_reference_is_too_short_for_does_not_count() -> None:
    assert chrf_row("abcd", "ab").tolist() == [4, 2, 2, 3, 1, 1, *[0] * 12]


def test_a_corpus_is_what_sacrebleu_gives() -> None:
    """sacrebleu 2.6.0, corpus_bleu with tokenize="none" and corpus_chrf, on these very sentences."""
    rows = [counted(one, two) for one, two in zip(SAID, REFERENCES, strict=True)]
    assert corpus(rows, bleu) == pytest.approx(SACREBLEU, abs=1e-9)
    rows = [chrf_row(one, two) for one, two in zip(SAID, REFERENCES, strict=True)]
    assert corpus(rows, chrf) == pytest.approx(SACRECHRF, abs=1e-9)
    assert corpus(rows[3:], chrf) == pytest.approx(SACRECHRF_OF_THE_LAST, abs=1e-9)


def test_draws_are_of_whole_sentences_and_the_same_for_every_system() -> None:
    rows = np.stack([counted(one, two) for one, two in zip(SAID, REFERENCES, strict=True)])
    places = np.random.default_rng(5).integers(4, size=(3, 4))
    assert resampled(rows, bleu, 3, 5) == [bleu(rows[chosen].sum(0)) for chosen in places]
    assert len(set(resampled(rows, bleu, 20, 5))) > 5
    assert resampled(rows[:1], bleu, 3, 5) == [bleu(rows[0])] * 3


def test_no_sentences_have_no_score() -> None:
    with pytest.raises(RequestError, match="There are no sentences to score"):
        corpus([], bleu)
