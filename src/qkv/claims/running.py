"""Runs claims seed by seed, keeps each result as it comes, and goes on where an earlier run ended."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Any

import qkv
from qkv.claims.claim import Claim, Progress, Result, Run, Size, drawn, verdict
from qkv.claims.fingerprint import fingerprint
from qkv.claims.registry import chosen
from qkv.claims.report import Outcome, Report
from qkv.errors import QkvError, RequestError, SourceError

OUT = Path("claims-results")


@dataclass(frozen=True)
class Folder:
    """Where results are kept: size/claim-seed.json."""

    path: Path

    def _file(self, claim: str, seed: int, size: Size) -> Path:
        return self.path / size / f"{claim}-{seed}.json"

    def kept(self, claim: str, seed: int, size: Size) -> Result | None:
        """The result, if there is one that can be read."""
        try:
            held = json.loads(self._file(claim, seed, size).read_text(encoding="utf-8"))
            found = Result(**held)
        except (OSError, ValueError, TypeError):
            return None
        return found if (found.claim, found.seed, found.size) == (claim, seed, size) else None

    def seeds(self, claim: str, size: Size) -> tuple[Result, ...]:
        """Those of the seeds 0, 1, ... up to the first that is missing."""
        found: list[Result] = []
        while (result := self.kept(claim, len(found), size)) is not None:
            found.append(result)
        return tuple(found)

    def keep(self, result: Result) -> None:
        """Whole or not at all. Raises SourceError where it cannot be written."""
        file = self._file(result.claim, result.seed, result.size)
        written = file.with_suffix(f".{os.getpid()}.part")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            written.write_text(json.dumps(asdict(result), allow_nan=False) + "\n", encoding="utf-8")
            written.replace(file)
        except OSError as problem:
            raise SourceError(f"{file} cannot be written: {problem.strerror}.") from None


def reproduce(
    names: Sequence[str],
    *,
    size: Size = "full",
    seeds: int = 3,
    out: Path = OUT,
    again: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Runs these claims, by name or number ("H9"), or "all", with the seeds 0, 1, ... or as many as fit.

    What `out` holds of the same experiment counts, unless `again`. A claim whose experiment fails has
    an `error` and the others go on. `progress` hears how many of all seeds are done, and what is at work.
    `threads` are torch's: two, or as many cores as there are.

    Raises RequestError for a name that is not known and for numbers that make no sense.
    """
    claims = chosen(names)
    cores = os.cpu_count() or 1
    for name, value, most in (("seeds", seeds, 1000), ("threads", threads, cores)):
        if value is not None and not 1 <= value <= most:
            raise RequestError(f"{name} is {value}; it must be from 1 to {most:,}.")
    total = sum(claim.seeds_of(seeds) for claim in claims)
    runner = _Runner(Folder(out), size, seeds, again, threads or min(2, cores), total, progress)
    return Report(tuple(runner.outcome(claim) for claim in claims), size)


def kept(names: Sequence[str], *, size: Size = "full", out: Path = OUT) -> Report:
    """The report of what `out` holds of these claims, running nothing; claims without results are named.

    Where an experiment has changed since, its outcome says so. Raises RequestError for a name that is
    not known, and where nothing is held.
    """
    folder = Folder(out)
    held = {claim: folder.seeds(claim.name, size) for claim in chosen(names)}
    outcomes = tuple(judged(claim, results) for claim, results in held.items() if results)
    if not outcomes:
        raise RequestError(f"{out} holds no results of these claims at the {size} size: run them first.")
    return Report(outcomes, size, tuple(claim.name for claim, results in held.items() if not results))


def judged(claim: Claim, results: Sequence[Result]) -> Outcome:
    """What follows from the figures of these seeds."""
    experiment, figures = claim.load(), [result.figures for result in results]
    checks = tuple(experiment.judge(figures))
    verdict(checks)  # refuses none
    changed = any(result.source != fingerprint(claim.module) for result in results)
    return Outcome(claim, tuple(results), checks, drawn(experiment, figures), changed=changed)


class _Runner:
    def __init__(
        self,
        folder: Folder,
        size: Size,
        seeds: int,
        again: bool,
        threads: int,
        total: int,
        progress: Progress | None,
    ):
        self.folder, self.size, self.seeds, self.again = folder, size, seeds, again
        self.threads, self.report = threads, progress
        self.done, self.total = 0, total

    def outcome(self, claim: Claim) -> Outcome:
        """All seeds of a claim, its verdict and its pictures; what goes wrong is said in it."""
        results: list[Result] = []
        seeds = claim.seeds_of(self.seeds)
        end = self.done + seeds
        try:
            for seed in range(seeds):
                results.append(self._result(claim, seed))
                self.done += 1
            return judged(claim, results)
        except Exception as problem:  # whatever an experiment does, the others go on
            self.done = end
            at = f"seed {len(results)}" if len(results) < seeds else "judging"
            return Outcome(claim, tuple(results), error=f"{at}: {_told(problem)}")

    def _result(self, claim: Claim, seed: int) -> Result:
        source = fingerprint(claim.module)
        held = None if self.again else self.folder.kept(claim.name, seed, self.size)
        if held is not None and held.source == source:
            return held
        result = self._measured(claim, seed, source)
        self.folder.keep(result)
        return result

    def _measured(self, claim: Claim, seed: int, source: str) -> Result:
        import torch

        from qkv.benching.machine import described

        def tell(done: int, total: int, note: str = "") -> None:
            if self.report is not None:
                where = f" runs; {claim.name}, seed {seed}: {done:,} of {total:,}"
                self.report(self.done, self.total, where + (f" ({note})" if note else ""))

        tell(0, 1)
        run, start = Run(claim.name, seed, self.size, tell), _times()
        with _torch_of(self.threads, run.number()):
            figures = claim.load().measure(run)
        seconds, processor = (after - before for before, after in zip(start, _times(), strict=True))
        return Result(
            claim.name,
            seed,
            self.size,
            plain(figures),
            seconds,
            processor,
            datetime.now(UTC).date().isoformat(),
            described(),
            {"torch": torch.__version__, "qkv": qkv.__version__},
            self.threads,
            source,
        )


def _times() -> tuple[float, float]:
    """Seconds of the clock, and of this process on all cores."""
    return time.perf_counter(), time.process_time()


def _told(problem: Exception) -> str:
    """An error of ours as it is; another with the line of the claim's code that it came from."""
    if isinstance(problem, QkvError):
        return str(problem)
    frames = traceback.extract_tb(problem.__traceback__)
    ours = [frame for frame in frames if Path(__file__).parent in Path(frame.filename).parents]
    where = f" ({Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
    return f"{type(problem).__name__}: {problem}{where}"


@contextmanager
def _torch_of(threads: int, seed: int) -> Iterator[None]:
    """So many threads and this seed for what draws without a generator; both as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)


def plain(figures: Any, place: str = "figures") -> Any:
    """Figures as JSON gives them back. Raises RequestError for what it has not, infinite numbers too."""
    if isinstance(figures, Mapping):
        odd = [key for key in figures if not isinstance(key, str)]
        if odd:
            raise RequestError(f"{place} has the key {odd[0]!r}; keys of figures are texts.")
        return {key: plain(value, f"{place}[{key!r}]") for key, value in figures.items()}
    if isinstance(figures, list | tuple):
        return [plain(value, f"{place}[{i}]") for i, value in enumerate(figures)]
    if isinstance(figures, float) and not isfinite(figures):
        raise RequestError(f"{place} is {figures}; a figure is a finite number, or None where there is none.")
    if figures is None or isinstance(figures, str | bool | int | float):
        return figures
    raise RequestError(f"{place} is a {type(figures).__name__}; figures are numbers, texts, lists and dicts.")
