"""Beam search: equal to a search without a cache, to transformers, and to sums done by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.engine import BeamSearch
from qkv.engine.beams import Beams
from qkv.errors import RequestError
from qkv.model import Model
from tests.engine.tiny import greedily, save_llama, tiny

PROMPT = [5, 80, 33]
ENDS = list(range(0, 266, 5))  # many, so that answers of all lengths end


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(eos=ENDS)


def searched(model: Model, prompt: list[int], width: int, limit: int, penalty: float) -> list[Any]:
    """All live texts again at every step, and nothing stops before the limit: "never", done plainly."""
    ends, live, done = model.loaded.eos_ids, [((), 0.0)], []
    for step in range(limit):
        every = []
        for tokens, total in live:
            shares = model(torch.tensor([[*prompt, *tokens]]))[0, -1].double().log_softmax(-1)
            every += [((*tokens, t), total + float(share)) for t, share in enumerate(shares)]
        every.sort(key=lambda each: -each[1])
        last = step == limit - 1
        done += [each for each in every[:width] if last or each[0][-1] in ends]
        live = [each for each in every if each[0][-1] not in ends][:width]
    ranked = [(total / len(tokens) ** penalty, list(tokens)) for tokens, total in done]
    return sorted(ranked, key=lambda each: -each[0])[:width]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -0.5])
@pytest.mark.parametrize("width", [2, 3, 7])
def test_the_search_equals_one_without_a_cache(model: Model, width: int, penalty: float) -> None:
    """C1: rows of the cache go where their beams go."""
    for prompt in (PROMPT, [7]):
        options: Any = {"beams": width, "length_penalty": penalty, "early_stopping": "never"}
        found = model.generate(prompt, max_new_tokens=6, n=width, **options)
        expected = searched(model, prompt, width, 6, penalty)
        assert found[0].tokens == expected[0][1]
        if penalty > 0:  # the others may be cut off where the score can only fall
            assert [done.tokens for done in found] == [tokens for _, tokens in expected]
        assert found[0].score == pytest.approx(expected[0][0], abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save_llama(path, eos_token_id=ENDS, pad_token_id=0)


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0, -1.0])
def test_beams_equal_transformers(folder: tuple[Path, Any], penalty: float, early: Any) -> None:
    ours, theirs = qkv.load(folder[0]), folder[1]
    for prompt in (PROMPT, [7, 9]):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=9, num_beams=4, num_return_sequences=4, do_sample=False, length_penalty=penalty,
            early_stopping=early, eos_token_id=sorted(ours.loaded.eos_ids), output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        options: Any = {"beams": 4, "n": 4, "length_penalty": penalty, "early_stopping": early}
        found = ours.generate(prompt, max_new_tokens=9, **options)
        for done, row, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
            assert done.tokens == row.tolist()[len(prompt) :][: len(done.tokens)]
            assert done.score == pytest.approx(float(score), abs=1e-4)


def by_hand(
    steps: list[list[list[float]]], search: BeamSearch, end: int, limit: int = 99
) -> Beams[list[int]]:
    """A search through given log-probabilities, in which one token ends an answer."""

    def extend(hypothesis: Any, row: int, token: int) -> tuple[list[int], bool]:
        return [*hypothesis.kept, token], token == end or hypothesis.length + 1 == limit

    beams: Beams[list[int]] = Beams(search, limit, [], extend)
    for step in steps:
        if beams.live:
            beams.step(np.array(step[: len(beams.live)]))
    return beams


def test_the_length_counts_generated_tokens_only() -> None:
    """G10: A has 2 tokens and -1.0, B 8 and -2.4; by their own lengths B wins, by the prompt's too A."""
    search = BeamSearch(2)
    a, b = search.score(-1.0, 2), search.score(-2.4, 8)
    assert (a, b) == (-0.5, pytest.approx(-0.3))
    assert -1.0 / 22 > -2.4 / 28
    model = tiny(eos=ENDS)
    short, long = (
        model.generate([5], max_new_tokens=5, beams=3),
        model.generate([5] * 20, max_new_tokens=5, beams=3),
    )
    for done in (short, long):
        assert done.score == pytest.approx(sum(done.logprobs) / len(done.tokens))


NO = -math.inf


def test_an_end_far_down_fills_no_place() -> None:
    """Of two beams, an end in third place of a step is dropped, and both go on."""
    beams = by_hand([[[-1.0, -2.0, -3.0, NO]], [[-1.0, NO, -1.1, -9.0], [-9.0, NO, -9.0, -0.2]]],
                    BeamSearch(2, 0.0), end=2)  # fmt: skip
    assert [hypothesis.kept for _, hypothesis in beams.ended] == [[0, 2]]
    assert [hypothesis.kept for hypothesis in beams.live] == [[0, 0], [1, 3]]
    assert [hypothesis.total for hypothesis in beams.live] == [-2.0, -2.2]


@pytest.mark.parametrize(("early", "over"), [(True, True), (False, False), ("never", False)])
def test_when_a_search_stops(early: Any, over: bool) -> None:
    """Two have ended with -1.5 and -2 a token, and the one that goes on has -1."""
    steps = [[[-1.0, NO, -1.5]], [[-1.0, NO, -3.0]]]
    beams = by_hand(steps, BeamSearch(2, 1.0, early), end=2)
    assert [score for score, _ in beams.ended] == [-1.5, -2.0]
    assert (beams.live == []) is over


def test_the_best_that_goes_on_is_measured_by_its_length_or_the_limits() -> None:
    """With -1.6 a token it could not end better than -1.5 now, but after nine more tokens it could."""
    steps = [[[-1.0, -1.2, NO]], [[-2.2, NO, -2.0], [NO, NO, -1.8]]]
    assert by_hand(steps, BeamSearch(2, 1.0, False), end=2).live == []
    assert by_hand(steps, BeamSearch(2, 1.0, "never"), end=2, limit=10).live != []
    assert by_hand(steps, BeamSearch(2, 0.0, "never"), end=2, limit=10).live == []


def test_more_beams_than_there_are_continuations() -> None:
    beams = by_hand([[[-1.0, -2.0, NO]]], BeamSearch(5), end=2)
    assert [hypothesis.kept for hypothesis in beams.live] == [[0], [1]]
    model = tiny()
    found = model.generate(
        PROMPT, max_new_tokens=1, beams=100, n=100, logit_bias=dict.fromkeys(range(3, 266), -math.inf)
    )
    assert sorted(done.tokens[0] for done in found) == [0, 1, 2]


def test_equal_answers_are_ranked_by_the_lower_token() -> None:
    beams = by_hand([[[-1.0, -1.0, -1.0, NO]]], BeamSearch(2), end=3)
    assert [hypothesis.kept for hypothesis in beams.live] == [[0], [1]]


def test_beams_do_not_depend_on_their_batch_mates(model: Model) -> None:
    prompts = [PROMPT, [9], [4, 8, 15, 16, 23, 42]]
    together = model.generate(prompts, max_new_tokens=7, beams=3, n=2)
    for prompt, found in zip(prompts, together, strict=True):
        alone = model.generate(prompt, max_new_tokens=7, beams=3, n=2)
        assert [done.tokens for done in found] == [done.tokens for done in alone]
        assert [done.score for done in found] == pytest.approx([done.score for done in alone], abs=1e-5)


def test_one_beam_is_greedy(model: Model) -> None:
    done = model.generate(PROMPT, max_new_tokens=8, beams=1, ignore_eos=True)
    assert done.tokens == greedily(model, PROMPT, 8)[0] and done.score is None


def test_a_stop_text_ends_a_beam_as_an_end_does() -> None:
    """The text is cut there, and its token counts in the length."""
    model = tiny()
    plain = model.generate(PROMPT, max_new_tokens=8, beams=3, n=3, ignore_eos=True)
    stop = plain[0].text[1:3]
    options: Any = {"beams": 3, "n": 3, "ignore_eos": True, "length_penalty": 0}  # the short win
    found = model.generate(PROMPT, max_new_tokens=8, stop=stop, **options)
    stopped = [done for done in found if done.finish_reason == "stop"]
    assert stopped and all(stop not in done.text for done in found)
    assert stopped[0].text == plain[0].text[:1] and len(stopped[0].tokens) < 8
    for done in found:
        assert done.score == pytest.approx(sum(done.logprobs))


def test_penalties_change_a_search() -> None:
    model = tiny()
    first = model.generate(PROMPT, max_new_tokens=4, beams=3, ignore_eos=True)
    banned = dict.fromkeys(first.tokens, -math.inf)
    other = model.generate(PROMPT, max_new_tokens=4, beams=3, ignore_eos=True, logit_bias=banned)
    assert not set(other.tokens) & set(first.tokens)


def test_what_a_search_adds_up_is_not_normalised_again() -> None:
    """One off every token's changes no answer and takes one a token off its score, as with transformers."""
    model, lower = tiny(), dict.fromkeys(range(266), -1.0)
    options: Any = {"max_new_tokens": 4, "beams": 3, "ignore_eos": True}
    plain = model.generate(PROMPT, **options)
    raw = model.generate(PROMPT, logit_bias=lower, **options)
    processed = model.generate(PROMPT, logit_bias=lower, logprobs="processed", **options)
    assert raw.tokens == processed.tokens == plain.tokens and raw.logprobs == plain.logprobs
    assert processed.logprobs == pytest.approx([value - 1 for value in raw.logprobs])
    assert raw.score == processed.score == pytest.approx(plain.score - 1)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"beams": 0}, "beams is 0; it must be a whole number from 1 to 128."),
    ({"beams": 129}, "beams is 129; it must be a whole number from 1 to 128."),
    ({"beams": 2.0}, "beams is 2.0; it must be a whole number from 1 to 128."),
    ({"beams": True}, "beams is True; it must be a whole number from 1 to 128."),
    ({"beams": 2, "length_penalty": "long"}, "length_penalty is 'long'; it must be a number from -10 to 10."),
    (
        {"beams": 2, "early_stopping": "soon"},
        "early_stopping is 'soon'; it must be true, false or \"never\".",
    ),
    ({"beams": 2, "early_stopping": 1}, 'early_stopping is 1; it must be true, false or "never".'),
    ({"beams": 2, "n": 3}, "n is 3 and beams 2: a search gives at most as many as its beams."),
    ({"length_penalty": 1.0}, "length_penalty is for a beam search: give beams, of at least 2, as well."),
    (
        {"beams": 3, "temperature": 0.5},
        "temperature is for sampling, and a beam search draws nothing: leave it out, or give beams=1.",
    ),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_no_search_can_be_is_refused(model: Model, options: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        model.generate(PROMPT, **options)
    assert str(problem.value) == sentence


def test_logits_that_are_no_numbers_end_the_search(model: Model) -> None:
    with (
        pytest.raises(RequestError, match="logits are not numbers"),
        model.tap({"layers.0.output": lambda x: x * float("nan")}),
    ):
        model.generate(PROMPT, beams=3)


def test_a_stream_of_a_search_says_the_best_at_its_end(model: Model) -> None:
    best = tiny().generate(PROMPT, max_new_tokens=5, beams=3, ignore_eos=True)
    pieces = list(tiny().stream(PROMPT, max_new_tokens=5, beams=3, ignore_eos=True))
    assert pieces == [best.text]


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_that_can_go_no_further_leaves_the_others(seed: int) -> None:
    """Of three tokens no pair may come twice: some beams run out of tokens before others do."""
    small = tiny(seed=seed, vocab=3, tokenizer=False, generation={"no_repeat_ngram_size": 2})

    def fresh(tokens: list[int], token: int) -> bool:
        return (tokens[-1], token) not in pairwise(tokens)

    live, limit = [([0], 0.0)], 9
    while live and len(live[0][0]) <= limit:
        every = []
        for tokens, total in live:
            shares = small(torch.tensor([tokens]))[0, -1].double().log_softmax(-1)
            every += [([*tokens, t], total + float(shares[t])) for t in range(3) if fresh(tokens, t)]
        live = sorted(every, key=lambda each: -each[1])[:2]
    if not live:  # the last two could go no further
        with pytest.raises(RequestError, match="none is left to choose"):
            small.generate([0], max_new_tokens=limit, beams=2)
        return
    done = small.generate([0], max_new_tokens=limit, beams=2)
    assert [0, *done.tokens] == live[0][0]
    assert done.score == pytest.approx(live[0][1] / limit, abs=1e-5)
