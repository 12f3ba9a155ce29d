"""Samples, log-probabilities, biases by name, and what becomes of one row that fails."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from qkv.engine.logprobs import Logprobs
from qkv.engine.sampling import Sampling
from qkv.errors import ConfigError, RequestError
from qkv.model import Model
from qkv.nn import ContiguousCache
from tests.engine.tiny import CLOSE, VOCAB, byte, greedily, says, tiny, word

PROMPT = [5, 80, 33]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny()


# Samples


def test_a_sample_does_not_depend_on_how_many_there_are(model: Model) -> None:
    options: Any = {"max_new_tokens": 8, "seed": 7, "ignore_eos": True}
    five = model.generate(PROMPT, n=5, **options)
    assert len({tuple(done.tokens) for done in five}) == 5
    assert [done.tokens for done in model.generate(PROMPT, n=2, **options)] == [d.tokens for d in five[:2]]
    assert model.generate(PROMPT, **options).tokens == five[0].tokens


def test_samples_beside_others_equal_samples_alone(model: Model) -> None:
    options: Any = {
        "max_new_tokens": 8, "seed": 7, "n": 3, "top_p": 0.9, "presence_penalty": 1.5,
        "frequency_penalty": 0.5, "logit_bias": {7: 2.0}, "logprobs": "processed", "top_logprobs": 2,
    }  # fmt: skip
    prompts = [PROMPT, [9], [4, 8, 15, 16, 23, 42]]
    for prompt, together in zip(prompts, model.generate(prompts, **options), strict=True):
        for beside, alone in zip(together, model.generate(prompt, **options), strict=True):
            assert beside.tokens == alone.tokens and beside.text == alone.text
            assert beside.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert [[t for t, _ in top] for top in beside.top_logprobs] == [
                [t for t, _ in top] for top in alone.top_logprobs
            ]


def test_the_prompt_of_several_samples_is_read_once(model: Model) -> None:
    with model.tap("layers.0.attention.query") as seen:
        model.generate(PROMPT, max_new_tokens=3, n=4, ignore_eos=True)
    assert [value.shape[::2] for value in seen.history["layers.0.attention.query"]] == [
        (1, 3),
        (4, 1),
        (4, 1),
    ]


def test_greedy_samples_are_all_the_same(model: Model) -> None:
    found = model.generate(PROMPT, max_new_tokens=5, n=3, temperature=0, ignore_eos=True)
    assert [done.tokens for done in found] == [greedily(model, PROMPT, 5)[0]] * 3


def test_a_sample_that_ends_leaves_the_others_going() -> None:
    model = tiny(eos=range(0, 266, 4))
    found = model.generate(PROMPT, max_new_tokens=12, n=6, seed=3)
    lengths = {len(done.tokens) for done in found}
    assert len(lengths) > 1
    for sample, done in enumerate(model.generate(PROMPT, max_new_tokens=12, n=6, seed=3, ignore_eos=True)):
        assert done.tokens[: len(found[sample].tokens)] == found[sample].tokens


def test_selecting_rows_moves_copies_and_drops_them(model: Model) -> None:
    """C1: the rows of a cache go where their texts go."""
    network, tokens = model.network, torch.tensor([[1, 2, 3], [4, 5, 6]])
    cache = ContiguousCache(network.spec.trunk, 2, 5)
    network(tokens, cache=cache)
    cache.select(torch.tensor([1, 1, 0]))
    found = network(torch.tensor([[7], [8], [9]]), cache=cache)
    whole = network(torch.tensor([[4, 5, 6, 7], [4, 5, 6, 8], [1, 2, 3, 9]]))
    assert torch.allclose(found[:, 0], whole[:, -1], atol=1e-5)


# Log-probabilities


def test_raw_and_processed_are_before_and_after_all_that_changes_them(model: Model) -> None:
    options: Any = {
        "max_new_tokens": 5, "temperature": 0.5, "top_k": 20, "seed": 1, "logit_bias": {7: 3.0},
        "ignore_eos": True, "top_logprobs": 3,
    }  # fmt: skip
    raw = model.generate(PROMPT, **options)
    processed = model.generate(PROMPT, logprobs="processed", **options)
    assert raw.tokens == processed.tokens
    for place, token in enumerate(raw.tokens):
        logits = model(torch.tensor([[*PROMPT, *raw.tokens[:place]]]))[0, -1].double()
        shares = logits.log_softmax(-1)
        assert raw.logprobs[place] == pytest.approx(float(shares[token]), abs=1e-5)
        values, ids = shares.topk(3)
        assert raw.top_logprobs[place] == [
            (int(i), pytest.approx(float(v), abs=1e-5)) for i, v in zip(ids, values, strict=True)
        ]
        logits[7] += 3
        logits /= 0.5
        logits[logits < logits.topk(20)[0][-1]] = -math.inf
        drawn = logits.log_softmax(-1)
        assert processed.logprobs[place] == pytest.approx(float(drawn[token]), abs=1e-5)
        assert processed.top_logprobs[place][0][0] == int(drawn.argmax())


def test_values_done_by_hand() -> None:
    """Shares 1/2, 1/4, 1/8, 1/8: the two likeliest of them are drawn as 2/3 and 1/3."""
    logits = np.log([0.5, 0.25, 0.125, 0.125])
    raw = Logprobs(logits, logits, Sampling(1.0, top_k=2), "raw")
    drawn = Logprobs(logits, logits, Sampling(1.0, top_k=2), "processed")
    greedy = Logprobs(logits, logits + np.log([1, 1, 1, 4]), Sampling(), "processed")
    assert raw.of(2) == pytest.approx(math.log(0.125))
    assert drawn.top(4) == [(0, pytest.approx(math.log(2 / 3))), (1, pytest.approx(math.log(1 / 3)))]
    assert greedy.top(2) == [(0, pytest.approx(math.log(4 / 11))), (3, pytest.approx(math.log(4 / 11)))]
    assert raw.top(0) == []


def test_all_of_the_vocabulary_may_be_reported_and_no_more(model: Model) -> None:
    done = model.generate(PROMPT, max_new_tokens=2, top_logprobs=VOCAB)
    assert all(len(top) == VOCAB for top in done.top_logprobs)
    assert sum(math.exp(value) for _, value in done.top_logprobs[0]) == pytest.approx(1)
    assert json.dumps(done.top_logprobs, allow_nan=False)
    with pytest.raises(RequestError) as problem:
        model.generate(PROMPT, top_logprobs=VOCAB + 1)
    assert str(problem.value) == (
        f"top_logprobs is {VOCAB + 1}; it must be a whole number from 0 to {VOCAB}, "
        "the size of the vocabulary."
    )


# Biases


def test_a_bias_names_a_token_by_id_or_text(model: Model) -> None:
    for name in (word("ABC"), "ABC", np.int64(word("ABC"))):
        done = model.generate(PROMPT, max_new_tokens=3, logit_bias={name: 1000.0})
        assert done.tokens == [word("ABC")] * 3 and done.text == "ABCABCABC"
    ended = model.generate(PROMPT, max_new_tokens=3, logit_bias={"<|im_end|>": 1000.0})
    assert ended.tokens == [CLOSE] and ended.finish_reason == "stop"
    letter = model.generate(PROMPT, max_new_tokens=1, logit_bias={"h": 1000.0})
    assert letter.tokens == [byte(ord("h"))]


@pytest.mark.parametrize(
    ("bias", "sentence"),
    [
        ({"ABCDEF": 1}, "logit_bias names 'ABCDEF', which is no single token (but 'ABC', 'DEF')."),
        ({"": 1}, "logit_bias names '', which is no single token (but none)."),
        ({"ABC": 1, word("ABC"): 2}, f"logit_bias names token {word('ABC')} twice."),
        ({VOCAB: 1}, f"logit_bias names token {VOCAB}, outside the vocabulary of {VOCAB}."),
        ([1], "logit_bias is [1]; it must map tokens to numbers."),
    ],
)
def test_a_bias_that_names_no_token_is_refused(model: Model, bias: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        model.generate(PROMPT, logit_bias=bias)
    assert str(problem.value) == sentence


def test_texts_in_a_bias_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="names 'ABC', and this source has no tokenizer: give token ids"):
        tiny(tokenizer=False).generate(PROMPT, logit_bias={"ABC": 1})


def test_forbidding_every_token_is_an_error(model: Model) -> None:
    with pytest.raises(RequestError, match="none is left to choose"):
        model.generate(PROMPT, logit_bias=dict.fromkeys(range(VOCAB), -math.inf))


def test_penalties_act_over_a_whole_answer(model: Model) -> None:
    """Independently: greedy over the logits less what the formula takes."""
    options: Any = {"presence_penalty": 1.0, "frequency_penalty": 2.0}
    done = model.generate(PROMPT, max_new_tokens=15, ignore_eos=True, **options)
    answer: list[int] = []
    for _ in range(15):
        logits = model(torch.tensor([[*PROMPT, *answer]]))[0, -1]
        for token in set(answer):
            logits[token] -= 2.0 * answer.count(token) + 1.0
        answer.append(int(logits.argmax()))
    assert done.tokens == answer


# One row that fails


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_fails_ends_alone(temperature: float) -> None:
    model, prompts = tiny(), [PROMPT, [9], [4, 8]]
    options: Any = {"max_new_tokens": 6, "temperature": temperature, "seed": 2, "ignore_eos": True}
    passed = iter(range(100))

    def breaks(x: torch.Tensor) -> torch.Tensor:
        if next(passed) == 2:
            x = x.clone()
            x[1] = float("nan")
        return x

    with model.tap({"layers.0.output": breaks}):
        first, broken, last = model.generate(prompts, **options)
    assert broken.finish_reason == "error" and len(broken.tokens) == 2
    assert broken.error == "The model's logits are not numbers; its weights or its type overflow."
    for done, prompt in ((first, prompts[0]), (last, prompts[2])):
        alone = model.generate(prompt, **options)
        assert done.tokens == alone.tokens and done.error is None
        assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_stream_that_fails_says_what_it_has_and_raises() -> None:
    model = tiny()
    passed = iter(range(100))
    broken = {"final": lambda x: x * (float("nan") if next(passed) == 3 else 1)}
    said = says([word("AB"), word("DE"), word("GH"), word("GH")])

    def logits(value: torch.Tensor) -> torch.Tensor:
        return said["logits"](value) if value.isfinite().all() else value

    pieces = []
    with model.tap({**broken, "logits": logits}):
        stream = model.stream(PROMPT, max_new_tokens=9, stop="GHI")
        with pytest.raises(RequestError, match="logits are not numbers"):
            for piece in stream:
                pieces.append(piece)
    assert "".join(pieces) == stream.completion.text == "ABDEGH"  # what a stop might have held back, too
    assert stream.completion.finish_reason == "error"


# Refusals


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0; it must be a whole number from 1 to 128."),
    ({"n": 10**9}, "n is 1000000000; it must be a whole number from 1 to 128."),
    ({"n": 1.0}, "n is 1.0; it must be a whole number from 1 to 128."),
    ({"logprobs": "cooked"}, 'logprobs is \'cooked\'; it must be "raw" or "processed".'),
    ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be true or false."),
    ({"logprobs": True}, 'logprobs is True; it must be "raw" or "processed".'),
    ({"presence_penalty": 5}, "presence_penalty is 5; it must be a number from -2 to 2."),
    ({"max_new_tokens": 0, "beams": 2}, "max_new_tokens is 0; it must be a whole number of at least 1."),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_what_cannot_be_served_is_refused(model: Model, options: Any, sentence: str) -> None:
    with pytest.raises(RequestError) as problem:
        model.generate(PROMPT, **options)
    assert str(problem.value) == sentence


def test_an_unknown_option_is_named(model: Model) -> None:
    with pytest.raises(RequestError, match=r"There is no argument 'topk' \(beams, choice, early_stopping"):
        model.generate(PROMPT, topk=3)  # type: ignore[call-arg]


def test_a_stream_is_of_one_answer(model: Model) -> None:
    with pytest.raises(RequestError, match="A stream is of one answer: leave n out"):
        model.stream(PROMPT, n=2)


def test_the_files_may_set_what_is_generated() -> None:
    beams = tiny(generation={"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5})
    options: Any = {"max_new_tokens": 4, "ignore_eos": True}
    found = beams.generate(PROMPT, **options)
    expected = tiny().generate(PROMPT, beams=3, n=2, length_penalty=0.5, **options)
    assert [(done.tokens, done.score) for done in found] == [(done.tokens, done.score) for done in expected]
    assert beams.generate(PROMPT, beams=1, n=1, **options).tokens == greedily(tiny(), PROMPT, 4)[0]
    drawn = tiny(generation={"do_sample": True, "num_return_sequences": 3}).generate(
        PROMPT, seed=1, **options
    )
    assert [d.tokens for d in drawn] == [d.tokens for d in tiny().generate(PROMPT, n=3, seed=1, **options)]


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_token_that_the_files_force_is_one_of_the_model(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 266; it must be a token id below 266. Pass ignore="):
        tiny(generation={name: 266}).generate(PROMPT)


def test_samples_do_not_mix_the_bytes_of_their_letters() -> None:
    """Most tokens of this model are parts of letters: each answer's text is that of its own tokens."""
    model = tiny()
    assert model.tokenizer is not None
    for done in model.generate(PROMPT, n=4, seed=3, temperature=2.0, max_new_tokens=24, ignore_eos=True):
        alone = model.tokenizer.stream()
        for token in PROMPT:
            alone.push(token)
        assert done.text == "".join(map(alone.push, done.tokens)) + alone.flush()


def test_what_is_left_to_draw_from_sums_to_one() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    values = Logprobs(logits, logits, Sampling(1.0, top_p=0.6), "processed").values
    assert np.exp(values).tolist() == pytest.approx([0.625, 0.375, 0])
