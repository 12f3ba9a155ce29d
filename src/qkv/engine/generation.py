"""The first generation loop: a batch of requests to texts, a token of each answer at a time."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from itertools import accumulate

import numpy as np

from qkv.engine.answers import Answers, Move, answers
from qkv.engine.requests import Completion, Request, check, start_token
from qkv.engine.runner import Progress, Runner, Watch, runner
from qkv.loading import Loaded
from qkv.runtime.choice import require_torch


def stream(
    loaded: Loaded,
    requests: Sequence[Request],
    tap: Watch = lambda: None,
    progress: Progress | None = None,
) -> Generator[tuple[int, str, Completion], None, None]:
    """Serves the requests as one batch; gives (which answer, its new text, all of it so far) as they come.

    Answers are numbered through all requests, `n` numbers each. All requests are checked at once,
    before anything runs. A result does not depend on its batch mates. A prompt is read once however
    many answers go on from it. `tap` is asked at every pass. Closing the generator frees what it holds.
    """
    for request in requests:
        check(request, loaded)
    beside, read = None, 0
    if loaded.spec.features is not None or any(request.features is not None for request in requests):
        require_torch("Reading images or audio")
        from qkv.engine import features

        for request in requests:
            features.check(request, loaded)
        beside = features.joined(requests, loaded)
        read = features.rows(beside, loaded)
    start = start_token(loaded)
    longest = max(len(request.prompt) for request in requests)
    reach = max(request.max_new_tokens for request in requests)
    sizes = (longest + reach - 1, read) if start is None else (reach, longest)
    rows = sum(request.rows for request in requests)
    return _serve(loaded, requests, runner(loaded, len(requests), rows, sizes, tap, beside), start, progress)


def _serve(
    loaded: Loaded,
    requests: Sequence[Request],
    runner: Runner,
    start: int | None,
    progress: Progress | None,
) -> Generator[tuple[int, str, Completion], None, None]:
    try:
        started = time.perf_counter()
        each = [answers(request, loaded) for request in requests]
        numbers = list(accumulate((request.n for request in requests), initial=0))
        places = list(accumulate((request.rows for request in requests), initial=0))
        logits = _first(requests, runner, start, progress)
        prefill, decode = time.perf_counter() - started, 0.0
        while True:
            started = time.perf_counter()
            said = [
                (numbers[i] + which, text, completion)
                for i, group in enumerate(each)
                if not group.finished
                for which, text, completion in group.accept(logits[places[i] : places[i + 1]])
            ]
            decode += time.perf_counter() - started
            for number, text, completion in said:
                completion.prefill_seconds, completion.decode_seconds = prefill, decode
                yield number, text, completion
            started = time.perf_counter()  # what the reader does with the text is no part of the speed
            if all(group.finished for group in each):
                return
            logits = runner.step(_moves(each, places))
            decode += time.perf_counter() - started
    finally:
        runner.close()


def _first(
    requests: Sequence[Request], runner: Runner, start: int | None, progress: Progress | None
) -> np.ndarray:
    """The logits after each prompt, a row for each answer that goes on from it."""
    prompts = [request.prompt for request in requests]
    logits = runner.read(prompts, progress) if start is None else runner.begin(start, prompts, progress)
    owners = [i for i, request in enumerate(requests) for _ in range(request.rows)]
    if len(owners) > len(requests):
        runner.select(owners)
        logits = logits[owners]
    return logits


def _moves(each: Sequence[Answers], places: Sequence[int]) -> list[Move | None]:
    """The moves of all requests, their rows counted through the batch."""
    return [
        None if move is None or group.finished else (place + move[0], move[1])
        for group, place in zip(each, places, strict=False)
        for move in group.moves
    ]
