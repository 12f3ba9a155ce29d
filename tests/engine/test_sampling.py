"""Choosing tokens: values, equality with transformers' warpers, the distribution, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qkv.engine import Sampler, Sampling
from qkv.engine.sampling import candidates
from qkv.errors import RequestError


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def shares(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The probability of each token, 0 for those filtered out."""
    order, kept = candidates(np.asarray(logits, np.float64), sampling)
    found = np.zeros(len(logits))
    found[order] = kept / kept.sum()
    return found


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0, top_p=0.0),
        Sampling(1.0, top_k=1),
        Sampling(1.0, min_p=1.0),
        Sampling(1e-300),
    ],
)
def test_the_likeliest_always_stays(sampling: Sampling) -> None:
    """G6: temperature 0 is argmax, and no filter removes everything."""
    assert Sampler(sampling).choose(logits_of(1, 3, 2)) == 1


def test_peaked_half_precision_logits_stay_finite() -> None:
    """G6."""
    peaked = np.array([-65504, 65504, 0, 65504 - 32], np.float16)
    for temperature in (1e-6, 1e-3, 1.0, 1e6):
        found = shares(peaked, Sampling(temperature, top_p=0.01))
        assert np.isfinite(found).all() and found[1] == 1


def test_equal_logits_greedily_give_the_first() -> None:
    assert Sampler(Sampling()).choose(logits_of(1, 5, 5, 5)) == 1


def test_top_k_of_equal_logits_keeps_exactly_k_the_first_ones() -> None:
    assert shares(logits_of(5, 1, 5, 5), Sampling(1.0, top_k=2)).tolist() == [0.5, 0, 0.5, 0]


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    halves = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    kept = {p: int((shares(halves, Sampling(1.0, top_p=p)) > 0).sum()) for p in (0.4, 0.5, 0.6, 0.75, 0.9, 1)}
    assert kept == {0.4: 1, 0.5: 1, 0.6: 2, 0.75: 2, 0.9: 4, 1: 4}


def test_top_p_of_one_keeps_what_rounding_would_lose() -> None:
    found = shares(np.array([0.0, -37.0, -40.0, -60.0]), Sampling(1.0, top_p=1.0))
    assert (found > 0).all()


def test_what_is_impossible_is_never_drawn() -> None:
    given = logits_of(0, float("-inf"), 0, float("-inf"))
    sampler = Sampler(Sampling(5.0, top_k=4, seed=0))
    assert {sampler.choose(given) for _ in range(200)} == {0, 2}


def random_logits(seed: int = 0, vocab: int = 300) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 17},
    {"top_k": 10**6},
    {"top_p": 0.3},
    {"top_p": 0.97},
    {"min_p": 0.05},
    {"min_p": 0.9},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.4, "top_k": 5, "top_p": 0.999, "min_p": 0.02},
    {"temperature": 3.0, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 60, "top_p": 0.6, "min_p": 0.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filters_equal_transformers_in_order(settings: dict[str, Any]) -> None:
    """The same tokens kept, with the same probabilities."""
    warpers = LogitsProcessorList()
    if "temperature" in settings:
        warpers.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        warpers.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        warpers.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        warpers.append(MinPLogitsWarper(settings["min_p"]))
    for seed in range(5):
        given = random_logits(seed)
        theirs = warpers(torch.zeros(1, 1, dtype=torch.long), torch.tensor(given, dtype=torch.float64)[None])
        expected = theirs[0].softmax(-1).numpy()
        found = shares(given, Sampling(**{"temperature": 1.0, **settings}))
        assert (found > 0).tolist() == (expected > 0).tolist()
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 2.0, "top_k": 6}, {"top_p": 0.9, "min_p": 0.02}], ids=str
)
def test_draws_follow_the_distribution(settings: dict[str, Any]) -> None:
    """Chi-square: 20,000 draws; its mean is the degrees of freedom, its deviation the root of twice that."""
    sampling = Sampling(**{"temperature": 1.0, "seed": 11, **settings})
    given, draws = random_logits(4, 12) / 2, 20_000
    sampler, expected = Sampler(sampling), shares(given, sampling) * draws
    found = np.bincount([sampler.choose(given) for _ in range(draws)], minlength=len(given))
    kept = expected > 0
    assert (found[~kept] == 0).all()
    square = ((found - expected)[kept] ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert square < freedom + 4 * (2 * freedom) ** 0.5


def test_a_seed_gives_the_same_draws_and_another_gives_others() -> None:
    def draws(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler.choose(random_logits(step)) for step in range(20)]

    assert draws(42) == draws(42)
    assert len({tuple(draws(seed)) for seed in (42, 43, None, None)}) == 4


def test_samples_of_one_seed_differ_and_the_first_is_the_only_one() -> None:
    def draws(seed: int, sample: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed), sample)
        return [sampler.choose(random_logits(step)) for step in range(20)]

    rng = np.random.default_rng(42)  # as a request for one sample draws
    order, kept = candidates(random_logits().astype(np.float64), Sampling(1.0))
    assert draws(42, 0)[0] == order[np.searchsorted(np.cumsum(kept), rng.random() * kept.sum(), side="right")]
    assert len({tuple(draws(42, sample)) for sample in range(5)}) == 5
    assert draws(42, 3) == draws(42, 3) != draws(43, 3)


WRONG: list[tuple[str, Any, str]] = [
    ("temperature", -0.1, "a number of at least 0"),
    ("temperature", float("nan"), "a number of at least 0"),
    ("temperature", float("inf"), "a number of at least 0"),
    ("temperature", "hot", "a number of at least 0"),
    ("temperature", True, "a number of at least 0"),
    ("top_k", -1, "a whole number of at least 0"),
    ("top_k", 2.5, "a whole number of at least 0"),
    ("top_p", 1.01, "a number from 0 to 1"),
    ("top_p", -0.5, "a number from 0 to 1"),
    ("min_p", 2, "a number from 0 to 1"),
    ("repetition_penalty", 0, "a number from 0.01 to 100"),
    ("repetition_penalty", 1e300, "a number from 0.01 to 100"),
    ("presence_penalty", 2.1, "a number from -2 to 2"),
    ("presence_penalty", "much", "a number from -2 to 2"),
    ("frequency_penalty", -3, "a number from -2 to 2"),
    ("frequency_penalty", float("nan"), "a number from -2 to 2"),
    ("seed", -3, "a whole number of at least 0"),
    ("seed", 1.5, "a whole number of at least 0"),
]


@pytest.mark.parametrize(("name", "value", "wanted"), WRONG)
def test_a_value_out_of_bounds_is_named(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(RequestError) as problem:
        Sampling(**{name: value})
    assert str(problem.value) == f"{name} is {value!r}; it must be {wanted}."


def test_numbers_of_any_kind_and_size_are_taken() -> None:
    sampling = Sampling(np.float32(1), top_k=np.int64(3), seed=2**200)  # type: ignore[arg-type]
    assert Sampler(sampling).choose(logits_of(0, 90, 0)) == 1


FILE = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "eos_token_id": 2, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("defaults", "asked", "expected"),
    [
        ({}, {}, Sampling()),
        ({}, {"temperature": 0.5}, Sampling(0.5)),
        ({}, {"top_k": 5}, Sampling(1.0, top_k=5)),
        ({}, {"seed": 0}, Sampling(1.0, seed=0)),
        ({}, {"temperature": None, "top_k": None, "seed": None}, Sampling()),
        ({}, {"repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({}, {"presence_penalty": 1, "logit_bias": {3: 2}}, Sampling(presence_penalty=1, logit_bias={3: 2})),
        ({}, {"frequency_penalty": -1.5, "top_p": 0.5}, Sampling(1.0, top_p=0.5, frequency_penalty=-1.5)),
        ({}, {"temperature": 0, "seed": 3}, Sampling(0, seed=3)),
        (FILE, {}, Sampling(0.0, top_p=0.9, repetition_penalty=1.1)),
        (FILE, {"seed": 1}, Sampling(0.6, top_p=0.9, repetition_penalty=1.1, seed=1)),
        ({**FILE, "do_sample": False}, {}, Sampling(0.0, top_p=0.9, repetition_penalty=1.1)),
        ({**FILE, "do_sample": True}, {}, Sampling(0.6, top_p=0.9, repetition_penalty=1.1)),
        ({**FILE, "do_sample": True}, {"temperature": 0.0}, Sampling(0.0, top_p=0.9, repetition_penalty=1.1)),
        ({**FILE, "do_sample": True}, {"top_p": 0.5}, Sampling(0.6, top_p=0.5, repetition_penalty=1.1)),
        ({"do_sample": True}, {}, Sampling(1.0)),
    ],
)
def test_what_is_asked_for_goes_over_the_file(
    defaults: dict[str, Any], asked: dict[str, Any], expected: Sampling
) -> None:
    assert Sampling.from_defaults(defaults, asked) == expected


def test_several_samples_are_drawn_unless_greedy_ones_are_asked_for() -> None:
    assert Sampling.from_defaults({}, {}, several=True) == Sampling(1.0)
    assert Sampling.from_defaults({"temperature": 0.3}, {}, several=True) == Sampling(0.3)
    assert Sampling.from_defaults({}, {"temperature": 0}, several=True) == Sampling()


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ([3], "logit_bias is [3]; it must map tokens to numbers."),
        ({-1: 2}, "logit_bias names -1; it must name tokens by their ids."),
        ({True: 2}, "logit_bias names True; it must name tokens by their ids."),
        ({"x": 2}, "logit_bias names 'x'; it must name tokens by their ids."),
        ({3: "2"}, "logit_bias gives token 3 '2'; it must be a number, or -inf."),
        ({3: float("nan")}, "logit_bias gives token 3 nan; it must be a number, or -inf."),
        ({3: float("inf")}, "logit_bias gives token 3 inf; it must be a number, or -inf."),
        ({3: None}, "logit_bias gives token 3 None; it must be a number, or -inf."),
    ],
)
def test_a_bias_that_cannot_be_is_refused(bias: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        Sampling(logit_bias=bias)
    assert str(problem.value) == sentence


def test_an_unknown_argument_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        RequestError, match=r"no sampling argument 'topk' \(frequency_penalty, logit_bias, min_p, pres"
    ):
        Sampling.from_defaults({}, {"topk": 3})


@pytest.mark.parametrize("settings", [*SETTINGS, {"temperature": 9.0, "top_p": 0.999}], ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_large_vocabulary_is_filtered_as_its_definition_says(
    settings: dict[str, Any], spread: float
) -> None:
    """Only the head of it is sorted where the filters reach no further."""
    sampling = Sampling(**{"temperature": 1.0, **settings})
    given = np.random.default_rng(2).standard_normal(5000) * spread
    order, found = candidates(given, sampling)
    scaled = given / sampling.temperature
    falling = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    expected = np.exp(scaled[falling]) / np.exp(scaled[falling]).sum()
    before = np.cumsum(expected) - expected
    stay = (expected >= sampling.min_p * expected[0]) & ((before < sampling.top_p) | (sampling.top_p == 1))
    assert order.tolist() == falling[stay].tolist()
    assert found == pytest.approx(expected[stay], rel=1e-9)


def test_draws_from_a_large_vocabulary_do_not_depend_on_how_much_was_sorted() -> None:
    given = np.random.default_rng(3).standard_normal(5000) * 3
    order, kept = candidates(given, Sampling(1.0))
    assert len(order) == 5000
    sampler, sums = Sampler(Sampling(1.0, seed=8)), np.cumsum(kept)
    numbers = np.random.default_rng(np.random.SeedSequence(8)).random(500)
    assert len(candidates(given, Sampling(1.0), 0.5)[0]) == 1024 and numbers.max() > sums[1023] > 0.5
    assert [sampler.choose(given) for _ in numbers] == order[np.searchsorted(sums, numbers)].tolist()
