"""What changes logits: sums done by hand, equality with transformers, and what leaves nothing."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from qkv.engine import Sampling
from qkv.engine.processors import Processor, Rules, counted, repeated, would_repeat
from qkv.errors import RequestError


def random_logits(seed: int = 0, vocab: int = 40) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    """G4."""
    given = np.array([2.0, -1.0, 0.0])
    assert repeated({0, 1}, 1.5, given).tolist() == pytest.approx([4 / 3, -1.5, 0])
    assert given.tolist() == [2, -1, 0]


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    processor = Processor(Sampling(repetition_penalty=4.0), [0], 9)
    assert processor(np.array([4.0, 3, 2, -1]), [1]).tolist() == [1, 0.75, 2, -1]


def test_presence_and_frequency_count_the_answer_only() -> None:
    """Token 1 three times, 2 once, 0 in the prompt alone: 0, 3 * 0.5 + 1 and 0.5 + 1 are taken."""
    processor = Processor(Sampling(presence_penalty=1.0, frequency_penalty=0.5), [0, 0, 2], 9)
    assert processor(np.array([4.0, 4, 4, 4]), [1, 2, 1, 1]).tolist() == [4, 1.5, 2.5, 4]
    negative = Processor(Sampling(presence_penalty=-2.0, frequency_penalty=-0.25), [], 9)
    assert negative(np.array([4.0, 4, 4]), [1, 1]).tolist() == [4, 6.5, 4]


def test_counted_equals_the_formula_over_random_answers() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        answer, given = rng.integers(0, 12, rng.integers(0, 30)).tolist(), rng.standard_normal(12)
        frequency, presence = rng.uniform(-2, 2, 2)
        times = Counter(answer)
        expected = [x - times[i] * frequency - (times[i] > 0) * presence for i, x in enumerate(given)]
        assert counted(answer, frequency, presence, given).tolist() == pytest.approx(expected, abs=1e-12)


def test_a_bias_is_added_first_and_minus_infinity_forbids() -> None:
    processor = Processor(Sampling(logit_bias={0: -3, 2: -math.inf}, repetition_penalty=2.0), [0], 9)
    assert processor(np.array([2.0, 1, 9]), []).tolist() == [-2, 1, -math.inf]


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"logit_bias": {3: 1.5, 17: -4.0}, "repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 3},
    {"min_length": 9},
    {"suppress_tokens": [4, 5], "begin_suppress_tokens": [9]},
    {"forced_bos_token_id": 11, "begin_suppress_tokens": [9]},
    {"forced_eos_token_id": [2, 7]},
    {"repetition_penalty": 0.6, "no_repeat_ngram_size": 2, "min_length": 7, "forced_eos_token_id": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("prompt", [[8], [3, 17, 3, 17, 6]])
def test_processors_equal_transformers(settings: dict[str, Any], prompt: list[int]) -> None:
    asked = {key: value for key, value in settings.items() if key in ("repetition_penalty", "logit_bias")}
    limit, ends = 7, [2]
    ours = Processor(Sampling(**asked), prompt, limit, Rules.read(settings, len(prompt), ends))
    first, theirs = settings.get("forced_bos_token_id"), LogitsProcessorList()
    if "logit_bias" in settings:
        theirs.append(SequenceBiasLogitsProcessor([[[t], b] for t, b in settings["logit_bias"].items()]))
    if "repetition_penalty" in settings:
        theirs.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "no_repeat_ngram_size" in settings:
        theirs.append(NoRepeatNGramLogitsProcessor(settings["no_repeat_ngram_size"]))
    if "min_length" in settings:
        theirs.append(MinLengthLogitsProcessor(settings["min_length"], ends))
    if "suppress_tokens" in settings:
        theirs.append(SuppressTokensLogitsProcessor(settings["suppress_tokens"]))
    if "begin_suppress_tokens" in settings:
        begin = len(prompt) + (first is not None and len(prompt) == 1)
        theirs.append(SuppressTokensAtBeginLogitsProcessor(settings["begin_suppress_tokens"], begin))
    if first is not None:
        theirs.append(ForcedBOSTokenLogitsProcessor(first))
    if "forced_eos_token_id" in settings:
        last = settings["forced_eos_token_id"]
        theirs.append(ForcedEOSTokenLogitsProcessor(len(prompt) + limit, last))
    answer: list[int] = []
    for place, token in enumerate([3, 17, 6, 3, 17, 8, 17]):
        given = random_logits(place)
        expected = theirs(torch.tensor([[*prompt, *answer]]), torch.tensor(given, dtype=torch.float64)[None])
        assert ours(given, answer).tolist() == pytest.approx(expected[0].tolist(), abs=1e-6)
        answer.append(token)


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ([1, 2, 3, 1, 2], 3, [3]),
        ([1, 2, 3, 1, 2, 4, 1, 2], 3, [3, 4]),
        ([1, 2], 3, []),
        ([5, 6], 1, [5, 6]),
        ([], 2, []),
        ([5, 5], 2, [5]),
    ],
)
def test_what_would_repeat(text: list[int], size: int, expected: list[int]) -> None:
    assert would_repeat(text, size) == expected


def test_min_new_tokens_does_not_count_the_prompt() -> None:
    rules = Rules.read({"min_new_tokens": 2, "min_length": None}, 30, [1])
    processor = Processor(Sampling(), range(30), 9, rules)
    ended = [processor(np.zeros(40), [5] * place)[1] for place in range(4)]
    assert ended == [-math.inf, -math.inf, 0, 0]


def test_a_search_starts_from_log_probabilities() -> None:
    processor = Processor(Sampling(logit_bias={1: -1.0}), [], 9, search=True)
    assert processor(np.log([1.0, 1, 2]), []).tolist() == pytest.approx(
        [math.log(0.25), math.log(0.25) - 1, math.log(0.5)]
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("search", [False, True])
def test_logits_that_are_no_numbers_are_an_error(bad: float, search: bool) -> None:
    with pytest.raises(RequestError, match="logits are not numbers"):
        Processor(Sampling(), [], 9, search=search)(np.array([0.0, bad, 1]), [])
    with pytest.raises(RequestError, match="logits are not numbers"):
        Processor(Sampling(), [], 9, search=search)(np.full(3, -np.inf), [])


def test_a_bias_against_every_token_leaves_none() -> None:
    processor = Processor(Sampling(logit_bias=dict.fromkeys(range(3), -math.inf)), [], 9)
    with pytest.raises(RequestError, match="none is left to choose: logit_bias or the model forbids each"):
        processor(np.zeros(3), [])


@pytest.mark.parametrize("place", [0, 1])
def test_tokens_that_the_model_does_not_have_are_never_chosen_anyway(place: int) -> None:
    """Files may name ends and forbidden tokens beyond the rows of the model's head."""
    settings = {"suppress_tokens": [1, 7], "begin_suppress_tokens": [2, 8], "min_new_tokens": 1}
    processor = Processor(Sampling(), [0], 9, Rules.read(settings, 1, [3, 9]))
    scores = processor(np.zeros(5), [4] * place)
    assert scores.tolist() == ([0, -math.inf, -math.inf, -math.inf, 0], [0, -math.inf, 0, 0, 0])[place]
