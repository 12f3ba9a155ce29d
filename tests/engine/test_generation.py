"""From prompts to texts: equal to the naive loop, exact in text, independent of batch mates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from qkv import engine
from qkv.engine import Completion, Request, Sampling, limits, scheduler
from qkv.errors import CapacityError, QkvError, RequestError
from qkv.model import Model
from qkv.runtime.blocks import Pool
from tests.engine.tiny import CLOSE, END, VOCAB, byte, greedily, says, tiny, word

PROMPT = [5, 80, 33]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


# Equality


@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_greedy_equals_the_loop_without_a_cache(model: Model, length: int) -> None:
    prompt = random_prompt(length)
    done = model.generate(prompt, max_new_tokens=24, ignore_eos=True)
    tokens, logprobs = greedily(model, prompt, 24)
    assert done.tokens == tokens and done.finish_reason == "length" and done.prompt == tuple(prompt)
    assert done.logprobs == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("length", [511, 512, 513, 1025])
def test_a_prompt_in_chunks_equals_one_pass(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = tiny(), random_prompt(length)
    passes: list[int] = []
    stream = model.stream(
        prompt, max_new_tokens=3, ignore_eos=True, progress=lambda at, all: passes.append(at)
    )
    list(stream)
    assert passes == [*range(512, length, 512), length]
    monkeypatch.setattr(scheduler, "CHUNK", 2048)
    whole = model.generate(prompt, max_new_tokens=3, ignore_eos=True)
    assert stream.completion.tokens == whole.tokens == greedily(model, prompt, 3)[0]
    assert stream.completion.logprobs == pytest.approx(whole.logprobs, abs=1e-5)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 2, 0]])
def test_batch_mates_change_nothing(model: Model, order: list[int]) -> None:
    """G15: lengths 3, 7 and 5, batched in any order and alone."""
    prompts = [random_prompt(length, seed=length) for length in (3, 7, 5)]
    together = model.generate([prompts[i] for i in order], max_new_tokens=12)
    for i, done in zip(order, together, strict=True):
        alone = model.generate(prompts[i], max_new_tokens=12)
        assert done.tokens == alone.tokens and done.text == alone.text
        assert done.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_long_and_a_short_prompt_share_chunks(model: Model) -> None:
    """The short one is padding for all of the first passes."""
    prompts = [random_prompt(700), random_prompt(2)]
    for prompt, done in zip(prompts, model.generate(prompts, max_new_tokens=4), strict=True):
        assert done.tokens == model.generate(prompt, max_new_tokens=4).tokens


def test_more_rows_than_tokens_a_pass(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [random_prompt(length) for length in (1, 5, 3, 2, 4)]
    alone = [model.generate(prompt, max_new_tokens=3).tokens for prompt in prompts]
    monkeypatch.setattr(scheduler, "CHUNK", 4)
    assert [done.tokens for done in model.generate(prompts, max_new_tokens=3)] == alone


def test_rows_may_differ_in_all_they_ask_for(model: Model) -> None:
    requests = [
        Request((5, 80), 3, ignore_eos=True),
        Request((7,), 9, Sampling(1.0, seed=4), ignore_eos=True),
        Request((5, 80, 33), 6, Sampling(repetition_penalty=1.5), ignore_eos=True),
    ]
    together = run(model, requests)
    for request, done in zip(requests, together, strict=True):
        assert len(done.tokens) == request.max_new_tokens
        assert done.tokens == run(model, [request])[0].tokens


def run(model: Model, requests: list[Request]) -> list[Completion]:
    found = {row: done for row, _, done in engine.stream(model.loaded, requests)}
    return [found[row] for row in range(len(requests))]


def test_a_seeded_request_does_not_depend_on_its_neighbours(model: Model) -> None:
    """G11: alone, twice, and beside one without a seed."""
    seeded, free = Request((5, 80), 20, Sampling(1.0, seed=42)), Request((5, 80), 20, Sampling(1.0))
    alone, again = run(model, [seeded])[0], run(model, [seeded])[0]
    beside = run(model, [free, seeded, free])
    assert alone.tokens == again.tokens == beside[1].tokens
    assert len({tuple(done.tokens) for done in beside}) == 3


def test_two_streams_of_one_model_do_not_meet(model: Model) -> None:
    first, second = (model.stream(p, max_new_tokens=15, ignore_eos=True) for p in ("ABC", "hello"))
    for _ in range(15):
        next(first, None), next(second, None)
    assert first.completion.tokens == model.generate("ABC", max_new_tokens=15, ignore_eos=True).tokens
    assert second.completion.tokens == model.generate("hello", max_new_tokens=15, ignore_eos=True).tokens


def test_threads_may_share_a_model(model: Model) -> None:
    prompts = [random_prompt(length) for length in (3, 9, 5, 12)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda prompt: model.generate(prompt, max_new_tokens=10).tokens, prompts))
    assert together == [model.generate(prompt, max_new_tokens=10).tokens for prompt in prompts]


def pools(model: Model) -> Sequence[Pool]:
    return model.loaded.serving["torch"].machine.own


def test_the_cache_holds_one_less_than_prompt_and_answer() -> None:
    """C7: 32 and 16 new ones need 47 places; and one more is one block more."""
    for length, held in ((32, 3), (33, 3), (34, 4)):
        model = tiny()
        done = model.generate(random_prompt(length), max_new_tokens=16, ignore_eos=True)
        assert len(done.tokens) == 16
        assert [len(pool.holders) for pool in pools(model)] == [held]


# Text


def said(tokens: list[int], **named: Any) -> tuple[Completion, list[str]]:
    """What comes of a model that says these tokens: the completion, and the pieces streamed."""
    model = tiny()
    with model.tap(says(tokens)):
        stream = model.stream(PROMPT, max_new_tokens=len(tokens), **named)
        pieces = list(stream)
    assert "".join(pieces) == stream.completion.text
    return stream.completion, pieces


ABC_DEF_GHI = [word("ABC"), word("DEF"), word("GHI")]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("DE", "ABC", "stop"),
        ("FG", "ABCDE", "stop"),
        ("CDEFG", "AB", "stop"),
        ("ABC", "", "stop"),
        (["HI", "EF"], "ABCD", "stop"),
        ("I", "ABCDEFGH", "stop"),
        ("GHIJ", "ABCDEFGHI", "length"),
        ("x", "ABCDEFGHI", "length"),
        ((), "ABCDEFGHI", "length"),
        (None, "ABCDEFGHI", "length"),
    ],
)
def test_stop_texts_are_found_across_tokens(stop: Any, text: str, reason: str) -> None:
    """G1."""
    done, _ = said(ABC_DEF_GHI, stop=stop)
    assert (done.text, done.finish_reason) == (text, reason)


def test_no_token_follows_the_stop() -> None:
    done, _ = said([*ABC_DEF_GHI, word("hello")], stop="E")
    assert done.tokens == ABC_DEF_GHI[:2] and len(done.logprobs) == 2


SMILE = [byte(value) for value in "🙂".encode()]


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (SMILE, ["🙂"]),
        ([*SMILE, *SMILE], ["🙂", "🙂"]),
        ([byte(0xC4), byte(0x8F), word("ABC")], ["ď", "ABC"]),
        ([word("ABC"), *SMILE[:2], END], ["ABC", "\ufffd"]),
        ([word("ABC"), *SMILE[:3]], ["ABC", "\ufffd"]),
        ([SMILE[0], word("ABC")], ["\ufffdABC"]),
        ([END], []),
        ([word("ABC"), END, word("DEF")], ["ABC"]),
    ],
)
def test_text_never_holds_part_of_a_character(tokens: list[int], pieces: list[str]) -> None:
    """G3."""
    assert said(tokens)[1] == pieces


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    model = tiny()
    with model.tap(says(SMILE[2:])):
        done = model.generate(SMILE[:2], max_new_tokens=2)
    assert done.text == "🙂"


def test_a_stop_in_the_last_unfinished_character_counts() -> None:
    done, _ = said([word("ABC"), SMILE[0]], stop="\ufffd")
    assert (done.text, done.finish_reason) == ("ABC", "stop")


def test_joined_pieces_are_the_text_whatever_the_model_says(model: Model) -> None:
    for seed in range(8):
        stream = model.stream(PROMPT, max_new_tokens=60, temperature=1.5, seed=seed, stop="q")
        pieces = list(stream)
        assert "".join(pieces) == stream.completion.text and all(pieces)
        assert model.tokenizer is not None
        full = model.tokenizer.decode([*PROMPT, *stream.completion.tokens])
        assert full.startswith(model.tokenizer.decode(PROMPT) + stream.completion.text)


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    """Tables are often padded to a round size."""
    model = tiny(vocab=VOCAB + 5)
    with model.tap(says([word("ABC"), VOCAB + 4, word("DEF")])):
        done = model.generate([VOCAB + 1, 3], max_new_tokens=3)
    assert done.tokens[1] == VOCAB + 4 and done.text == "ABCDEF"


def test_without_a_tokenizer_there_are_tokens_and_no_text() -> None:
    bare, whole = tiny(tokenizer=False), tiny()
    done = bare.generate(PROMPT, max_new_tokens=8)
    assert done.text == "" and done.tokens == whole.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens


# Ends


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([4, END, 5, 5], "stop"), ([4, 7, 5, 5], "stop"), ([4, CLOSE, 5], "stop"), ([4, 5], "length")],
)
def test_an_end_of_any_file_stops(tokens: list[int], reason: str) -> None:
    """G8: the configuration says [7]; the tokenizer names END, and its template closes turns with CLOSE."""
    model = tiny(eos=[7])
    with model.tap(says(tokens)):
        done = model.generate(PROMPT, max_new_tokens=len(tokens))
    assert done.tokens == tokens[:2] and done.finish_reason == reason


def test_a_batch_mate_goes_on_after_an_end() -> None:
    model = tiny(eos=[7])
    rows = ([4, 9, 7], [4, 5, 6, 8, 9, 10])
    with model.tap(says(*rows)):
        ended, full = model.generate([PROMPT, PROMPT[:1]], max_new_tokens=6)
    assert (ended.tokens, ended.finish_reason) == ([4, 9, 7], "stop")
    assert (full.tokens, full.finish_reason) == ([4, 5, 6, 8, 9, 10], "length")


def test_a_batch_mate_that_ended_changes_no_number(model: Model) -> None:
    prompt = random_prompt(6)
    alone = model.generate(prompt, max_new_tokens=20, ignore_eos=True)
    first = model.generate(PROMPT, max_new_tokens=1, ignore_eos=True).tokens[0]
    ending = tiny(eos=[first])
    done = {row: done for row, _, done in engine.stream(
        ending.loaded, [Request(tuple(PROMPT), 20), Request(tuple(prompt), 20, ignore_eos=True)]
    )}  # fmt: skip
    assert done[0].tokens == [first] and done[1].tokens == alone.tokens
    assert done[1].logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_ignoring_ends_runs_to_the_limit() -> None:
    model = tiny(eos=[7])
    with model.tap(says([7, END, 7, CLOSE])):
        done = model.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    assert (len(done.tokens), done.finish_reason) == (4, "length")
    assert done.text == model.tokenizer.decode([7, 7])  # type: ignore[union-attr]


# Refusals


REFUSED: list[tuple[list[int], dict[str, Any], str]] = [
    ([], {}, "The prompt is empty: give at least one token."),
    ([-1], {}, f"Token -1, at place 0 of the prompt, is outside the vocabulary of {VOCAB}."),
    ([3, VOCAB], {}, f"Token {VOCAB}, at place 1 of the prompt, is outside the vocabulary of {VOCAB}."),
    ([4294967295], {}, f"Token 4294967295, at place 0 of the prompt, is outside the vocabulary of {VOCAB}."),
    ([2**80], {}, f"Token {2**80}, at place 0 of the prompt, is outside the vocabulary of {VOCAB}."),
    ([3], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number of at least 1."),
    ([3], {"max_new_tokens": -5}, "max_new_tokens is -5; it must be a whole number of at least 1."),
    ([3], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number of at least 1."),
    ([3] * 17, {}, "The prompt has 17 tokens and the context holds 16: shorten it."),
    ([3] * 16, {}, "The prompt has 16 tokens and the context holds 16: shorten it."),
    (
        [3] * 17,
        {"max_new_tokens": 1},
        "This request needs 18 tokens (17 of prompt, 1 new) and the context holds 16: "
        "ask for fewer, or shorten the prompt.",
    ),
    (
        [3],
        {"max_new_tokens": 4096},
        "This request needs 4,097 tokens (1 of prompt, 4,096 new) and the context holds 16: "
        "ask for fewer, or shorten the prompt.",
    ),
    ([3], {"stop": ""}, "stop must be a list of strings, none of them empty."),
    ([3], {"stop": ["a", ""]}, "stop must be a list of strings, none of them empty."),
    ([3], {"stop": 5}, "stop must be a list of strings, none of them empty."),
    ([3], {"stop": [5]}, "stop must be a list of strings, none of them empty."),
    ([3], {"temperature": -1}, "temperature is -1; it must be a number of at least 0."),
    ([1.5], {}, "A prompt must be text or token ids (whole numbers)."),
]


@pytest.mark.parametrize(("prompt", "named", "sentence"), REFUSED)
def test_what_cannot_be_served_is_refused_and_the_model_goes_on(
    prompt: Any, named: dict[str, Any], sentence: str
) -> None:
    model = tiny(context=16)
    calls: list[Callable[[], Any]] = [
        lambda: model.stream(prompt, **named),  # before the first piece is asked for
        lambda: model.generate([[5], prompt], **named),
    ]
    for call in calls:
        with pytest.raises(RequestError) as problem:
            call()
        assert str(problem.value) == sentence
    done = model.generate([3] * 15, max_new_tokens=1)
    assert len(done.tokens) == 1


def test_the_default_length_is_what_the_context_allows() -> None:
    assert len(tiny(context=16).generate([3] * 5, ignore_eos=True).tokens) == 11
    assert len(tiny().generate([3] * 5, ignore_eos=True).tokens) == 256


@pytest.mark.parametrize(
    ("files", "context", "expected"),
    [
        ({"max_new_tokens": 7}, None, 7),
        ({"max_new_tokens": 7}, 8, 3),  # as far as the context allows
        ({"max_new_tokens": 300}, None, 300),
        ({"max_length": 9}, None, 4),  # the prompt counts
        ({"max_length": 4096}, None, 256),
        ({"max_length": 9, "max_new_tokens": 7}, None, 7),
        ({"max_length": 9, "max_new_tokens": None}, 8, 3),
    ],
)
def test_the_files_may_give_the_default_length(
    files: dict[str, object], context: int | None, expected: int
) -> None:
    model = tiny(generation=files, context=context)
    assert len(model.generate([3] * 5, ignore_eos=True).tokens) == expected
    assert len(model.generate([3] * 5, max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_a_prompt_longer_than_the_files_allow_says_what_to_do() -> None:
    model = tiny(generation={"max_length": 5})
    with pytest.raises(RequestError) as problem:
        model.generate([3] * 5)
    assert str(problem.value) == (
        "The prompt has 5 tokens and the model's max_length is 5: shorten it, or give max_new_tokens."
    )
    assert len(model.generate([3] * 5, max_new_tokens=3, ignore_eos=True).tokens) == 3


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="Stop texts need a tokenizer, and this source has none"):
        tiny(tokenizer=False).generate([3], stop="a")


def test_a_cache_that_does_not_fit_is_refused_with_both_numbers(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of two heads of six values, keys and values, fp32: 192 bytes a token."""
    monkeypatch.setattr(limits, "free_memory", lambda device: 8_000_000_000)
    with pytest.raises(CapacityError) as problem:
        model.stream([3, 4], max_new_tokens=50_000_000)
    assert str(problem.value) == (
        "A cache of 50,000,001 tokens needs 9,600 MB of memory, and 8,000 MB is free: "
        "ask for fewer new tokens, or shorten the prompt."
    )
    with pytest.raises(CapacityError, match=r"50,000,001 tokens in each of 2 rows needs 19,200 MB"):
        model.generate([3, 4], max_new_tokens=50_000_000, n=2, temperature=1.0)
    assert len(model.generate([3], max_new_tokens=2, ignore_eos=True).tokens) == 2


def test_the_memory_counted_is_the_memory_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 16 tokens in each of three rows of one prompt, 192 bytes a token as above."""
    monkeypatch.setattr(limits, "free_memory", lambda device: 3 * 16 * 192)
    model = tiny()
    model.generate([3, 4], max_new_tokens=15, n=3, temperature=1.0, ignore_eos=True)
    (pool,) = pools(model)
    assert len(pool.holders) == pool.limit == 3 and pool.bytes == 16 * 192
    with pytest.raises(CapacityError, match="17 tokens in each of 3 rows"):
        model.generate([3, 4], max_new_tokens=16, n=3, temperature=1.0, ignore_eos=True)


def test_what_does_not_fit_at_once_comes_one_after_the_other(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [random_prompt(length, seed=length) for length in (20, 9, 31)]
    whole = model.generate(prompts, max_new_tokens=30, ignore_eos=True)
    monkeypatch.setattr(limits, "free_memory", lambda device: 4 * 16 * 192)
    small = tiny()
    for done, other in zip(small.generate(prompts, max_new_tokens=30, ignore_eos=True), whole, strict=True):
        assert done.tokens == other.tokens and len(done.tokens) == 30
    (pool,) = pools(small)
    assert len(pool.holders) <= 4 and len(pool.free) + len(pool.cached) == len(pool.holders)


def test_a_cache_that_no_machine_could_hold_is_refused(model: Model) -> None:
    with pytest.raises(CapacityError):
        model.generate([3], max_new_tokens=10**15)
    assert len(model.generate([3], max_new_tokens=2, ignore_eos=True).tokens) == 2


# Leaving early, failing, looking inside


def test_closing_a_stream_leaves_nothing_behind() -> None:
    model = tiny()
    stream = model.stream(PROMPT, max_new_tokens=100, ignore_eos=True)
    next(stream)
    (pool,) = pools(model)
    assert pool.holders == [1]
    stream.close()
    assert pool.holders == [0] and model.loaded.serving["torch"].idle
    assert list(stream) == [] and stream.completion.finish_reason is None
    assert 0 < len(stream.completion.tokens) < 100


@pytest.mark.parametrize("failing_pass", [0, 1, 4])
def test_a_failure_in_the_middle_leaves_the_model_usable(model: Model, failing_pass: int) -> None:
    passed = iter(range(100))

    def fails(value: torch.Tensor) -> torch.Tensor:
        if next(passed) == failing_pass:
            raise ZeroDivisionError("a tap's own error")
        return value

    with pytest.raises(ZeroDivisionError), model.tap({"layers.1.attention.heads": fails}):
        model.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    done = model.generate(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert done.tokens == greedily(model, PROMPT, 8)[0]


@pytest.mark.parametrize("named", [{}, {"temperature": 1.0}])
def test_logits_that_are_no_numbers_end_the_request(model: Model, named: dict[str, Any]) -> None:
    broken = {"layers.0.output": lambda x: x * float("nan")}
    with pytest.raises(RequestError, match="logits are not numbers"), model.tap(broken):
        model.generate(PROMPT, **named)
    assert len(model.generate(PROMPT, max_new_tokens=3, ignore_eos=True).tokens) == 3


def test_taps_see_every_pass_of_a_generation(model: Model) -> None:
    with model.tap(["layers.1.attention.weights", "logits"]) as seen:
        done = model.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    weights = seen.history["layers.1.attention.weights"]
    assert [tuple(w.shape) for w in weights] == [(1, 4, 3, 3), (1, 4, 1, 4), (1, 4, 1, 5), (1, 4, 1, 6)]
    assert [int(logits[0, -1].argmax()) for logits in seen.history["logits"]] == done.tokens
    with model.tap(["layers.1.attention.weights"]) as whole:
        model(torch.tensor([[*PROMPT, *done.tokens[:3]]]))
    assert torch.allclose(weights[-1][0, :, 0], whole["layers.1.attention.weights"][0, :, -1], atol=1e-5)


def test_a_tap_sees_the_passes_of_its_block_only(model: Model) -> None:
    stream = model.stream(PROMPT, max_new_tokens=6, ignore_eos=True)
    next(stream)
    with model.tap("final") as seen:
        at = len(stream.completion.tokens)
        next(stream)
        passes = len(stream.completion.tokens) - at
    list(stream)
    assert len(seen.history["final"]) == passes > 0


def test_time_the_reader_takes_is_no_part_of_the_speed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 10**6, 1))
    monkeypatch.setattr(scheduler.time, "perf_counter", lambda: next(now))
    stream = model.stream(PROMPT, max_new_tokens=3, ignore_eos=True)
    for _ in range(3):
        next(stream, None)
        [next(now) for _ in range(1000)]
    assert stream.completion.prefill_seconds == 1 and stream.completion.decode_seconds < 10


def test_a_prompt_of_special_tokens_only(model: Model) -> None:
    done = model.generate("<|im_start|><|im_end|>", max_new_tokens=3, ignore_eos=True)
    assert done.prompt == (END + 1, CLOSE) and len(done.tokens) == 3


@pytest.mark.parametrize("text", ["\x00", "🙂🙂", "e\u0301\u200d", "日本語", "\u202eabc", " ", "\ud800"])
def test_any_text_is_continued_or_refused_in_a_sentence(model: Model, text: str) -> None:
    try:
        assert len(model.generate(text, max_new_tokens=2, ignore_eos=True).tokens) == 2
    except QkvError as problem:
        assert text == "\ud800" and str(problem).endswith(".")


def test_what_a_tap_has_changed_is_no_beginning_of_another_text() -> None:
    model, prompt = tiny(), random_prompt(40)
    stream = model.stream(prompt, max_new_tokens=40, ignore_eos=True)
    next(stream)
    with model.tap({"layers.0.output": lambda x: 0 * x}):
        list(stream)
    text = [*prompt, *stream.completion.tokens]
    for size in (len(text), 41):
        found = model.generate(text[:size], max_new_tokens=8, ignore_eos=True)
        fresh = tiny().generate(text[:size], max_new_tokens=8, ignore_eos=True)
        assert found.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
