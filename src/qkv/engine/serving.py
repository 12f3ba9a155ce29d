"""Requests of event loops and threads, served together by one thread, which sleeps when there are none."""

from __future__ import annotations

import asyncio
import atexit
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, RLock, Thread, current_thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Unpack, get_args

from qkv.engine.constraints import Kind
from qkv.engine.generation import Watch, prepared, scheduler, submit
from qkv.engine.requests import ONE_ANSWER, Completion, Options, Request
from qkv.engine.scheduler import Scheduler
from qkv.engine.tasks import Task
from qkv.errors import EngineError, RequestError
from qkv.loading import Loaded
from qkv.runtime.blocks import Pool

if TYPE_CHECKING:
    import torch

LONG = 4096  # characters or tokens of a prompt that take an event loop's time: some milliseconds
PAUSE = 0.01  # seconds after a step that did nothing though there was work
LAST = 30.0  # seconds that the end of the process waits for the step that runs; breaking it off aborts

CLOSED, CANCELLED = "The engine is closed: make another.", "This request was cancelled."

# One for all engines, held for moments. The garbage collector may end a request of one engine in the
# middle of a call of another in the same thread: with a lock for each, two threads could then wait for
# each other. A scheduler's lock may be held when this is taken, and is never waited for under it.
_state = RLock()


class Ask(Protocol):
    """What makes requests: `qkv.Model.request`."""

    def __call__(self, prompt: Any, features: Any = None, **options: Unpack[Options]) -> Request: ...


class Progress(NamedTuple):
    """`seconds` since a step last finished, or since there is work, where that is later.

    With `work` and more seconds than any step takes, an engine is stuck; without work it is idle.
    """

    seconds: float
    work: bool


@dataclass(frozen=True)
class Counters:
    """What an engine has done and holds. Requests are its own; the cache and the last two are the model's.

    Of the blocks, those are `free` that can be taken and hold nothing, of a cache with a limit those
    too that were never made; `cached` are those of earlier texts, which can be taken as well; `held`
    those of texts in the making. `reused` counts tokens that were taken from earlier beginnings.
    """

    waiting: int
    running: int
    finished: int
    cancelled: int
    failed: int
    tokens: int
    free: int
    cached: int
    held: int
    preempted: int
    reused: int


class _Work:
    """What an engine's thread works on. It does not know the engine: one that is forgotten can end."""

    def __init__(self) -> None:
        self.live: dict[Handle, Scheduler] = {}
        self.wake = Condition(_state)
        self.closed = False
        self.ended: Counter[str] = Counter()
        self.tokens = 0
        self.progress = time.monotonic()

    def run(self) -> None:
        while True:
            with _state:
                while not (self.live or self.closed):
                    self.wake.wait()
                if self.closed:
                    return
                serving = set(self.live.values())  # several, where images or a tap need torch's
            ran = [self.step(each) for each in serving]
            if not any(ran):
                with _state:
                    if self.live and not self.closed:  # whatever is wrong, it does not take the processor
                        self.wake.wait(PAUSE)

    def step(self, serving: Scheduler) -> bool:
        try:
            ran = serving.step()
        except BaseException:  # those that ran have been told; others are served
            return False
        if ran:
            self.progress = time.monotonic()
        return ran

    def begin(self, handle: Handle, serving: Scheduler) -> None:
        if not self.live:
            self.progress = time.monotonic()
        self.live[handle] = serving
        self.wake.notify_all()

    def close(self) -> None:
        """Ends what there is, and the thread after the step that runs."""
        with _state:
            self.closed = True
            live = list(self.live)
            self.wake.notify_all()
        for handle in live:
            handle._stop(EngineError(CLOSED))


_running: weakref.WeakKeyDictionary[_Work, Thread] = weakref.WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    """A process does not end in the middle of a step, as far as that does not take long."""
    for work, thread in list(_running.items()):
        work.close()
        thread.join(LAST)


class Handle:
    """A request on its way. Any thread may wait for what comes of it, or cancel it."""

    def __init__(self, engine: Engine, streams: bool = False):
        self._engine = engine  # which is not forgotten while somebody has a request of it
        self._work, self._streams = engine._work, streams
        self._task: Task | None = None
        self._serving: Scheduler | None = None
        self._changed = Condition(_state)
        self._waiters: list[asyncio.Future[None]] = []
        self._found: dict[int, Completion] = {}
        self._made: dict[int, int] = {}  # tokens of each answer
        self._pieces: deque[_Piece] = deque()
        self._single = True
        self._done = False
        self._problem: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._done

    def result(self, timeout: float | None = None) -> Completion | list[Completion]:
        """Waits for the answer, or for the list of `n` of them, as `qkv.Model.generate` gives them.

        Raises what ended the request, EngineError where it was cancelled or its engine closed, and
        TimeoutError where it takes more than `timeout` seconds; it then goes on.
        """
        with _state:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimeoutError(f"The request has not ended within {timeout:g} seconds.")
            if self._problem is not None:
                _raise(self._problem)
            each = [self._found[which] for which in sorted(self._found)]
        if not self._single:
            return each
        if each[0].error is not None:
            raise RequestError(each[0].error)
        return each[0]

    def cancel(self) -> None:
        """Ends it; its memory is free at once, or after the step that runs. What has ended is not touched."""
        self._stop(EngineError(CANCELLED))

    def _stop(self, problem: EngineError) -> None:
        with _state:
            task, serving = self._task, self._serving
            self._end("cancelled", problem)
        if task is not None and serving is not None:
            serving.cancel(task)

    def _begun(self, serving: Scheduler, task: Task) -> None:
        """Takes a task that waits, runs, or has ended by now."""
        with _state:
            if self._work.closed:
                self._end("cancelled", EngineError(CLOSED))
            if not self._done:
                self._task, self._serving = task, serving
                self._work.begin(self, serving)
                return
        serving.cancel(task)

    def _heard(self, task: Task) -> None:
        """Takes what its task has said. The thread that steps calls it, or one that cancels."""
        with _state:
            if self._done:  # was cancelled, and this comes late
                return
            while task.said:
                which, text, completion = task.said.popleft()
                count = len(completion.tokens)
                self._work.tokens += count - self._made.get(which, 0)
                self._found[which], self._made[which] = completion, count
                if self._streams:
                    self._pieces.append(_Piece(text, count, completion.finish_reason is not None))
            if task.finished:
                self._finish(task)
            elif self._pieces:
                self._tell()

    def _finish(self, task: Task) -> None:
        if task.problem is not None:
            self._end("failed", task.problem)
        elif not task.answers.finished:
            self._end("cancelled", EngineError(CANCELLED))
        else:
            failed = all(completion.error is not None for completion in self._found.values())
            self._end("failed" if failed else "finished")

    def _end(self, how: str, problem: BaseException | None = None) -> None:
        if self._done:
            return
        self._done, self._problem = True, problem
        if self._task is not None or how != "cancelled":  # what never began is not counted
            self._work.ended[how] += 1
        self._task = self._serving = None
        self._work.live.pop(self, None)
        self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with suppress(RuntimeError):  # its loop was closed: nobody waits there
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)

    async def _wait(self) -> None:
        """Until it has ended or, of a stream, there is a piece."""
        while True:
            with _state:
                if self._done or self._pieces:
                    return
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            await waiter


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _raise(problem: BaseException) -> None:
    if isinstance(problem, Exception):
        raise problem
    # a key that interrupts the thread that steps is no reason for others to end
    raise EngineError(f"The step that computed this was broken off ({type(problem).__name__}).") from problem


class _Piece(NamedTuple):
    """New text; how many tokens there are up to it; whether it is the last."""

    text: str
    tokens: int
    last: bool


@dataclass(frozen=True)
class _Asked:
    """A request that was checked, and what it brings beside its tokens."""

    request: Request
    brought: dict[str, Any]


class Engine:
    """Serves the requests of any number of event loops and threads, all that there are in each step.

        async with model.engine() as engine:
            first, second = await asyncio.gather(engine.generate("One"), engine.generate("Two"))
            async for piece in engine.stream("Three", max_new_tokens=20): ...

    `with` and `submit` are for threads. A result does not depend on what else runs. The thread that
    serves takes no time while there is nothing to do, and ends with `close`, with the process, or
    when an engine is forgotten and has nothing to do. What cannot be served is refused before
    anything runs, in the caller; a step that fails ends those requests that ran, and no others.
    """

    def __init__(self, loaded: Loaded, ask: Ask, tap: Watch = lambda: None):
        self._loaded, self._ask, self._tap = loaded, ask, tap
        self._work = _Work()
        self._thread = Thread(target=self._work.run, name="qkv engine", daemon=True)
        _running[self._work] = self._thread
        weakref.finalize(self, self._work.close).atexit = False
        self._thread.start()

    def submit(
        self, prompt: Any, *, features: torch.Tensor | None = None, **options: Unpack[Options]
    ) -> Handle:
        """Begins a request, of one prompt with the options of `qkv.Model.generate`, and does not wait.

        Raises as that does, and EngineError where the engine is closed.
        """
        handle = Handle(self)
        self._begin(handle, self._checked(prompt, features, options))
        return handle

    async def generate(
        self, prompt: Any, *, features: torch.Tensor | None = None, **options: Unpack[Options]
    ) -> Completion | list[Completion]:
        """The answer to one prompt, or with `n` above 1 the list of them: see `qkv.Model.generate`.

        Cancelling the task that waits frees the request's memory.
        """
        handle = Handle(self)
        try:
            checked = partial(self._checked, prompt, features, options)
            await _do(lambda: self._begin(handle, checked()), _slow(prompt, features, options))
            await handle._wait()
            return handle.result()
        finally:
            handle.cancel()

    def stream(
        self, prompt: Any, *, features: torch.Tensor | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """One answer, piece by piece: see `AsyncStream`. Raises as `qkv.Model.stream` does.

        A long prompt, features and a constraint take time that is not the event loop's: requests with
        them are checked with the first piece, or by `AsyncStream.start`.
        """
        if options.get("n") not in (None, 1):
            raise RequestError(ONE_ANSWER)
        options["n"] = 1
        checked = partial(self._checked, prompt, features, options)
        return AsyncStream(self, checked, _slow(prompt, features, options))

    @property
    def last_progress(self) -> Progress:
        """For a check whether the engine is ready: whether it gets on."""
        with _state:
            return Progress(time.monotonic() - self._work.progress, bool(self._work.live))

    @property
    def counters(self) -> Counters:
        """Numbers as they are now. While a step runs, those of the cache may be between two states."""
        serving = [each for each in list(self._loaded.serving.values()) if isinstance(each, Scheduler)]
        blocks = [_blocks(pool) for each in serving for pool in each.machine.own]
        work = self._work
        with _state:
            tasks = [handle._task for handle in work.live]
            running = sum(task is not None and task.running for task in tasks)
            return Counters(
                waiting=len(tasks) - running,
                running=running,
                finished=work.ended["finished"],
                cancelled=work.ended["cancelled"],
                failed=work.ended["failed"],
                tokens=work.tokens,
                free=sum(free for free, _, _ in blocks),
                cached=sum(cached for _, cached, _ in blocks),
                held=sum(held for _, _, held in blocks),
                preempted=sum(each.preempted for each in serving),
                reused=sum(each.reused for each in serving),
            )

    def close(self) -> None:
        """Cancels what there is, and waits for the step that runs. Closing twice does nothing more."""
        self._work.close()
        if self._thread is not current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(self, *problem: object) -> None:
        self._work.close()
        await asyncio.to_thread(self.close)  # a step may take its time

    def _checked(self, prompt: Any, features: Any, options: Options) -> _Asked:
        if self._work.closed:
            raise EngineError(CLOSED)
        request = self._ask(prompt, features, **options)
        brought = prepared(self._loaded, [request])[0]
        scheduler(self._loaded, self._tap, bool(brought)).check(request)
        return _Asked(request, brought)

    def _begin(self, handle: Handle, asked: _Asked) -> None:
        if handle.done:  # was cancelled while the prompt was read
            return
        handle._single = asked.request.n == 1
        serving = scheduler(self._loaded, self._tap, bool(asked.brought))
        shares = self._tap() is None
        handle._begun(serving, submit(serving, asked.request, asked.brought, shares, handle._heard))


def _blocks(pool: Pool) -> tuple[int, int, int]:
    """How many are free, cached and held."""
    made, cached, free = len(pool.holders), len(pool.cached), len(pool.free)
    return free if pool.limit is None else free + pool.limit - made, cached, made - cached - free


def _slow(prompt: Any, features: Any, options: Options) -> bool:
    """Whether a request takes more than a moment to check and begin."""
    beside = [features, *(options.get(kind) for kind in get_args(Kind))]  # a constraint is compiled
    try:
        return any(each is not None for each in beside) or len(prompt) > LONG
    except TypeError:  # no prompt: refused where it is read
        return False


async def _do(begin: Callable[[], None], aside: bool) -> None:
    """At once where that is a matter of a moment, else in a thread."""
    if aside:
        await asyncio.to_thread(begin)
    else:
        begin()


class AsyncStream:
    """Text as it is made: iterate for it, then look at `completion`, which holds what there is so far.

    The request begins with `start`, or where the first piece is asked for. It ends, and its memory is
    free, when the `async for` is left, in whatever way, when a wait for a piece is cancelled, by
    `close`, and at the end of `async with`. Raises what ended the request.
    """

    def __init__(self, engine: Engine, checked: Callable[[], _Asked], aside: bool):
        self._handle = Handle(engine, streams=True)
        self._engine, self._checked, self._aside = engine, checked, aside
        self._asked = None if aside else checked()
        self._started = self._closed = False
        self._text, self._count, self._last = "", 0, False

    @property
    def completion(self) -> Completion:
        """What there is with the last piece that was given."""
        done = self._handle._found.get(0)
        if done is None:
            return Completion(() if self._asked is None else self._asked.request.prompt)
        if self._last:
            return done
        count = self._count  # what is computed meanwhile is not given yet
        return replace(
            done,
            text=self._text,
            tokens=done.tokens[:count],
            logprobs=done.logprobs[:count],
            top_logprobs=done.top_logprobs[:count],
            finish_reason=None,
            error=None,
        )

    async def start(self) -> AsyncStream:
        """Checks the request, where that was put off, and lets it begin."""
        if not self._started:
            self._started = True
            try:
                await _do(self._begin, self._aside)
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """Makes no more, and frees the memory that this took."""
        self._started = self._closed = True
        self._handle.cancel()

    async def aclose(self) -> None:
        self.close()

    async def __anext__(self) -> str:
        await self.start()
        try:
            while not self._closed:
                await self._handle._wait()
                piece = self._next()
                if piece is None:
                    break
                if piece.text:
                    return piece.text
        except BaseException:
            self.close()
            raise
        if self.completion.error is not None:
            raise RequestError(self.completion.error)
        raise StopAsyncIteration

    def __aiter__(self) -> _Walk:
        return _Walk(self)

    async def __aenter__(self) -> AsyncStream:
        return await self.start()

    async def __aexit__(self, *problem: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._handle.cancel()

    def _begin(self) -> None:
        self._asked = self._asked or self._checked()
        self._engine._begin(self._handle, self._asked)

    def _next(self) -> _Piece | None:
        """The next piece; None after the last. Raises what ended the request before that."""
        handle = self._handle
        with _state:
            if handle._pieces:
                piece = handle._pieces.popleft()
                self._text += piece.text
                self._count, self._last = piece.tokens, piece.last
                return piece
            if handle._done and handle._problem is not None and not self._closed:
                _raise(handle._problem)
            return None


class _Walk:
    """An iteration of a stream: when the loop is left, nobody holds it, and the stream is closed."""

    def __init__(self, stream: AsyncStream):
        self._stream = stream

    def __aiter__(self) -> _Walk:
        return self

    async def __anext__(self) -> str:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        self._stream.close()
