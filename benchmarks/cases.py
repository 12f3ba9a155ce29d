"""What is measured: cases of a model, a type, threads, a prompt, new tokens and streams."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from benchmarks.models import GEMMA, RANDOM_1B, RANDOM_QWEN, SMOLLM2


class Group(NamedTuple):
    """Cases that one loaded engine answers."""

    model: str
    type: str
    threads: int


@dataclass(frozen=True)
class Case:
    """So many streams, each with a prompt of its own of so many tokens, and so many new ones."""

    group: Group
    prompt: int = 512
    new: int = 128
    streams: int = 1
    rounds: int = 7

    def __str__(self) -> str:
        streams = f", {self.streams} streams" if self.streams > 1 else ""
        model, type, threads = self.group
        return f"{model} {type}, {threads} thread{'s' * (threads > 1)}, {self.prompt}+{self.new}{streams}"

    @property
    def mean_context(self) -> float:
        """Tokens that a decoded token looks back at, on average, its own included."""
        return self.prompt + self.new / 2


def full(threads: Iterable[int]) -> list[Case]:
    """All cases: hours. Those that take a minute an engine and round have three rounds."""
    threads = sorted(set(threads))
    most = threads[-1]
    types = ("Q4_1", "Q8_0", "BF16", "Q4_0", "Q4_K")
    found = [Case(Group(SMOLLM2, type, count)) for count in threads for type in types]
    for type in ("Q4_1", "Q8_0"):
        group = Group(SMOLLM2, type, most)
        found += [Case(group, prompt, 64, rounds=5) for prompt in (1024, 2048, 4096)]
        found += [Case(group, 8192 - 64, 64, rounds=3)]
        found += [Case(group, 512, 64, streams, rounds=3) for streams in (8, 32)]
    found += [Case(Group(SMOLLM2, "Q4_0", most), 512, 64, 32, rounds=3)]
    found += [Case(Group(SMOLLM2, "BF16", most), 512, 64, 8, rounds=3)]  # all that transformers has of these
    for type in ("Q8_0", "Q4_0", "Q4_K", "BF16"):
        found += [Case(Group(RANDOM_1B, type, count), 512, 64) for count in threads]
    found += [Case(Group(GEMMA, "Q4_K_M", most)), Case(Group(RANDOM_QWEN, "Q8_0", most), 512, 64)]
    group = Group(RANDOM_1B, "Q8_0", most)
    found += [Case(group, 128, 64, streams, rounds=3) for streams in (8, 32)]
    return [*found, Case(group, 16384 - 32, 32, rounds=3)]


def quick(threads: Iterable[int]) -> list[Case]:
    """A few cases, three rounds each: about five minutes."""
    most = max(threads)
    found = [Case(Group(SMOLLM2, type, most)) for type in ("Q4_1", "Q8_0", "BF16")]
    streams = Case(Group(SMOLLM2, "Q8_0", most), 128, 64, streams=8)
    return [replace(case, rounds=3) for case in (*found, streams)]


def narrowed(cases: Iterable[Case], only: Sequence[str], rounds: int | None) -> list[Case]:
    """The cases whose name holds one of these texts, all of them where there are none, in so many rounds."""
    found = [case for case in cases if not only or any(text in str(case) for text in only)]
    return found if rounds is None else [replace(case, rounds=rounds) for case in found]


def same(one: Case, other: Case) -> bool:
    """Whether they are one case, however many rounds it has."""
    return replace(one, rounds=other.rounds) == other


def grouped(cases: Iterable[Case]) -> dict[Group, list[Case]]:
    """The cases by what has to be loaded for them, in the order of the first of each."""
    groups: dict[Group, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    return groups
