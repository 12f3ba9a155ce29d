"""The engine: requests of event loops and threads, served together, each as if it were alone."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from qkv.engine import AsyncStream, Counters, Engine, Handle, serving
from qkv.engine.generation import scheduler
from qkv.errors import EngineError
from qkv.model import Model
from qkv.runtime.built import missing
from tests.engine.pairs import bart
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
from tests.engine.tiny import save_llama, tiny


@pytest.fixture(params=RUNTIMES)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield from checked(request.param)


@pytest.fixture(params=BLOCKS)
def paged(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield from checked(request.param)


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


def test_who_is_set_aside_is_counted(paged: Model, gate: Gate) -> None:
    serve = scheduler(paged.loaded)
    for pool in serve.machine.own:
        pool.limit = 5
    named: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
    twin = tiny(runtime=paged.runtime, seed=1)
    with paged.engine() as engine:
        gate.open = False  # so that no one is done before the others have come
        handles = [engine.submit([1, 2, 3], **named)]
        with gate.held():
            handles += [engine.submit([1 + i, 2, 3], **named) for i in (1, 2)]
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
