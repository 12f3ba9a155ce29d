"""Texts made by a machine's programs equal those that torch makes, whatever shares the machine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from qkv.engine import Request, limits, scheduler
from qkv.engine.generation import scheduler as scheduler_of
from qkv.errors import CapacityError, RequestError
from qkv.model import Model
from qkv.runtime.built import missing
from qkv.runtime.interpreter import Rows
from qkv.runtime.machine import Interpreted
from tests.engine.pairs import VOCAB as PAIR_VOCAB, bart
from tests.engine.test_generation import random_prompt
from tests.engine.tiny import tiny

PROMPTS = [random_prompt(length, seed=length) for length in (3, 9, 1, 30)]


@pytest.fixture(scope="module")
def torch_model() -> Model:
    return tiny()


@pytest.fixture
def model() -> Iterator[Model]:
    """A model that numpy runs; whatever happened, no sequence may be left of it."""
    made = tiny(runtime="numpy")
    yield made
    assert "model" not in vars(made.loaded), "torch's modules were made"
    assert not machine_of(made).kept.slots


def machine_of(model: Model) -> Interpreted:
    machine = model.loaded.machine
    assert isinstance(machine, Interpreted)
    return machine


def flat(found: Any) -> list[Any]:
    return [each for part in found for each in flat(part)] if isinstance(found, list) else [found]


def assert_alike(ours: Any, theirs: Any) -> None:
    assert len(flat(ours)) == len(flat(theirs))
    for a, b in zip(flat(ours), flat(theirs), strict=True):
        assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
        assert (a.score is None) == (b.score is None) and a.score == pytest.approx(b.score, abs=1e-4)


ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "n": 3, "top_p": 0.9},
    {"beams": 4, "n": 2},
    {"repetition_penalty": 1.3, "logit_bias": {7: 3.0}, "top_logprobs": 3},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_batch_equals_torch(model: Model, torch_model: Model, asked: dict[str, Any]) -> None:
    named = {"max_new_tokens": 12, **asked}
    assert_alike(model.generate(PROMPTS, **named), torch_model.generate(PROMPTS, **named))


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_the_native_runtime_equals_torch_where_weights_are_float32(
    torch_model: Model, asked: dict[str, Any]
) -> None:
    if missing() is not None:
        return  # where it has to be here is another test's
    named = {"max_new_tokens": 12, **asked}
    assert_alike(tiny(runtime="native").generate(PROMPTS, **named), torch_model.generate(PROMPTS, **named))


@pytest.mark.parametrize("asked", ASKED[:4], ids=str)
def test_encoder_decoders_equal_torch(asked: dict[str, Any]) -> None:
    sources = [np.random.default_rng(i).integers(3, PAIR_VOCAB, 4 + 3 * i).tolist() for i in range(3)]
    named = {"max_new_tokens": 9, **asked}
    ours, theirs = bart(runtime="numpy")[0], bart()[0]
    assert_alike(ours.generate(sources, **named), theirs.generate(sources, **named))
    assert not machine_of(ours).kept.slots


def test_prompts_are_read_in_steps_of_rows_of_all_together(
    model: Model, torch_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No padding: the prompt of one token first, then as they come; who has begun to write is never kept."""
    machine, steps = machine_of(model), list[Rows]()
    inner = machine.run
    monkeypatch.setattr(machine, "run", lambda rows: steps.append(rows) or inner(rows))
    monkeypatch.setattr(scheduler, "CHUNK", 8)
    found = model.generate(PROMPTS, max_new_tokens=5, ignore_eos=True)
    monkeypatch.undo()
    assert [len(rows.tokens) for rows in steps] == [8, 8, 8, 8, 8, 8, 7, 1, 1, 1, 1]
    assert [len(rows.wanted) for rows in steps] == [2, 3, 3, 3, 3, 1, 1, 1, 1, 1, 1]
    assert_alike(found, torch_model.generate(PROMPTS, max_new_tokens=5, ignore_eos=True))


@pytest.mark.parametrize("length", [511, 512, 513])
def test_the_progress_of_a_prompt_is_told(model: Model, length: int) -> None:
    told: list[tuple[int, int]] = []
    stream = model.stream(
        random_prompt(length), max_new_tokens=1, progress=lambda done, of: told.append((done, of))
    )
    list(stream)
    assert told == [(at, length) for at in (*range(512, length, 512), length)]


def test_a_row_that_has_ended_is_in_no_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    first = model.generate(PROMPTS[0], max_new_tokens=1, ignore_eos=True).tokens[0]  # type: ignore[union-attr]
    ending = tiny(runtime="numpy", eos=[first])
    machine, steps = machine_of(ending), list[Rows]()
    inner = machine.run
    monkeypatch.setattr(machine, "run", lambda rows: steps.append(rows) or inner(rows))
    ended, full = ending.generate(PROMPTS[:2], max_new_tokens=4)
    assert ended.tokens == [first] and len(full.tokens) > 1
    assert [rows.sequences.tolist() for rows in steps[1:]] == [[1]] * (len(full.tokens) - 1)


def test_two_texts_of_one_model_do_not_meet(model: Model) -> None:
    first, second = (model.stream(p, max_new_tokens=15, ignore_eos=True) for p in PROMPTS[:2])
    for _ in range(15):
        next(first, None), next(second, None)
    list(first), list(second)
    for stream, prompt in ((first, PROMPTS[0]), (second, PROMPTS[1])):
        alone = model.generate(prompt, max_new_tokens=15, ignore_eos=True)
        assert stream.completion.tokens == alone.tokens  # type: ignore[union-attr]


def test_threads_may_share_a_machine(model: Model) -> None:
    def tokens(prompt: list[int]) -> list[int]:
        return model.generate(prompt, max_new_tokens=10).tokens  # type: ignore[union-attr]

    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(tokens, PROMPTS * 3))
    assert together == [tokens(prompt) for prompt in PROMPTS] * 3


def test_a_stream_that_is_closed_or_fails_holds_nothing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = model.stream(PROMPTS[0], max_new_tokens=50, ignore_eos=True)
    next(stream)
    assert machine_of(model).kept.slots
    stream.close()
    assert not machine_of(model).kept.slots

    def full(rows: Rows) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(machine_of(model), "run", full)
    with pytest.raises(MemoryError):
        model.generate(PROMPTS, n=2, temperature=1.0)
    monkeypatch.undo()
    assert not machine_of(model).kept.slots and model.loaded.serving["program"].idle


def test_a_tap_set_in_the_middle_is_refused_and_before_it_is_torchs(torch_model: Model) -> None:
    model = tiny(runtime="numpy")
    stream = model.stream(PROMPTS[0], max_new_tokens=9, ignore_eos=True)
    next(stream)
    with model.tap("final") as seen:
        with pytest.raises(RequestError, match="A tap was set after this text was begun without one: set it"):
            list(stream)
        assert len(seen) == 0
        done = model.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True)
    assert len(seen.history["final"]) == 4
    assert_alike(done, torch_model.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True))
    assert model.runtime == "numpy"


def test_a_cache_that_does_not_fit_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of two heads of six values, keys and values, fp32: 192 bytes a token."""
    monkeypatch.setattr(limits, "free_memory", lambda device: 2 * 9 * 192)
    model.generate([3, 4], max_new_tokens=8, n=2, temperature=1.0)
    with pytest.raises(CapacityError, match=r"10 tokens in each of 2 rows needs 0 MB"):
        model.generate([3, 4], max_new_tokens=9, n=2, temperature=1.0)


def test_a_backend_of_torch_makes_torch_generate() -> None:
    model = tiny(runtime="numpy")
    assert model.runtime == "numpy" and repr(model) == "<tiny: 13,200 parameters, run by numpy>"
    assert model.use("sdpa").runtime == "torch" and repr(model) == "<tiny: 13,200 parameters, float32>"


@pytest.mark.skipif(missing() is not None, reason="the native runtime was not built")
def test_sources_are_under_the_limit_too() -> None:
    """Room for one source of forty tokens at a time: those who come wait, and nothing else changes."""
    made = bart(runtime="native")[0]
    prompts = [np.random.default_rng(i).integers(5, PAIR_VOCAB, 38).tolist() for i in range(3)]
    wanted = [made.generate(prompt, max_new_tokens=6) for prompt in prompts]
    serve = scheduler_of(made.loaded)
    beside = serve.machine.beside
    for pool in beside:
        pool.limit = 3
        assert not any(pool.holders)
    tasks = [serve.submit(Request(tuple(prompt), 6)) for prompt in prompts]
    most = 0
    while serve.step():
        most = max(most, sum(task.running for task in serve.running))
        assert all(len(pool.holders) - len(pool.free) <= 3 for pool in beside)
    assert most == 1
    for task, one in zip(tasks, wanted, strict=True):
        assert task.problem is None and task.said[-1][2].tokens == one.tokens  # type: ignore[union-attr]
    for pool in beside:
        pool.limit = 2
    with pytest.raises(CapacityError):
        serve.submit(Request(tuple(prompts[0]), 6))
