"""The engine: requests of event loops and threads, served together, each as if it were alone."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from qkv.engine import AsyncStream, Completion, Counters, Engine, Handle, scheduler as scheduling, serving
from qkv.engine.generation import scheduler
from qkv.engine.scheduler import Scheduler
from qkv.errors import CapacityError, EngineError, RequestError
from qkv.families import Description
from qkv.model import Model
from qkv.runtime.built import missing
from qkv.runtime.interpreter import Rows
from tests.engine.pairs import bart
from tests.engine.test_generation import random_prompt
from tests.engine.tiny import model_of, save_llama, spec, tiny
from tests.support import random_model

RUNTIMES = ["numpy", "torch", *(["native"] if missing() is None else [])]
BLOCKS = RUNTIMES[1:]  # those whose cache is in blocks
LONG: dict[str, Any] = {"max_new_tokens": 20_000, "ignore_eos": True}  # never ends by itself here
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.3, "seed": 4, "n": 3},
    {"beams": 3, "n": 2},
    {"stop": "e", "top_logprobs": 2},
    {"speculate": "ngram"},
]


@pytest.fixture(params=RUNTIMES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield from checked(request.param)


@pytest.fixture(params=BLOCKS)
def paged(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield from checked(request.param)


def checked(runtime: str) -> Iterator[Model]:
    """A model; whatever a test did, nothing may be held of its cache."""
    made = tiny(runtime=runtime, seed=1)
    yield made
    assert_free(made)


def assert_free(model: Model) -> None:
    """Every block is free or cached, no text waits or runs, and the numbers of all sequences are spare."""
    serve = scheduler(model.loaded)
    assert serve.idle and sorted(serve._free) == list(range(serve._count))
    for pool in serve.machine.own:
        assert not any(pool.holders) and not any(pool.lengths)
        assert sorted([*pool.free, *pool.cached]) == list(range(len(pool.holders)))
    if not serve.machine.own:
        assert not serve.machine.kept.slots  # type: ignore[attr-defined]


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; the test's own time limit is the bound."""
    while not condition():
        time.sleep(0.001)


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def requests(count: int, new: int = 12) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of many lengths, some with one beginning, and all kinds of options."""
    lengths = (3, 40, 1, 70, 17)
    return [
        (
            random_prompt(lengths[i % 5], seed=i % 7),
            {"max_new_tokens": new, "ignore_eos": True, **OPTIONS[i % len(OPTIONS)]},
        )
        for i in range(count)
    ]


def assert_same(ours: Any, theirs: Any, exact: bool) -> None:
    ours, theirs = ([each] if isinstance(each, Completion) else each for each in (ours, theirs))
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
        if exact:
            assert (a.logprobs, a.top_logprobs, a.score) == (b.logprobs, b.top_logprobs, b.score)
        else:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


class Gate:
    """Lets a machine's steps through one by one, once it is closed."""

    def __init__(self, serve: Scheduler, monkeypatch: pytest.MonkeyPatch):
        self.steps: list[Rows] = []
        self.may, self.came = threading.Semaphore(0), threading.Semaphore(0)
        self.open = True
        inner = serve.machine.run

        def run(rows: Rows) -> np.ndarray:
            self.steps.append(rows)
            if not self.open:
                self.came.release()
                self.may.acquire()
            return inner(rows)

        monkeypatch.setattr(serve.machine, "run", run)

    def step(self) -> None:
        """Waits for a step, and lets it through."""
        self.came.acquire()
        self.may.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """While the block runs, the machine is in the middle of a step."""
        self.open = False
        self.came.acquire()
        try:
            yield
        finally:
            self.open = True
            self.may.release()


@pytest.fixture
def gate(paged: Model, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(scheduler(paged.loaded), monkeypatch)


# equality


def test_thirty_at_once_equal_each_alone(model: Model) -> None:
    """Bit for bit where the runtime is native."""
    asked, twin = requests(30, new=4 if model.runtime == "torch" else 12), tiny(runtime=model.runtime, seed=1)

    async def together() -> list[Any]:
        async with model.engine() as engine:
            return await asyncio.gather(*(engine.generate(prompt, **named) for prompt, named in asked))

    for (prompt, named), ours in zip(asked, asyncio.run(together()), strict=True):
        assert_same(ours, twin.generate(prompt, **named), exact=model.runtime == "native")


def test_they_run_in_the_same_steps(paged: Model, gate: Gate) -> None:
    """Four requests that come during a step are all in the next one."""
    with paged.engine() as engine:
        first = engine.submit([1, 2, 3], **LONG)
        with gate.held():
            others = [engine.submit(random_prompt(5, seed=i), max_new_tokens=3) for i in range(4)]
            at = len(gate.steps)
        for other in others:
            other.result()
        assert len(set(gate.steps[at].sequences.tolist())) == 5
        first.cancel()


def test_a_stream_gives_the_pieces_of_the_models_own(model: Model) -> None:
    """And with each piece, exactly what there is up to it, though the rest may be computed by then."""
    named: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "stop": "zzz", "top_logprobs": 2}
    wanted, states = model.stream("ABC hello", **named), []
    for piece in wanted:
        done = wanted.completion
        states.append((piece, done.text, len(done.tokens), len(done.top_logprobs), done.finish_reason))

    async def streamed() -> tuple[AsyncStream, list[Any]]:
        found = []
        async with model.engine() as engine:
            stream = engine.stream("ABC hello", **named)
            assert stream.completion.tokens == [] and stream.completion.prompt == wanted.completion.prompt
            async for piece in stream:
                await asyncio.sleep(0.002)
                done = stream.completion
                found.append((piece, done.text, len(done.tokens), len(done.top_logprobs), done.finish_reason))
            return stream, found

    stream, found = asyncio.run(streamed())
    assert found == states and len(states) > 5
    assert_same(stream.completion, wanted.completion, exact=model.runtime == "native")


def test_a_beam_search_streams_its_text_at_its_end(model: Model) -> None:
    async def streamed() -> list[str]:
        async with model.engine() as engine:
            return [piece async for piece in engine.stream([5, 6, 7], beams=3, max_new_tokens=8)]

    assert asyncio.run(streamed()) == list(model.stream([5, 6, 7], beams=3, max_new_tokens=8))


def test_two_event_loops_and_a_thread_share_an_engine(model: Model) -> None:
    asked, twin = requests(12, new=6), tiny(runtime=model.runtime, seed=1)
    with model.engine() as engine, ThreadPoolExecutor(3) as threads:

        async def gathered(mine: list[Any]) -> list[Any]:
            return await asyncio.gather(*(engine.generate(prompt, **named) for prompt, named in mine))

        loops = [threads.submit(lambda mine: asyncio.run(gathered(mine)), asked[i : i + 4]) for i in (0, 4)]
        plain = threads.submit(lambda: [engine.submit(p, **named).result() for p, named in asked[8:]])
        found = [*loops[0].result(), *loops[1].result(), *plain.result()]
    for (prompt, named), ours in zip(asked, found, strict=True):
        assert_same(ours, twin.generate(prompt, **named), exact=model.runtime == "native")


def test_the_model_is_used_by_other_threads_meanwhile(model: Model) -> None:
    asked, twin = requests(12, new=6), tiny(runtime=model.runtime, seed=1)
    with model.engine() as engine, ThreadPoolExecutor(3) as threads:
        own = [threads.submit(model.generate, prompt, **named) for prompt, named in asked[:6]]
        handles = [engine.submit(prompt, **named) for prompt, named in asked[6:]]
        found = [*(each.result() for each in own), *(handle.result() for handle in handles)]
    for (prompt, named), ours in zip(asked, found, strict=True):
        assert_same(ours, twin.generate(prompt, **named), exact=model.runtime == "native")


def test_an_encoder_decoder_is_served() -> None:
    for runtime in RUNTIMES:
        made = bart(runtime=runtime)[0]
        with made.engine() as engine:
            handles = [engine.submit([5, 6, 7 + i], max_new_tokens=9) for i in range(4)]
            for i, handle in enumerate(handles):
                assert_same(handle.result(), made.generate([5, 6, 7 + i], max_new_tokens=9), exact=False)


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


# the thread


def test_an_engine_without_work_takes_no_processor(model: Model) -> None:
    with model.engine() as engine:
        engine.submit([1, 2], max_new_tokens=4).result()
        gc.collect()
        before = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - before < 0.02
        assert not engine.last_progress.work


def test_progress_tells_stuck_from_idle(paged: Model, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(serving.time, "monotonic", lambda: now[0])
    with paged.engine() as engine:
        now[0] = 100.0
        assert engine.last_progress == (100.0, False)  # idle
        handle = engine.submit([1, 2, 3], **LONG)
        with gate.held():
            assert engine.last_progress == (0.0, True)  # counted from when there is work
            now[0] = 130.0
            assert engine.last_progress == (30.0, True)  # stuck
            steps = len(gate.steps)
        wait_for(lambda: len(gate.steps) > steps)
        assert engine.last_progress == (0.0, True)
        handle.cancel()
        assert engine.last_progress.work is False


def test_counters_say_what_there_is(paged: Model, gate: Gate) -> None:
    """A prompt of 40 tokens is two full blocks that others begin with, and a third."""
    serve = scheduler(paged.loaded)
    for pool in serve.machine.own:
        pool.limit = 10
    prompt = random_prompt(40)
    with paged.engine() as engine:
        assert engine.counters == Counters(0, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0)
        engine.submit(prompt, max_new_tokens=5, ignore_eos=True).result()
        assert engine.counters == Counters(0, 0, 1, 0, 0, 5, 8, 2, 0, 0, 0)
        gate.open = False
        second = engine.submit(prompt, max_new_tokens=5, ignore_eos=True)
        with gate.held():
            assert engine.counters == Counters(0, 1, 1, 0, 0, 5, 7, 0, 3, 0, 32)
        second.result()
        samples = engine.submit(prompt, max_new_tokens=3, ignore_eos=True, n=2, temperature=1.0)
        samples.result()
        assert engine.counters == Counters(0, 0, 3, 0, 0, 16, 8, 2, 0, 0, 64)
        engine.submit(prompt, max_new_tokens=3, ignore_eos=True, n=2, beams=2).result()
        assert engine.counters == Counters(0, 0, 4, 0, 0, 22, 8, 2, 0, 0, 96)


def test_who_is_set_aside_is_counted(paged: Model) -> None:
    serve = scheduler(paged.loaded)
    for pool in serve.machine.own:
        pool.limit = 5
    named: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    twin = tiny(runtime=paged.runtime, seed=1)
    with paged.engine() as engine:
        handles = [engine.submit([1 + i, 2, 3], **named) for i in range(3)]
        for i, handle in enumerate(handles):
            assert_same(handle.result(), twin.generate([1 + i, 2, 3], **named), paged.runtime == "native")
        assert engine.counters.preempted == serve.preempted > 0


def test_closing_cancels_what_runs_and_is_done_once(paged: Model, gate: Gate) -> None:
    async def closed() -> list[Any]:
        async with paged.engine() as engine:
            tasks = [asyncio.create_task(engine.generate([1 + i, 2], **LONG)) for i in range(3)]
            await wait_until(lambda: len(gate.steps) > 3)
        assert not engine._thread.is_alive()
        assert_free(paged)
        engine.close()
        assert engine.counters.cancelled == 3
        for refused in (engine.submit, engine.stream):
            with pytest.raises(EngineError, match="The engine is closed: make another"):
                refused([1, 2])
        with pytest.raises(EngineError, match="The engine is closed: make another"):
            await engine.generate([1, 2])
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(closed())
    assert [str(each) for each in found] == ["The engine is closed: make another."] * 3
    with paged.engine() as again:
        again.submit([1, 2], max_new_tokens=2).result()


def test_closing_leaves_the_requests_of_others(paged: Model) -> None:
    """Of the model, and of another engine of it."""
    stream, wanted = (
        paged.stream([5, 6], max_new_tokens=20, ignore_eos=True),
        tiny(runtime=paged.runtime, seed=1),
    )
    first = next(stream)
    other, engine = paged.engine(), paged.engine()
    kept, lost = other.submit([1, 2], max_new_tokens=30, ignore_eos=True), engine.submit([1, 2], **LONG)
    engine.close()
    with pytest.raises(EngineError):
        lost.result()
    assert_same(kept.result(), wanted.generate([1, 2], max_new_tokens=30, ignore_eos=True), exact=False)
    assert first + "".join(stream) == wanted.generate([5, 6], max_new_tokens=20, ignore_eos=True).text  # type: ignore[union-attr]
    other.close()


def test_a_forgotten_engine_ends_when_it_has_nothing_to_do(model: Model) -> None:
    engine = model.engine()
    thread, gone = engine._thread, weakref.ref(engine)
    handle = engine.submit([1, 2, 3], max_new_tokens=30, ignore_eos=True)
    del engine
    assert len(handle.result().tokens) == 30  # type: ignore[union-attr]
    del handle
    gc.collect()
    thread.join(60)
    assert gone() is None and not thread.is_alive()


def test_an_engine_at_work_does_not_keep_the_process(tmp_path: Path) -> None:
    """It ends between two steps, without a word."""
    save_llama(tmp_path, max_position_embeddings=10**6)
    runtime = "native" if missing() is None else "numpy"
    code = (
        f"import qkv; engine = qkv.load({str(tmp_path)!r}, runtime={runtime!r}).engine();"
        "handle = engine.submit([1, 2], max_new_tokens=10**5, ignore_eos=True); print(handle.done)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_loop_that_was_closed_disturbs_nobody(paged: Model, gate: Gate) -> None:
    """What waits there is told of nothing; it is freed when it is forgotten."""

    async def read(engine: Engine) -> None:
        async for _ in engine.stream([1, 2], **LONG):
            pass

    with paged.engine() as engine:
        loop = asyncio.new_event_loop()
        gate.open = False
        task = loop.create_task(read(engine))
        loop.run_until_complete(asyncio.sleep(0))
        with gate.held():
            loop.close()
        engine.submit([1, 2], max_new_tokens=9).result()
        assert engine.counters.running == 1
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        del task, loop
        gc.collect()
        wait_for(lambda: scheduler(paged.loaded).idle)
        assert (engine.counters.finished, engine.counters.cancelled) == (1, 1)


def test_a_cancel_that_meets_the_lock_is_not_left_behind(paged: Model, gate: Gate) -> None:
    """The scheduler's own promise: free after the step that runs, though nobody takes another."""
    serve = scheduler(paged.loaded)
    tasks = [serve.submit(paged.request([1 + i, 2], None, **LONG)) for i in range(2)]
    serve.step()
    gate.open = False
    thread = threading.Thread(target=serve.step)
    thread.start()
    gate.came.acquire()
    for task in tasks:
        serve.cancel(task)
    assert not any(task.finished for task in tasks)
    gate.open = True
    gate.may.release()
    thread.join()
    assert all(task.finished for task in tasks)
    assert_free(paged)


def test_a_handle_is_a_plain_object_for_threads(model: Model) -> None:
    with model.engine() as engine, ThreadPoolExecutor(4) as threads:
        handle: Handle = engine.submit([1, 2, 3], **LONG)
        waits = [threads.submit(handle.result) for _ in range(3)]
        threads.submit(handle.cancel)
        for each in waits:
            with pytest.raises(EngineError, match="was cancelled"):
                each.result()
