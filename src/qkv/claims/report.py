"""What came out: for a terminal, and as data. Pages are in `pages`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

from qkv.claims.claim import Check, Claim, Pictures, Result, Size, verdict

MOST_SECONDS = 600  # what a claim may take, all its seeds together
WIDTH = 100
YES, NO = "yes", "no "


@dataclass(frozen=True)
class Outcome:
    """One claim: what its seeds gave, how that is judged, or why it could not be."""

    claim: Claim
    results: tuple[Result, ...]
    checks: tuple[Check, ...] = ()
    pictures: Pictures = field(default_factory=dict)
    error: str | None = None
    changed: bool = False  # whether the experiment is another now than when it was measured

    @property
    def verdict(self) -> str:
        return verdict(self.checks) if self.error is None else f"not measured: {self.error}"

    @property
    def brief(self) -> str:
        """The verdict in few words."""
        if self.error is not None:
            return "not measured"
        held = sum(check.holds for check in self.checks)
        return f"{held} of {len(self.checks)} hold" if 0 < held < len(self.checks) else self.verdict

    @property
    def seconds(self) -> float:
        return sum(result.seconds for result in self.results)

    @property
    def processor(self) -> float:
        """Seconds of all cores together."""
        return sum(result.processor for result in self.results)

    @property
    def over(self) -> bool:
        """Whether it took longer than a claim may; what it waited for others on a busy machine is not its."""
        return min(self.seconds, self.processor) > MOST_SECONDS

    @property
    def time(self) -> str:
        """By the clock and, in brackets, of processors."""
        return f"{minutes(self.seconds)} ({minutes(self.processor)})"

    def data(self) -> dict[str, Any]:
        return {
            **self.claim.data(),
            "verdict": None if self.error is not None else self.verdict,
            "error": self.error,
            "checks": [
                {"what": check.what, "measured": check.measured, "holds": check.holds}
                for check in self.checks
            ],
            "seconds": self.seconds,
            "processor_seconds": self.processor,
            "over": self.over,
            "changed": self.changed,
            "runs": [
                {
                    "seed": result.seed,
                    "seconds": result.seconds,
                    "processor_seconds": result.processor,
                    "date": result.date,
                    "machine": dict(result.machine),
                    "versions": dict(result.versions),
                    "threads": result.threads,
                    "figures": result.figures,
                }
                for result in self.results
            ],
        }

    def lines(self) -> Iterator[str]:
        name = f"{self.claim.name} ({self.claim.number})"
        yield f"{name:<36}  {self.brief:<16}  {self.time:>20}{'  over' if self.over else ''}"
        if self.error is not None:
            yield from wrap(self.error, WIDTH, initial_indent="     ", subsequent_indent="     ")
        for check in self.checks:
            words = f"{check.what}: {check.measured}"
            lead = f"  {YES if check.holds else NO}  "
            yield from wrap(words, WIDTH, initial_indent=lead, subsequent_indent=" " * len(lead))


@dataclass(frozen=True)
class Report:
    """All claims that were asked for, in their order."""

    outcomes: tuple[Outcome, ...]
    size: Size = "full"
    missing: tuple[str, ...] = ()  # claims that were asked for and not measured yet

    @property
    def failed(self) -> bool:
        """Whether an experiment failed. A claim that does not hold is a finding, not a failure."""
        return any(outcome.error is not None for outcome in self.outcomes)

    def data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "size": self.size,
            "missing": list(self.missing),
            "claims": [outcome.data() for outcome in self.outcomes],
        }

    def __str__(self) -> str:
        lines = [f"{'claim':<36}  {'verdict':<16}  {'time (of all cores)':>20}"]
        for outcome in self.outcomes:
            lines += ["", *outcome.lines()]
        return "\n".join([*lines, "", *self.closing()])

    def closing(self) -> Iterator[str]:
        """Where and when this was measured, a sentence each, and what to know about it."""
        yield from circumstances([result for outcome in self.outcomes for result in outcome.results])
        yield "Times are the clock's, on a busy machine more than was needed; in brackets those of all cores."
        if self.size == "smoke":
            yield "Smoke sizes show that the experiments run: their verdicts mean nothing."
        over = [outcome.claim.name for outcome in self.outcomes if outcome.over]
        if self.missing:
            yield f"Not measured yet: {', '.join(self.missing)}."
        changed = [outcome.claim.name for outcome in self.outcomes if outcome.changed]
        if changed:
            yield f"Changed since they were measured: {', '.join(changed)}."
        if over:
            yield f"Over {MOST_SECONDS // 60} minutes for all seeds: {', '.join(over)}."


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 6 else f"{seconds:.1f} s"


def circumstances(results: Sequence[Result]) -> Iterator[str]:
    """The machines, days, versions and seeds of results, each named once."""
    if not results:
        return
    machines = dict.fromkeys(_machine(result.machine) for result in results)
    versions = dict.fromkeys(f"torch {result.versions['torch']}" for result in results)
    threads = sorted({result.threads for result in results})
    days = sorted({result.date for result in results})
    seeds = sorted({result.seed for result in results})
    count = f"{_either(threads)} thread{'' if threads == [1] else 's'}"
    yield f"Measured on {'; '.join(machines)}, with {', '.join(versions)} on {count}."
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    yield f"Date: {span}. Seeds: {', '.join(map(str, seeds))}. In brackets: least and greatest of the seeds."


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['processor']}, {machine['cores']} cores"


def _either(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
