"""Runs a model in rounds: with each number of threads and of streams in turn, and the memory beside it.

Interleaved, so that what a neighbour does to the machine falls on all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import cast

from qkv.benching.figures import Sample, bytes_per_token, rotated
from qkv.benching.machine import Moment, described, read_bandwidth
from qkv.benching.report import Bench, Row
from qkv.benching.traffic import cache_bytes, stored_as, weight_bytes
from qkv.engine import Request
from qkv.engine.generation import prepared, scheduler
from qkv.engine.requests import reads_prompt
from qkv.engine.scheduler import MOST_ROWS
from qkv.engine.timing import Timing, timed
from qkv.errors import RequestError, UnsupportedError
from qkv.generation_config import Bounds
from qkv.loading import Loaded, Progress, load
from qkv.loading.room import check_memory
from qkv.memory import forget_peak, peak_memory
from qkv.runtime.built import missing
from qkv.runtime.choice import generates
from qkv.runtime.native import Native
from qkv.runtime.threads import default_threads
from qkv.verification.passes import torch_threads
from qkv.verification.text import random_ids

Setting = tuple[int, int]  # threads, streams
WARM = 64, 4  # tokens of prompt and new ones before the first round: some things are made at first use


def bench(
    source: str | Path = "smollm2",
    threads: Sequence[int] = (),
    prompt: int = 512,
    new: int = 128,
    streams: Sequence[int] = (1, 8),
    rounds: int = 5,
    runtime: str | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Measures how fast a model runs here, and how fast the memory reads meanwhile.

    `source` and `runtime` are as for `load`. Each number of `threads` (without any: one, and one for each
    core) is measured with each number of `streams`, texts that are made together: each has a prompt of
    `prompt` random tokens, new ones in every round, and is continued greedily by `new`. `progress` is told
    how many of all runs are done.

    Raises a QkvError for a source that cannot be loaded or that generates no text, and for a request that
    makes no sense or does not fit.
    """
    counts = tuple(dict.fromkeys(threads)) or tuple(sorted({1, default_threads()}))
    streams = tuple(dict.fromkeys(streams))
    asked = [("prompt", prompt, Bounds(Integral, 1)), ("new", new, Bounds(Integral, 2))]
    asked += [("rounds", rounds, Bounds(Integral, 1))]
    asked += [("threads", count, Bounds(Integral, 1, os.cpu_count() or 1)) for count in counts]
    asked += [("streams", count, Bounds(Integral, 1, MOST_ROWS)) for count in streams or (0,)]
    for name, value, bounds in asked:
        if not bounds.hold(value):
            raise RequestError(f"{name} is {value!r}; it must be {bounds}.")
    start = time.perf_counter()
    loaded = load(source, runtime=runtime)
    seconds = time.perf_counter() - start
    if loaded.choice.runtime == "numpy":
        if threads:
            raise RequestError("The numpy runtime takes its threads from OMP_NUM_THREADS: leave threads out.")
        counts = counts[-1:]
    settings = [(count, number) for count in counts for number in streams]
    return _Runs(loaded, prompt, new, rounds, progress).measured(settings, seconds)


# What differs between runtimes: how many threads they run on, and the bytes of a number in the cache.


class _Native:
    def __init__(self, loaded: Loaded):
        self.machine = cast(Native, loaded.machine)
        self.value_bytes = {"f32": 4, "bf16": 2, "int8": 1}[self.machine.cache_type]
        self.made = {self.machine.threads: self.machine.workers}

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        before = self.machine.workers
        if count not in self.made:
            self.made[count] = type(before)(count)
        self.machine.workers = self.made[count]
        try:
            yield
        finally:
            self.machine.workers = before


class _Torch:
    def __init__(self, loaded: Loaded):
        self.value_bytes = next(loaded.model.parameters()).element_size()

    def threads(self, count: int) -> AbstractContextManager[None]:
        return torch_threads(count)


class _Numpy:
    value_bytes = 4

    def __init__(self, loaded: Loaded): ...

    def threads(self, count: int) -> AbstractContextManager[None]:
        return nullcontext()


HANDS: Mapping[str, type[_Native | _Torch | _Numpy]] = {"native": _Native, "torch": _Torch, "numpy": _Numpy}


class _Runs:
    """One loaded model, and what it is asked in each run."""

    def __init__(self, loaded: Loaded, prompt: int, new: int, rounds: int, progress: Progress | None):
        if not generates(loaded.spec) or loaded.spec.features in ("trunk", "encoder"):
            raise UnsupportedError(
                f"{loaded.files.name} does not continue text, and only models that do can be measured."
            )
        self.loaded, self.prompt, self.new, self.rounds = loaded, prompt, new, rounds
        self.progress = progress
        self.hands = HANDS[loaded.choice.runtime](loaded)
        self.peaks, self.forgets = [peak_memory() or 0], True

    def measured(self, settings: list[Setting], load_seconds: float) -> Bench:
        most = max(streams for _, streams in settings)
        self._check(most)
        self.ids = random_ids(self.loaded, self.rounds * most * self.prompt)
        samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
        for setting in settings:
            self._run(setting, 0, min(self.prompt, WARM[0]), min(self.new, WARM[1]))
        for round in range(self.rounds):
            for setting in rotated(settings, round):
                samples[setting].append(self._sample(setting, round))
                if self.progress is not None:
                    self.progress(sum(map(len, samples.values())), self.rounds * len(settings))
        return Bench(
            self.loaded.files.name,
            stored_as(self.loaded),
            self.loaded.choice.runtime,
            described(),
            self.prompt,
            self.new,
            tuple(self._row(setting, tuple(found)) for setting, found in samples.items()),
            load_seconds,
            max(self.peaks) or None,
            tuple(self._notes()),
        )

    def _check(self, streams: int) -> None:
        """Refuses what is too much for the context or the memory, before anything runs."""
        request = Request((0,) * self.prompt, self.new, ignore_eos=True)
        prepared(self.loaded, [request])
        serving = scheduler(self.loaded)
        serving.check(request)
        source = self.prompt if reads_prompt(self.loaded.spec) else 0
        tokens = self.new + (0 if source else self.prompt)
        check_memory(
            self.loaded.files.name,
            streams * serving.machine.bytes_for(tokens, source),
            f"for the cache of {streams:,} streams, {self.prompt:,} tokens and {self.new:,} new ones each",
            "cpu",
            "ask for less, or choose",
        )

    def _run(self, setting: Setting, round: int, prompt: int, new: int) -> Timing:
        threads, streams = setting
        starts = [self.prompt * (round * streams + stream) for stream in range(streams)]
        with self.hands.threads(threads):
            return timed(self.loaded, [self.ids[start : start + prompt] for start in starts], new)

    def _sample(self, setting: Setting, round: int) -> Sample:
        bandwidth = read_bandwidth(setting[0])
        self.forgets &= forget_peak()  # what that took is none of the model's
        before = _moment()
        timing = self._run(setting, round, self.prompt, self.new)
        after = _moment()
        self.peaks.append(peak_memory() or 0)
        others = before.others(after, os.cpu_count() or 1) if before and after else None
        return Sample(*timing.speeds(self.prompt), bandwidth, others)

    def _row(self, setting: Setting, samples: tuple[Sample, ...]) -> Row:
        threads, streams = setting
        context, each = cache_bytes(self.loaded, self.prompt, self.new, self.hands.value_bytes)
        weights = weight_bytes(self.loaded, streams)
        return Row(threads, streams, bytes_per_token(weights, each, context, streams), samples)

    def _notes(self) -> Iterator[str]:
        reason = missing()
        if reason is not None:
            yield (
                "The memory's speed is what numpy reads, which may be less than the memory can give, as "
                f"there is no native runtime: {reason}."
            )
        if not self.forgets:
            yield "The memory at most has the 512 MiB in it that the memory's speed was measured with."


def _moment() -> Moment | None:
    try:
        return Moment.now(os.getpid())
    except OSError:  # not Linux
        return None
