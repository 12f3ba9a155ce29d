"""What a claim is: what the literature says, what we expected before measuring, and how that is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from qkv.errors import RequestError

if TYPE_CHECKING:
    import torch

Figures = dict[str, Any]  # what one seed gives: goes to JSON and back, so keys are texts and numbers finite
Pictures = dict[str, str]  # a short name -> the text of an SVG file
Size = Literal["full", "smoke"]
T = TypeVar("T")


class Progress(Protocol):
    """Is told how much is done, of how much, and of what."""

    def __call__(self, done: int, total: int, note: str = "", /) -> None: ...


@dataclass(frozen=True)
class Check:
    """One part of an expectation: `what` should be, what was `measured` (with numbers), and if it holds."""

    what: str
    measured: str
    holds: bool


@dataclass(frozen=True)
class Run:
    """One seed of one claim: its size, its random numbers, and whom to tell how far it is."""

    claim: str
    seed: int
    size: Size = "full"
    report: Progress | None = None

    def of(self, full: T, smoke: T) -> T:
        """The number of this run's size. A smoke run shows that the code works, and nothing else."""
        return full if self.size == "full" else smoke

    def progress(self, done: int, total: int, note: str = "") -> None:
        if self.report is not None:
            self.report(done, total, note)

    def number(self, name: str = "") -> int:
        """A seed, from 0 to 2^63 - 1, of this claim, seed and name, the same on every machine."""
        text = f"{self.claim}/{self.seed}/{name}"
        return int.from_bytes(sha256(text.encode()).digest()[:8], "little") >> 1

    def generator(self, name: str = "") -> torch.Generator:
        """Random numbers of their own for each name; what is asked twice by one name begins again.

        So variants that are compared draw the same batches: each asks for "batches" anew.
        """
        import torch

        return torch.Generator().manual_seed(self.number(name))


@dataclass(frozen=True)
class Result:
    """What one seed of one claim gave, when and where. `source` is the experiment's fingerprint.

    `seconds` are the clock's and `processor` those of all threads together: on a busy machine the
    first are more than the experiment needs.
    """

    claim: str
    seed: int
    size: Size
    figures: Figures
    seconds: float
    processor: float
    date: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    threads: int
    source: str


class Experiment(Protocol):
    """What a module in `claims/experiments` defines, as plain functions.

    `draw` may be left out.
    """

    def measure(self, run: Run) -> Figures:
        """Runs one seed."""
        ...

    def judge(self, figures: Sequence[Figures]) -> tuple[Check, ...]:
        """Compares what the seeds gave with the expectation."""
        ...

    def draw(self, figures: Sequence[Figures]) -> Pictures:
        """Pictures of what the seeds gave."""
        ...


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of the literature that an experiment here can bear out or not.

    `number` is that of the expectation, which was written down before anything was measured and stays
    as it is, word for word. `experiment` is the module in `qkv.claims.experiments`. `seeds` is the most
    that fit into the time of a claim, where three do not; its checks say what that leaves open.
    """

    name: str
    number: str
    statement: str
    source: str
    expectation: str
    experiment: str
    seeds: int | None = None

    def seeds_of(self, asked: int) -> int:
        """How many are run where so many are asked for."""
        return asked if self.seeds is None else min(asked, self.seeds)

    @property
    def module(self) -> str:
        return f"qkv.claims.experiments.{self.experiment}"

    def data(self) -> dict[str, str]:
        """What is said of it, without what came out."""
        names = ("name", "number", "statement", "source", "expectation")
        return {name: getattr(self, name) for name in names}

    def load(self) -> Experiment:
        """The experiment; imports torch."""
        return cast(Experiment, import_module(self.module))


def drawn(experiment: Experiment, figures: Sequence[Figures]) -> Pictures:
    """The experiment's pictures; none where it draws none."""
    draw = getattr(experiment, "draw", None)
    return {} if draw is None else draw(figures)


def verdict(checks: Sequence[Check]) -> str:
    """ "holds", "fails", or "holds only in part: ..." with what does not hold. Follows from the checks alone.

    Raises RequestError where there are none: nothing was judged.
    """
    if not checks:
        raise RequestError("There are no checks, so there is no verdict: judge at least one thing.")
    failed = [check for check in checks if not check.holds]
    if not failed:
        return "holds"
    if len(failed) == len(checks):
        return "fails"
    return "holds only in part: not " + ", not ".join(f'"{check.what}"' for check in failed)
