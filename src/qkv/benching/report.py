"""What was measured, as a table for people and as data for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import qkv
from qkv.benching.figures import QUIET, Sample, Spread, chosen, share_of_limit
from qkv.errors import RequestError

COLUMNS = {
    "threads": 7,
    "streams": 7,
    "prefill, tokens/s": 19,
    "decode, tokens/s": 17,
    "memory, GB/s": 16,
    "MB a token": 10,
    "of the limit": 12,
    "quiet": 6,
}
LIMIT = "Of the limit: the bytes a second that decoding takes, of those that the memory gave in that round."
# names of a sample's figures in the data
FIGURES = {
    "prefill_tokens_per_second": "prefill",
    "decode_tokens_per_second": "decode",
    "bandwidth_bytes_per_second": "bandwidth",
}


@dataclass(frozen=True)
class Row:
    """One number of threads and of streams, with a sample for each round.

    `bytes_per_token` are what the memory must give for a token of one stream: its share of the weights,
    and its cache at the mean length of its text.
    """

    threads: int
    streams: int
    bytes_per_token: float
    samples: tuple[Sample, ...]

    @property
    def counted(self) -> list[Sample]:
        """What the medians are over: the quiet samples where there are three, else all."""
        return chosen(self.samples)

    def spread(self, figure: str, unit: float = 1) -> Spread:
        """Of "prefill", "decode" or "bandwidth", in so many tokens or bytes a second."""
        found = Spread.of([getattr(sample, figure) / unit for sample in self.counted])
        if found is None:
            raise RequestError("There is no round to tell of: measure at least one.")
        return found

    @property
    def share(self) -> float:
        """The median share of the limit; above 1 where something came from the processor's own caches."""
        return median(share_of_limit(sample, self.bytes_per_token) for sample in self.counted)

    @property
    def disturbed(self) -> list[int]:
        """The rounds, from 1, in which others took too much of the cores."""
        return [number for number, sample in enumerate(self.samples, 1) if not sample.quiet]

    def data(self) -> dict[str, Any]:
        spreads = {name: self.spread(figure) for name, figure in FIGURES.items()}
        return {
            "threads": self.threads,
            "streams": self.streams,
            "bytes_per_token": self.bytes_per_token,
            **{name: {"median": s.median, "least": s.low, "greatest": s.high} for name, s in spreads.items()},
            "share_of_limit": self.share,
            "samples": [self._sample_data(sample) for sample in self.samples],
        }

    def _sample_data(self, sample: Sample) -> dict[str, Any]:
        return {
            **{name: getattr(sample, figure) for name, figure in FIGURES.items()},
            "share_of_limit": share_of_limit(sample, self.bytes_per_token),
            "share_of_others": sample.others,
            "quiet": None if sample.others is None else sample.quiet,
            "counted": sample in self.counted,
        }

    def cells(self) -> tuple[str, ...]:
        count = len(self.samples)
        known = all(sample.others is not None for sample in self.samples)
        return (
            str(self.threads),
            str(self.streams),
            str(self.spread("prefill")),
            str(self.spread("decode")),
            str(self.spread("bandwidth", 1e9)),
            f"{self.bytes_per_token / 1e6:,.1f}",
            f"{100 * self.share:.0f} %",
            f"{count - len(self.disturbed)} of {count}" if known else "-",
        )


@dataclass(frozen=True)
class Bench:
    """What was measured. `stored` says which formats the weights are in, `machine` what it ran on.

    `load_seconds` are from the source's name to a model that is ready, with whatever of its files the
    system had in memory; `peak_bytes` the resident memory at most, None where the system does not say.
    `notes` say, a sentence each, what to know beside the figures.
    """

    name: str
    stored: str
    runtime: str
    machine: Mapping[str, Any]
    prompt: int
    new: int
    rows: tuple[Row, ...]
    load_seconds: float
    peak_bytes: int | None
    notes: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """For --json."""
        return {
            "source": self.name,
            "stored": self.stored,
            "runtime": self.runtime,
            "machine": dict(self.machine),
            "prompt": self.prompt,
            "new": self.new,
            "rows": [row.data() for row in self.rows],
            "load_seconds": self.load_seconds,
            "peak_memory_bytes": self.peak_bytes,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        machine = self.machine
        rounds = len(self.rows[0].samples)
        cores = _count(machine["cores"], "core")
        yield f"{self.name} ({self.stored}), run by {self.runtime} on {machine['processor']}, {cores}"
        several = f"medians of {rounds} rounds, with the least and the greatest"
        yield (
            f"prompts of {_count(self.prompt, 'token')}, {self.new:,} new ones in each stream; "
            f"{several if rounds > 1 else 'one round'}"
        )
        yield ""
        for cells in (tuple(COLUMNS), *(row.cells() for row in self.rows)):
            yield "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, COLUMNS.values(), strict=True))
        yield ""
        peak = "" if self.peak_bytes is None else f"; {self.peak_bytes / 1e9:.2f} GB of memory at most"
        yield f"Loaded in {self.load_seconds:.2f} s{peak}."
        yield LIMIT
        yield from _disturbed([row for row in self.rows if row.disturbed])
        yield from self.notes


def _disturbed(rows: Sequence[Row]) -> Iterator[str]:
    """Which rounds were, and whether they count."""
    if rows:
        yield f"Others took more than {100 * QUIET:.0f} % of the cores in these rounds:"
    for row in rows:
        left_out = len(row.counted) < len(row.samples)
        yield (
            f"  {_count(row.threads, 'thread')}, {_count(row.streams, 'stream')}: "
            f"{', '.join(map(str, row.disturbed))} "
            f"({'left out' if left_out else 'counted, as fewer than three were quiet'})"
        )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def peers() -> str:
    """How to compare with other engines: by the repository's benchmarks, if this is a checkout."""
    repository = Path(qkv.__file__).resolve().parents[2]
    if (repository / "benchmarks" / "run.py").is_file():
        return (
            f"Run `make bench` in {repository}, or `make bench BENCH=--quick` for five minutes of it: it "
            "measures qkv beside llama.cpp, OpenVINO, CTranslate2 and transformers."
        )
    return (
        "The comparison with llama.cpp, OpenVINO, CTranslate2 and transformers comes with qkv's repository: "
        "`make bench` runs it there."
    )
