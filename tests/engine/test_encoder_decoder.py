"""Encoder-decoders: equal to transformers and to the loop without a cache, whatever stands beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BartForConditionalGeneration

from qkv.errors import CapacityError, ConfigError, RequestError
from qkv.loading import Loaded
from qkv.model import Model
from tests.engine.pairs import END, FIRST, ROWS, START, VOCAB, bart

Pair = tuple[Model, BartForConditionalGeneration]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return bart()


def source(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def theirs(pair: Pair, prompt: list[int], **named: Any) -> Any:
    settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "max_length": None, **named}
    return pair[1].generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )


def answer(sequence: torch.Tensor) -> list[int]:
    """What follows the start, without the padding behind the end."""
    found = sequence.tolist()[1:]
    return found[: found.index(END) + 1] if END in found else found


@pytest.mark.parametrize("length", [1, 5, 30])
def test_greedy_equals_transformers_and_the_loop_without_a_cache(pair: Pair, length: int) -> None:
    prompt, model = source(length), pair[0]
    done = model.generate(prompt, max_new_tokens=12)
    assert done.tokens == answer(theirs(pair, prompt).sequences[0]) and done.prompt == tuple(prompt)
    tokens = [START]
    for expected in done.logprobs:
        shares = model(torch.tensor([tokens]), torch.tensor([prompt]))[0, -1].double().log_softmax(-1)
        tokens.append(int(shares.argmax()))
        assert expected == pytest.approx(float(shares.max()), abs=1e-5)
    assert tokens[1:] == done.tokens


def test_unequal_sources_in_a_batch_equal_each_alone(pair: Pair) -> None:
    prompts = [source(length, seed=length) for length in (3, 17, 1, 8)]
    for named in ({}, {"beams": 3}, {"seed": 5, "n": 2}):
        together = pair[0].generate(prompts, max_new_tokens=9, **named)
        for prompt, found in zip(prompts, together, strict=True):
            alone = pair[0].generate(prompt, max_new_tokens=9, **named)
            for a, b in zip(*(x if isinstance(x, list) else [x] for x in (found, alone)), strict=True):
                assert a.tokens == b.tokens and a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_equal_transformers(pair: Pair, penalty: float, early: Any) -> None:
    """The cross-attention's keys go with their beams."""
    named = {"length_penalty": penalty, "early_stopping": early}
    for seed in range(3):
        prompt = source(6, seed)
        expected = theirs(pair, prompt, num_beams=4, num_return_sequences=3, **named)
        found = pair[0].generate(prompt, max_new_tokens=12, beams=4, n=3, **named)
        assert [done.tokens for done in found] == [answer(row) for row in expected.sequences]
        assert [done.score for done in found] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_forced_tokens_begin_and_end_the_answer(beams: int) -> None:
    """forced_bos_token_id comes first; forced_eos_token_id is the last token where the limit is reached."""
    forced = {"forced_bos_token_id": FIRST, "forced_eos_token_id": END}
    model, other = bart(seed=3, num_beams=beams, **forced)
    done = model.generate(source(4), max_new_tokens=6)
    assert done.tokens[0] == FIRST and len(done.tokens) == 6 and done.tokens[-1] == END
    assert done.finish_reason == "length"
    expected = theirs((model, other), source(4), max_new_tokens=6, num_beams=beams, **forced)
    assert done.tokens == expected.sequences[0].tolist()[1:]
    certain = model.generate(source(4), max_new_tokens=6, logprobs="processed")
    assert certain.logprobs[0] == certain.logprobs[-1] == 0 > certain.logprobs[1]


def test_the_rules_of_a_summariser_equal_transformers() -> None:
    """As bart-large-cnn has them: beams, a least length, and no three tokens twice."""
    rules = {
        "num_beams": 4, "length_penalty": 2.0, "early_stopping": True, "min_length": 6,
        "no_repeat_ngram_size": 2, "forced_bos_token_id": FIRST, "forced_eos_token_id": END,
    }  # fmt: skip
    for seed in (0, 1):
        pair = bart(seed, max_length=15, decoder_start_token_id=START, **rules)
        for prompt in (source(9), source(20, 1)):
            done = pair[0].generate(prompt)
            expected = theirs(pair, prompt, max_new_tokens=14, **rules)
            assert done.tokens == answer(expected.sequences[0]) and 5 < len(done.tokens) <= 14
            pairs_of = list(zip(done.tokens, done.tokens[1:], strict=False))
            assert len(set(pairs_of)) == len(pairs_of)


def test_the_encoder_reads_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    forward = type(pair[0].network.encoder).forward

    def counted(stack: Any, *arguments: Any, **named: Any) -> Any:
        passes.append(stack)
        return forward(stack, *arguments, **named)

    monkeypatch.setattr(type(pair[0].network.encoder), "forward", counted)
    done = pair[0].generate(source(7), max_new_tokens=8, ignore_eos=True, n=3)
    assert sum(stack is pair[0].network.encoder for stack in passes) == 1
    assert sum(stack is pair[0].network.decoder for stack in passes) == 8 and len(done) == 3


def test_each_side_has_its_own_room(pair: Pair) -> None:
    """The tables have forty rows; source and answer are not added up."""
    model = pair[0]
    done = model.generate(source(ROWS), max_new_tokens=ROWS - 1, ignore_eos=True)
    assert len(done.tokens) == ROWS - 1
    assert len(model.generate(source(3), ignore_eos=True).tokens) == ROWS - 1
    with pytest.raises(RequestError, match="prompt has 41 tokens and the encoder reads 40: shorten it"):
        model.generate(source(ROWS + 1))
    with pytest.raises(RequestError, match=r"needs 41 tokens of the decoder \(its start and 40 new\), which"):
        model.generate(source(3), max_new_tokens=ROWS)


def test_max_length_counts_the_start_and_not_the_source() -> None:
    model = bart(max_length=10)[0]
    assert len(model.generate(source(25), ignore_eos=True).tokens) == 9


def test_a_start_that_is_missing_or_no_token_is_named(pair: Pair) -> None:
    def started(config: dict[str, Any]) -> Model:
        loaded = pair[0].loaded
        return Model(Loaded(replace(loaded.files, config=config), loaded.choice))

    with pytest.raises(RequestError, match="name no decoder_start_token_id, which the decoder"):
        started({}).generate(source(3))
    with pytest.raises(ConfigError, match="decoder_start_token_id is 60; it must be a token id below 60"):
        started({"decoder_start_token_id": VOCAB}).generate(source(3))
    assert started({"bos_token_id": START}).generate(source(3), max_new_tokens=4).tokens == (
        pair[0].generate(source(3), max_new_tokens=4).tokens
    )


def test_the_source_counts_in_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of keys and values of sixteen, fp32: 256 bytes for each token and each source row.

    Tokens come in blocks of 16 for each answer, the source once.
    """
    monkeypatch.setattr("qkv.engine.limits.free_memory", lambda device: 256 * (3 * 16 + 5))
    bart()[0].generate(source(5), max_new_tokens=8, n=3)
    with pytest.raises(CapacityError, match="8 tokens in each of 3 rows"):
        bart()[0].generate(source(6), max_new_tokens=8, n=3)
