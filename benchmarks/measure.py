"""Measuring: engines loaded once, then asked in turn, round by round."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, Group
from benchmarks.figures import agreement
from benchmarks.machine import Bandwidth, resident, wait_for_quiet
from benchmarks.models import Files
from benchmarks.prompts import Prompts
from benchmarks.workers import Worker, WorkerFailed
from qkv.benching.figures import Sample, bytes_per_token, rotated
from qkv.benching.machine import Moment

Say = Callable[[str], None]
SHORT = 16  # prompt tokens for a start: so few that loading is what counts


@dataclass
class Outcome:
    """One engine in one case: a sample a round, or why there is none.

    `same` are, for each round, how many tokens in a row are those of the first engine.
    """

    format: str = ""
    error: str = ""
    samples: list[Sample] = field(default_factory=list)
    same: list[int] = field(default_factory=list)


@dataclass
class Measured:
    """One case: bytes of memory a decoded token needs, what each engine did, and when that was."""

    case: Case
    bytes_per_token: float
    outcomes: dict[str, Outcome]
    date: str = ""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Measured:
        """From what `data` gave."""
        case = Case(**data["case"] | {"group": Group(**data["case"]["group"])})
        outcomes = {
            name: Outcome(**engine | {"samples": [Sample(**sample) for sample in engine["samples"]]})
            for name, engine in data["engines"].items()
        }
        return cls(case, data["bytes_per_token"], outcomes, data["date"])

    def data(self) -> dict[str, Any]:
        engines = {name: asdict(outcome) for name, outcome in self.outcomes.items()}
        return {
            "case": asdict(self.case) | {"group": self.case.group._asdict()},
            "bytes_per_token": self.bytes_per_token,
            "engines": engines,
            "date": self.date,
        }


@dataclass
class Started:
    """One engine with one model: seconds from process start to first token, and memory after its cases."""

    group: Group
    engine: str
    name: str = ""
    format: str = ""
    error: str = ""
    seconds: list[float] = field(default_factory=list)
    memory: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Started:
        """From what `data` gave."""
        return cls(**data | {"group": Group(**data["group"])})

    def data(self) -> dict[str, Any]:
        return asdict(self) | {"group": self.group._asdict()}


@dataclass(frozen=True)
class Bench:
    """What all groups share."""

    commands: Mapping[str, Sequence[str]]
    prompts: Prompts
    bandwidth: Bandwidth
    work: Path
    starts: int
    patience: float
    say: Say

    def group(self, group: Group, cases: Sequence[Case]) -> tuple[list[Measured], list[Started]]:
        """All cases of one model, type and number of threads."""
        files = Files(group.model, self.work / "models")
        request = {
            "gguf": str(files.gguf(group.type)),
            "folder": str(files.folder() or ""),
            "type": group.type,
            "threads": group.threads,
        }
        started = [Started(group, engine) for engine in self.commands]
        with ExitStack() as stack:
            self._prepare(started, request)
            workers: dict[str, Worker] = {}
            for number in range(self.starts):
                for each in started:
                    if each.engine in workers:
                        workers.pop(each.engine).close()  # only the last one stays, for the cases
                    worker = None if each.error else self._start(each, request, number)
                    if worker is not None:
                        workers[each.engine] = stack.enter_context(worker)
            measured = [self._case(case, files, workers, started) for case in cases]
            for each in started:
                if each.engine in workers and workers[each.engine].alive:
                    each.memory = resident(workers[each.engine].process.pid)
        return measured, started

    def _worker(self, engine: str, threads: int) -> Worker:
        return Worker(self.commands[engine], self.work / f"{engine}.log", threads)

    def _prepare(self, started: Sequence[Started], request: Mapping[str, Any]) -> None:
        """Conversions, in processes of their own: what they import shall not count as the engine's memory."""
        for each in started:
            with self._worker(each.engine, each.group.threads) as worker:
                try:
                    worker.ask(do="prepare", **request)
                except WorkerFailed as failure:
                    each.error = str(failure)
                    self.say(f"  {each.engine}: {failure}")

    def _start(self, each: Started, request: Mapping[str, Any], number: int) -> Worker | None:
        """A process that has given its first token; None where it could not."""
        wait_for_quiet(self.patience)
        worker = self._worker(each.engine, each.group.threads)
        try:
            answer = worker.ask(do="load", **request)
            worker.ask(do="prefill_decode", prompts=self.prompts.take(number, 1, SHORT), new=1)
        except WorkerFailed as failure:
            each.error = str(failure)
            self.say(f"  {each.engine}: {failure}")
            worker.close()
            return None
        each.seconds.append(time.perf_counter() - worker.started)
        each.name, each.format = answer["engine"], answer["format"]
        return worker

    def _case(
        self, case: Case, files: Files, workers: Mapping[str, Worker], started: Sequence[Started]
    ) -> Measured:
        self.say(str(case))
        cache = files.cache_bytes(case.group.type, int(case.mean_context)) / case.mean_context
        needed = bytes_per_token(files.bytes_read(case.group.type), cache, case.mean_context, case.streams)
        outcomes = {each.engine: Outcome(each.format, each.error) for each in started}
        for engine, worker in workers.items():
            try:
                self._warm(worker, case)
            except WorkerFailed as failure:
                outcomes[engine].error = str(failure)
        for round in range(case.rounds):
            self._round(case, round, workers, outcomes)
        return Measured(case, needed, outcomes, datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"))

    def _warm(self, worker: Worker, case: Case) -> None:
        """A short run of as many streams: some engines prepare what they have not done before."""
        prompts = self.prompts.take(case.rounds, case.streams, min(case.prompt, 64))
        worker.ask(do="prefill_decode", prompts=prompts, new=4)

    def _round(
        self, case: Case, round: int, workers: Mapping[str, Worker], outcomes: Mapping[str, Outcome]
    ) -> None:
        wait_for_quiet(self.patience)
        bandwidth = self.bandwidth.measure([case.group.threads])[case.group.threads]
        prompts = self.prompts.take(round, case.streams, case.prompt)
        tokens: dict[str, list[list[int]]] = {}
        line = [f"  round {round + 1}: memory {bandwidth / 1e9:.1f} GB/s"]
        for engine in rotated([name for name in workers if not outcomes[name].error], round):
            try:
                sample, tokens[engine] = self._sample(workers[engine], case, prompts, bandwidth)
            except WorkerFailed as failure:
                outcomes[engine].error = str(failure)
                self.say(f"  {engine}: {failure}")
                continue
            outcomes[engine].samples.append(sample)
            line.append(f"{engine} {sample.prefill:.0f} / {sample.decode:.0f}")
        first = next((tokens[name] for name in workers if name in tokens), [])
        for engine, made in tokens.items():
            outcomes[engine].same.append(min(map(agreement, made, first)))
        self.say(", ".join(line))

    def _sample(
        self, worker: Worker, case: Case, prompts: list[list[int]], bandwidth: float
    ) -> tuple[Sample, list[list[int]]]:
        before = Moment.now(worker.process.pid)
        answer = worker.ask(do="prefill_decode", prompts=prompts, new=case.new)
        others = before.others(Moment.now(worker.process.pid), os.cpu_count() or 1)
        if {len(each) for each in answer["tokens"]} != {case.new}:
            raise WorkerFailed(f"it did not make {case.new} tokens in each stream")
        speeds = answer["prefill_tokens_per_s"], answer["decode_tokens_per_s"]
        return Sample(*speeds, bandwidth, others), answer["tokens"]
