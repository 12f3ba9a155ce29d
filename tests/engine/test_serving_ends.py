"""Requests of an engine that are cancelled, left, refused, or broken off: no other is touched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from qkv.engine import Counters, Engine, scheduler as scheduling, serving
from qkv.engine.generation import scheduler
from qkv.errors import CapacityError, EngineError, RequestError
from qkv.families import Description
from qkv.model import Model
from qkv.runtime.interpreter import Rows
from tests.engine.served import (
    BLOCKS,
    LONG,
    RUNTIMES,
    Gate,
    assert_free,
    assert_same,
    checked,
    requests,
    wait_for,
    wait_until,
)
from tests.engine.test_generation import random_prompt
from tests.engine.tiny import model_of, spec, tiny
from tests.support import random_model


@pytest.fixture(params=RUNTIMES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield from checked(request.param)


@pytest.fixture(params=BLOCKS)
def paged(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield from checked(request.param)


@pytest.fixture
def gate(paged: Model, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(scheduler(paged.loaded), monkeypatch)


# ends


@pytest.mark.parametrize("seed", range(2))
def test_cancels_at_random_moments_free_all_and_touch_no_other(model: Model, seed: int) -> None:
    """Prompts are read in steps of 16, so some are cancelled within theirs, and others while they wait."""
    new = 6 if model.runtime == "torch" else 20
    random, asked, twin = Random(seed), requests(24, new), tiny(runtime=model.runtime, seed=1)
    patch = pytest.MonkeyPatch()
    patch.setattr(scheduling, "CHUNK", 16)
    patch.setattr(scheduling, "MOST_ROWS", 12)

    async def some(engine: Engine) -> list[Any]:
        tasks = [asyncio.create_task(engine.generate(prompt, **named)) for prompt, named in asked]
        for task in random.sample(tasks, 12):
            await asyncio.sleep(random.random() * 0.01)
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    with model.engine() as engine:
        found = asyncio.run(some(engine))
        counted = engine.counters
    patch.undo()
    assert_free(model)
    cancelled = sum(isinstance(each, asyncio.CancelledError) for each in found)
    assert counted.finished >= 24 - cancelled and counted.running == counted.waiting == counted.failed == 0
    for (prompt, named), ours in zip(asked, found, strict=True):
        if not isinstance(ours, asyncio.CancelledError):
            assert_same(ours, twin.generate(prompt, **named), exact=model.runtime == "native")


def test_a_cancelled_task_frees_its_blocks_with_the_step_that_runs(paged: Model, gate: Gate) -> None:
    async def cancelled(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate([1, 2, 3], **LONG))
        await wait_until(lambda: len(gate.steps) > 5)
        with gate.held():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            steps = len(gate.steps)
        await wait_until(lambda: scheduler(paged.loaded).idle)
        assert len(gate.steps) == steps
        assert_free(paged)
        assert engine.counters.cancelled == 1

    with paged.engine() as engine:
        asyncio.run(cancelled(engine))


def test_a_request_is_cancelled_in_the_middle_of_its_prompt_and_while_it_waits(
    paged: Model, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "CHUNK", 16)
    monkeypatch.setattr(scheduling, "MOST_ROWS", 1)
    serve = scheduler(paged.loaded)
    with paged.engine() as engine:
        gate.open = False
        first = engine.submit(random_prompt(300), max_new_tokens=2)
        waits = engine.submit([1, 2, 3], max_new_tokens=2)
        gate.step()
        with gate.held():
            assert (engine.counters.running, engine.counters.waiting, engine.counters.tokens) == (1, 1, 0)
            assert [len(rows.tokens) for rows in gate.steps] == [16, 16]
            first.cancel(), waits.cancel()
        wait_for(lambda: serve.idle)
        assert len(gate.steps) == 2
        assert_free(paged)


def test_a_stream_that_is_left_frees_its_blocks(paged: Model) -> None:
    """By break, by an error in the loop, by close, by the end of its block, by cancelling a wait."""
    serve = scheduler(paged.loaded)

    async def left(engine: Engine) -> None:
        stream = engine.stream([1, 2, 3], **LONG)
        async for _ in stream:
            break
        await wait_until(lambda: serve.idle)
        assert 0 < len(stream.completion.tokens) == len(stream.completion.logprobs) < 20
        assert stream.completion.finish_reason is None
        assert [piece async for piece in stream] == []

        with pytest.raises(ZeroDivisionError):
            async for _ in engine.stream([1, 2, 3], **LONG):
                _ = 1 / 0
        await wait_until(lambda: serve.idle)

        async with engine.stream([1, 2, 3], **LONG) as stream:
            assert not serve.idle and await anext(stream)
        await wait_until(lambda: serve.idle)

        stream = engine.stream([1, 2, 3], **LONG)
        await anext(stream)
        stream.close()
        await wait_until(lambda: serve.idle)
        assert engine.counters.cancelled == 4 and engine.counters.finished == 0

    with paged.engine() as engine:
        asyncio.run(left(engine))


def test_a_wait_for_a_piece_that_is_cancelled_ends_the_stream(paged: Model, gate: Gate) -> None:
    """Though somebody has the stream still."""

    async def cancelled(engine: Engine) -> None:
        stream = engine.stream([1, 2, 3], **LONG)
        gate.open = False
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with gate.held():
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await wait_until(lambda: scheduler(paged.loaded).idle)
        assert (engine.counters.cancelled, len(gate.steps)) == (1, 1)
        assert [piece async for piece in stream] == []

    with paged.engine() as engine:
        asyncio.run(cancelled(engine))


def test_a_stream_that_is_not_iterated_takes_nothing(model: Model) -> None:
    with model.engine() as engine:
        engine.stream([1, 2, 3], **LONG)
        assert scheduler(model.loaded).idle and not engine.last_progress.work


def test_what_comes_after_a_cancel_is_nothing(paged: Model, gate: Gate) -> None:
    """The step that was running when it was cancelled makes a token that nobody is told of."""
    with paged.engine() as engine:
        handle = engine.submit([1, 2, 3], **LONG)
        wait_for(lambda: len(gate.steps) > 2)
        with gate.held():
            made = engine.counters.tokens
            handle.cancel()
            with pytest.raises(EngineError, match="This request was cancelled"):
                handle.result(0)
        wait_for(lambda: scheduler(paged.loaded).idle)
        handle.cancel()
        counted = engine.counters
        assert (counted.tokens, counted.cancelled, counted.finished) == (made, 1, 0)
        done = engine.submit([1, 2, 3], max_new_tokens=2)
        before = done.result()
        done.cancel()
        assert done.result() is before and engine.counters.cancelled == 1


def test_a_result_is_waited_for_as_long_as_is_said(paged: Model, gate: Gate) -> None:
    with paged.engine() as engine:
        gate.open = False
        handle = engine.submit([1, 2, 3], max_new_tokens=5, ignore_eos=True)
        with gate.held():
            with pytest.raises(TimeoutError, match=r"has not ended within 0.01 seconds"):
                handle.result(0.01)
            assert not handle.done
        done: Any = handle.result(60)
        assert len(done.tokens) == 5 and handle.done


# errors

WRONG: list[tuple[Any, dict[str, Any]]] = [
    ([], {}),
    ([1, 999_999], {}),
    (object(), {}),
    (np.array(5), {}),
    ([[1], [2]], {}),
    ([1], {"max_new_tokens": 0}),
    ([1], {"temprature": 1.0}),
    ([1], {"n": 2, "temperature": 1.0}),
]


@pytest.mark.parametrize(("prompt", "named"), WRONG)
def test_what_cannot_be_served_is_refused_in_the_caller(
    model: Model, monkeypatch: pytest.MonkeyPatch, prompt: Any, named: dict[str, Any]
) -> None:
    """Before anything runs, in the words of the model's own stream, by all ways, read aside or not."""
    with pytest.raises(RequestError) as wanted:
        model.stream(prompt, **named)
    monkeypatch.setattr(scheduler(model.loaded), "submit", lambda *_, **__: pytest.fail("it was begun"))

    async def refused(engine: Engine) -> list[RequestError]:
        found = [error(lambda: engine.stream(prompt, **named))]
        if "n" not in named:
            found.append(error(lambda: engine.submit(prompt, **named)))
            for long in (4096, -1):
                monkeypatch.setattr(serving, "LONG", long)
                found += await asyncio.gather(engine.generate(prompt, **named), return_exceptions=True)
            with pytest.raises(RequestError) as late:
                await anext(engine.stream(prompt, **named))
            found.append(late.value)
        return found

    with model.engine() as engine:
        found = asyncio.run(refused(engine))
        assert {str(each) for each in found} == {str(wanted.value)} and len(found) in (1, 5)
        assert engine.counters == Counters(0, 0, 0, 0, 0, 0, engine.counters.free, 0, 0, 0, 0)


def error(call: Callable[[], Any]) -> RequestError:
    with pytest.raises(RequestError) as found:
        call()
    return found.value


def test_what_can_never_fit_is_refused_and_the_others_go_on(paged: Model) -> None:
    serve = scheduler(paged.loaded)
    for pool in serve.machine.own:
        pool.limit = 4
    with paged.engine() as engine:
        first = engine.submit([1, 2, 3], max_new_tokens=30, ignore_eos=True)
        for begin in (engine.submit, engine.stream):
            with pytest.raises(CapacityError, match="A cache of 65 tokens needs"):
                begin([1, 2], max_new_tokens=64, ignore_eos=True)
        assert len(first.result().tokens) == 30  # type: ignore[union-attr]
        counted = engine.counters
        assert counted.free + counted.cached == 4 * len(serve.machine.own) and counted.held == 0


def test_a_long_text_is_read_off_the_event_loop(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "LONG", 20)
    threads: list[bool] = []
    encode = model.encode

    def watched(text: str) -> list[int]:
        threads.append(threading.current_thread() is threading.main_thread())
        return encode(text)

    monkeypatch.setattr(model, "encode", watched)

    async def both(engine: Engine) -> None:
        await engine.generate("a" * 20, max_new_tokens=1)
        await engine.generate("a" * 21, max_new_tokens=1)
        async for _ in engine.stream("a" * 21, max_new_tokens=1):
            pass

    with model.engine() as engine:
        asyncio.run(both(engine))
    assert threads == [True, False, False]


def test_a_request_that_is_cancelled_while_its_text_is_read_never_begins(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "LONG", 0)
    reads, may = threading.Event(), threading.Event()
    encode = model.encode

    def slow(text: str) -> list[int]:
        reads.set()
        may.wait()
        return encode(text)

    monkeypatch.setattr(model, "encode", slow)
    begun = list[Any]()
    monkeypatch.setattr(scheduler(model.loaded), "submit", lambda *given, **_: begun.append(given))

    async def cancelled(engine: Engine) -> None:
        task = asyncio.create_task(engine.generate("hello", **LONG))
        await asyncio.to_thread(reads.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may.set()  # the thread is waited for with the loop's end

    with model.engine() as engine:
        asyncio.run(cancelled(engine))
        assert begun == [] and not engine.last_progress.work


def test_a_step_that_fails_ends_those_that_ran_and_no_others(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "MOST_ROWS", 2)
    machine = scheduler(model.loaded).machine
    inner, came, steps = machine.run, threading.Event(), list[int]()

    def fails(rows: Rows) -> np.ndarray:
        came.wait()  # for all requests
        steps.append(len(rows.tokens))
        if len(steps) == 4:
            raise MemoryError("no room")
        return inner(rows)

    monkeypatch.setattr(machine, "run", fails)
    named: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}

    async def all_of(engine: Engine) -> list[Any]:
        tasks = [asyncio.create_task(engine.generate([1 + i, 2], **named)) for i in range(5)]
        await wait_until(lambda: engine.counters.running + engine.counters.waiting == 5)
        came.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*found, [piece async for piece in engine.stream([1, 2], **named)]]

    with model.engine() as engine:
        *found, pieces = asyncio.run(all_of(engine))
        counted = engine.counters
    monkeypatch.undo()
    failed = [isinstance(each, MemoryError) for each in found]
    assert failed in ([True, True, False, False, False], [True, False, False, False, False])
    assert (counted.failed, counted.finished, counted.cancelled) == (sum(failed), 6 - sum(failed), 0)
    for i, ours in enumerate(found):
        if not failed[i]:
            wanted = model.generate([1 + i, 2], **named)
            assert_same(ours, wanted, exact=model.runtime == "native")
    assert pieces == list(model.stream([1, 2], **named))


@pytest.mark.parametrize("place", ["_choose", "_computed", "_answer"])
def test_a_step_that_fails_anywhere_leaves_an_engine_that_serves(
    model: Model, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Not only in the machine; a stream gives what was made, then the error."""
    serve = scheduler(model.loaded)

    def fails(*_: Any) -> Any:
        raise ArithmeticError(place)

    async def both(engine: Engine) -> list[str]:
        stream, pieces = engine.stream([1, 2], **LONG), list[str]()
        with pytest.raises(ArithmeticError, match=place):
            async for piece in stream:
                pieces.append(piece)
                monkeypatch.setattr(serve, place, fails)
        monkeypatch.undo()
        assert stream.completion.text == "".join(pieces)
        await engine.generate([1, 2], max_new_tokens=4)
        return pieces

    with model.engine() as engine:
        assert asyncio.run(both(engine))
        assert (engine.counters.failed, engine.counters.finished) == (1, 1)


def test_what_interrupts_a_thread_is_an_error_to_the_others(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No KeyboardInterrupt reaches an event loop that nobody interrupted."""
    machine = scheduler(model.loaded).machine

    def interrupted(rows: Rows) -> np.ndarray:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "run", interrupted)
    with model.engine() as engine:
        with pytest.raises(EngineError, match=r"was broken off \(KeyboardInterrupt\)"):
            engine.submit([1, 2], max_new_tokens=4).result()
        monkeypatch.undo()
        engine.submit([1, 2], max_new_tokens=4).result()


def test_numbers_that_fail_end_one_request() -> None:
    """Token 200 stands for no numbers; texts without it are not touched, nor those that come after."""
    described = spec()
    values = {name: p.detach().numpy().copy() for name, p in random_model(described, 1).named_parameters()}
    values["decoder.embedding.weight"][200] = np.nan
    named: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "logit_bias": {200: -100.0}}
    for runtime in RUNTIMES:
        model = model_of(Description(described, {name: name for name in values}, None), values, runtime)
        alone = model.generate([1, 2], **named)
        with model.engine() as engine:
            good, bad = engine.submit([1, 2], **named), engine.submit([1, 200], **named)
            with pytest.raises(RequestError, match="The model's logits are not numbers"):
                bad.result()
            stream = engine.stream([1, 200], **named)
            with pytest.raises(RequestError, match="The model's logits are not numbers"):
                asyncio.run(anext(stream))  # type: ignore[arg-type]
            again = engine.submit([1, 2], **named)
            for each in (good, again):
                assert_same(each.result(), alone, exact=runtime == "native")
            assert (engine.counters.failed, engine.counters.finished) == (2, 2)
        assert_free(model)
