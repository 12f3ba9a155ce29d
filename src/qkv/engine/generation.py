"""Requests to texts, as they are made: for those who wait for them in the same thread."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import accumulate
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from qkv.engine.drafting import Drafted
from qkv.engine.limits import Budget
from qkv.engine.requests import Completion, Request, check
from qkv.engine.scheduler import Scheduler
from qkv.engine.speculation import NGrams
from qkv.engine.tasks import Speculation, Task
from qkv.errors import RequestError
from qkv.loading import Loaded
from qkv.runtime.choice import require_torch
from qkv.runtime.compression import Sinks

if TYPE_CHECKING:
    from qkv.nn import Tap

Progress = Callable[[int, int], None]
_making = Lock()  # a model has one scheduler, whatever threads ask for it first
Watch = Callable[[], "Tap | None"]  # the tap that reads and replaces what flows now, if there is one


def stream(
    loaded: Loaded,
    requests: Sequence[Request],
    tap: Watch = lambda: None,
    progress: Progress | None = None,
) -> Generator[tuple[int, str, Completion], None, None]:
    """Serves the requests together; gives (which answer, its new text, all of it so far) as they come.

    Answers are numbered through all requests, `n` numbers each. All requests are checked at once,
    before anything runs. A result does not depend on what else runs. `tap` is asked at every pass.
    Closing the generator frees what it holds.
    """
    brought = prepared(loaded, requests)
    serving = scheduler(loaded, tap, any(brought))
    for request in requests:
        serving.check(request)
    return _served(serving, list(zip(requests, brought, strict=True)), tap, progress)


def prepared(loaded: Loaded, requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Checks requests; what each brings beside its tokens. Raises RequestError before anything runs."""
    for request in requests:
        check(request, loaded)
    if loaded.spec.features is None and all(request.features is None for request in requests):
        return [{} for _ in requests]
    require_torch("Reading images or audio")
    from qkv.engine import features

    for request in requests:
        features.check(request, loaded)
    return [features.placed(request, loaded) for request in requests]


def submit(
    serving: Scheduler,
    request: Request,
    brought: dict[str, Any],
    shares: bool,
    heard: Callable[[Task], None] | None = None,
) -> Task:
    return serving.submit(request, shares=shares, guesser=_guesser(request), heard=heard, **brought)


def _guesser(request: Request) -> Callable[[], Speculation] | None:
    if request.speculate is None:
        return None
    if isinstance(request.speculate, Loaded):
        return partial(Drafted, scheduler(request.speculate))
    return NGrams


def scheduler(loaded: Loaded, tap: Watch = lambda: None, beside: bool = False) -> Scheduler:
    """The one that serves this model, with its cache. What is tapped, or beside tokens, is torch's."""
    with _making:
        if loaded.choice.runtime == "torch" or beside or tap() is not None:
            return _torch(loaded, tap)
        if "program" not in loaded.serving:
            loaded.serving["program"] = Scheduler(
                loaded, loaded.machine, Budget(loaded.cache, loaded.context)
            )
        found: Scheduler = loaded.serving["program"]
        return found


def _torch(loaded: Loaded, tap: Watch) -> Scheduler:
    from qkv.runtime.torch_machine import TorchMachine

    found: Scheduler | None = loaded.serving.get("torch")
    if found is None or not cast(TorchMachine, found.machine).current(loaded.model):
        policy = loaded.compress
        weighing = None if policy is None or isinstance(policy, Sinks) else policy
        machine = TorchMachine(loaded.model, policy=weighing)
        budget = Budget(loaded.cache, loaded.context, str(machine.device))
        found = loaded.serving["torch"] = Scheduler(loaded, machine, budget)
    cast(TorchMachine, found.machine).watch = tap
    return found


def _served(
    serving: Scheduler,
    asked: list[tuple[Request, dict[str, Any]]],
    tap: Watch,
    progress: Progress | None,
) -> Generator[tuple[int, str, Completion], None, None]:
    tasks: list[Task] = []
    try:
        tasks += (submit(serving, request, brought, tap() is None) for request, brought in asked)
        numbers = list(accumulate((task.request.n for task in tasks), initial=0))
        told = 0
        while True:
            for task, number in zip(tasks, numbers, strict=False):
                while task.said:
                    which, text, completion = task.said.popleft()
                    yield number + which, text, completion
                if task.problem is not None:
                    raise task.problem
            if all(task.finished for task in tasks):
                return
            if tap() is not None and not hasattr(serving.machine, "watch"):
                # programs have no points to tap: what was set now would see nothing
                raise RequestError(
                    "A tap was set after this text was begun without one: set it first, or load the model "
                    'with runtime="torch", whose passes can be tapped at any time.'
                )
            serving.step()
            told = _tell(tasks, progress, told)
    finally:
        for task in tasks:
            serving.cancel(task)


def _tell(tasks: list[Task], progress: Progress | None, told: int) -> int:
    """Says how many tokens of all prompts were read, where there are more than were told of."""
    sizes = [len(task.request.prompt) for task in tasks]
    read = sum(size if task.answered else task.read for task, size in zip(tasks, sizes, strict=True))
    if progress is not None and read > told:
        progress(read, sum(sizes))
    return max(read, told)
