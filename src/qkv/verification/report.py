"""What was measured, as a table for people and as data for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

PIECE = 100  # tokens a step: no multiple of the blocks of a cache or of the rows of a kernel


@dataclass(frozen=True)
class Row:
    """One runtime against the reference, over all tokens.

    `difference` is max|a - b| / max|b| of its answers; `divergence` the mean Kullback-Leibler
    divergence of its probabilities from the reference's, in nats; `agreement` how often the likeliest
    token is the same, from 0 to 1; `speed` tokens a second of reading, every token's answer included.
    None is what the model, or the reference's own row, does not have. `threads` and `pieces` are
    whether another number of threads, and reading in pieces, changed no bit.
    """

    what: str
    speed: float
    difference: float | None = None
    divergence: float | None = None
    agreement: float | None = None
    perplexity: float | None = None
    threads: bool | None = None
    pieces: bool | None = None


@dataclass(frozen=True)
class Verification:
    """What was measured. `absent` says, a sentence each, what could not be compared, and why.

    `problems` are the bounds that were exceeded, a sentence each. `threads` are the two numbers of
    threads that were compared, None where the native runtime did not run.
    """

    name: str
    text: str
    tokens: int
    rows: tuple[Row, ...]
    absent: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    threads: tuple[int, int] | None = None

    @property
    def passed(self) -> bool:
        """Whether something was compared, and nothing exceeded its bound."""
        return len(self.rows) > 1 and not self.problems

    @property
    def verdict(self) -> str:
        if self.problems:
            return "Not verified: " + " ".join(self.problems)
        if len(self.rows) == 1:
            return "Not verified: there is nothing here to compare the reference with."
        if self.threads is None:
            return "The reference agrees with transformers; the native runtime was not compared."
        beside = ", and both with transformers" if self.rows[-1].what.startswith("transformers") else ""
        return f"Verified: the native runtime agrees with the reference{beside}."

    def data(self) -> dict[str, Any]:
        """For --json. A number that is none (not finite) is null."""
        return {
            "source": self.name,
            "text": self.text,
            "tokens": self.tokens,
            "threads": list(self.threads) if self.threads else None,
            "rows": [_row_data(row) for row in self.rows],
            "absent": list(self.absent),
            "problems": list(self.problems),
            "passed": self.passed,
            "verdict": self.verdict,
        }

    def __str__(self) -> str:
        width = max(len(row.what) for row in self.rows)
        head = ("difference", "KL, nats", "same top token", "perplexity", "tokens/s")
        lines = [f"{self.name}, {self.tokens:,} tokens of {self.text}", ""]
        lines.append(f"{'':<{width}}" + "".join(f"  {name:>{_width(name)}}" for name in head))
        for row in self.rows:
            cells = zip(head, _cells(row), strict=True)
            lines.append(f"{row.what:<{width}}" + "".join(f"  {cell:>{_width(n)}}" for n, cell in cells))
        lines.append("")
        if self.threads is not None:
            low, high = sorted(self.threads)
            lines.append(f"same bits on {low} and {high} threads: {_all(row.threads for row in self.rows)}")
            lines.append(f"same bits at once and in pieces of {PIECE}: {_all(r.pieces for r in self.rows)}")
        return "\n".join([*lines, *self.absent, self.verdict])


def _row_data(row: Row) -> dict[str, Any]:
    found = {
        "what": row.what,
        "difference": row.difference,
        "kl_divergence": row.divergence,
        "top_token_agreement": row.agreement,
        "perplexity": row.perplexity,
        "tokens_per_second": row.speed,
        "same_bits_on_other_threads": row.threads,
        "same_bits_in_pieces": row.pieces,
    }
    return {key: None if isinstance(v, float) and not isfinite(v) else v for key, v in found.items()}


def _width(name: str) -> int:
    return max(len(name), 10)


def _cells(row: Row) -> tuple[str, ...]:
    values = (row.difference, row.divergence, row.agreement, row.perplexity, row.speed)
    shapes = ("{:.1e}", "{:.1e}", "{:.1%}", "{:,.3f}", "{:,.0f}")
    cells = ["-" if value is None else form.format(value) for form, value in zip(shapes, values, strict=True)]
    cells[2] = cells[2].replace("%", " %")
    return tuple(cells)


def _all(found: Iterable[bool | None]) -> str:
    each = [one for one in found if one is not None]
    return "not compared, as every place reads all others" if not each else "yes" if all(each) else "NO"
