"""A plan as it was made: its numbers as data, and as text with what each was computed from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from qkv.planning.profile import Profile
from qkv.planning.sizes import Part, shown
from qkv.planning.source import Source
from qkv.planning.timing import Crossover, Time
from qkv.planning.weights import Stored

MOST_CONTEXT, MOST_SEQUENCES = 1 << 24, 1 << 20  # where the search for what fits ends
LABEL = 26


@dataclass(frozen=True)
class Asked:
    """What is planned for. Contexts and prefixes in tokens; `memory` in bytes on each device."""

    context: int
    concurrency: int = 1
    prefix: int = 0
    kv: str = "bf16"
    source: int = 0  # rows that an encoder reads
    devices: int = 1
    memory: int | None = None


@dataclass(frozen=True)
class Plan:
    """All bytes are on each device. `most_context` is at the asked concurrency, `most_concurrency` at the
    asked context; None where the memory is not known, 0 where even one token does not fit.
    """

    source: Source
    how: Stored
    asked: Asked
    parts: tuple[Part, ...]
    most_context: int | None
    most_concurrency: int | None
    crossover: Crossover
    profile: Profile | None = None
    prefill: Time | None = None
    decode: Time | None = None
    training: tuple[Part, ...] = ()
    notes: tuple[str, ...] = ()
    device: str | None = None

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def range(self) -> tuple[int, int]:
        """The least and the most that it may be, with each part's band."""
        off = sum(part.bytes * part.band for part in self.parts)
        return round(self.bytes - off), round(self.bytes + off)

    @property
    def fits(self) -> bool | None:
        return None if self.asked.memory is None else self.bytes <= self.asked.memory

    def part(self, beginning: str) -> int:
        """The bytes of all parts whose names begin so."""
        return sum(part.bytes for part in self.parts if part.name.startswith(beginning))

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        asked, speed = self.asked, self.decode
        return {
            "name": self.source.name,
            "parameters": self.source.model.parameters(),
            "active_parameters": self.source.model.parameters(active=True),
            "weights": self.how.name,
            "context": asked.context,
            "concurrency": asked.concurrency,
            "prefix": asked.prefix,
            "kv": asked.kv,
            "devices": asked.devices,
            "memory": asked.memory,
            "parts": [part.data() for part in self.parts],
            "bytes": self.bytes,
            "least": self.range[0],
            "most": self.range[1],
            "fits": self.fits,
            "most_context": self.most_context,
            "most_concurrency": self.most_concurrency,
            "prefill": self.prefill.data() if self.prefill else None,
            "decode": speed.data() if speed else None,
            "tokens_per_second": asked.concurrency / speed.seconds if speed else None,
            "machine": self.profile.name if self.profile else None,
            "crossover": {"scores": self.crossover.scores, "attention": self.crossover.attention},
            "training": [part.data() for part in self.training],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(lines(self))


def lines(found: Plan) -> Iterator[str]:
    """Each number with what it was computed from, numbers in a column."""
    asked, model = found.asked, found.source.model
    many = f", {asked.concurrency:,} sequences" if asked.concurrency > 1 else ""
    over = f", on each of {asked.devices} devices" if asked.devices > 1 else ""
    yield f"{found.source.name}: {asked.context:,} tokens of context{many}{over}"
    active = model.parameters(active=True)
    used = f", {active:,} of them for a token" if active != model.parameters() else ""
    yield f"{model.parameters():,} parameters{used}; weights {found.how.name}, cache {asked.kv}"
    yield ""
    for part in found.parts:
        yield row(part)
    least, most = found.range
    yield f"{'in all':<{LABEL}}{shown(found.bytes):>12}  between {shown(least)} and {shown(most)}"
    for said in (fit, speed, crossover):
        yield from _apart(said(found))
    if found.training:
        yield ""
        yield "Training, AdamW in mixed precision:"
        for part in found.training:
            yield row(part)
        yield f"{'in all':<{LABEL}}{shown(sum(p.bytes for p in found.training)):>12}"
    if found.notes:
        yield ""
        yield from found.notes


def _apart(said: Iterator[str]) -> Iterator[str]:
    """Lines with an empty one before them, where there are any."""
    found = list(said)
    yield from ["", *found] if found else []


def row(part: Part) -> str:
    off = f" (to {part.band:.0%})" if part.band else ""
    return f"{part.name:<{LABEL}}{shown(part.bytes):>12}  {part.formula}{off}"


def fit(found: Plan) -> Iterator[str]:
    """Whether it fits, and the most that would; nothing where the memory is not known."""
    asked = found.asked
    if asked.memory is None:
        return
    verdict = "fits" if found.fits else "does NOT fit"
    yield f"It {verdict} in {shown(asked.memory)}{' each' if asked.devices > 1 else ''}."
    context, sequences = found.most_context or 0, found.most_concurrency or 0
    each = f" each for {asked.concurrency:,} sequences" if asked.concurrency > 1 else ""
    more = " or more" if context >= MOST_CONTEXT else ""
    yield f"Largest context that fits{each}: {context:,} tokens{more}."
    more = " or more" if sequences >= MOST_SEQUENCES else ""
    yield f"Sequences of {asked.context:,} tokens that fit: {sequences:,}{more}."


def speed(found: Plan) -> Iterator[str]:
    """How long steps take, with what that was computed from; or how to find out."""
    if found.profile is None or found.prefill is None or found.decode is None:
        yield "No times: measure this machine once (qkv plan --measure), or name a --device."
        return
    yield f"On {found.profile.name} ({found.profile.said_by}):"
    yield _timed(f"reading {found.asked.context:,} tokens", found.prefill)
    yield _timed("each further token", found.decode)
    many = found.asked.concurrency
    low, high = (many / seconds for seconds in reversed(found.decode.range))
    yield f"  {many / found.decode.seconds:,.1f} tokens a second in all, between {low:,.1f} and {high:,.1f}"


def _timed(what: str, time: Time) -> str:
    low, high = time.range
    between = f"between {_seconds(low)} and {_seconds(high)}"
    return f"  {what}: {_seconds(time.seconds)}, {between}\n      {time.formula}"


def _seconds(value: float) -> str:
    return f"{value:,.2f} s" if value >= 1 else f"{1e3 * value:,.2f} ms"


def crossover(found: Plan) -> Iterator[str]:
    """From which length on attention costs more than the feed-forward."""
    scores, attention = found.crossover.scores, found.crossover.attention
    if scores is None and attention is None:
        return
    yield (
        f"Attention costs more operations than the feed-forward from {_at(attention)} on, "
        f"scores and mixtures alone from {_at(scores)}."
    )


def _at(tokens: int | None) -> str:
    return "no length" if tokens is None else f"{tokens:,} tokens"
