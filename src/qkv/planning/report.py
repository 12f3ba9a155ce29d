"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator

from qkv.planning.plan import MOST_CONTEXT, MOST_SEQUENCES, Plan
from qkv.planning.sizes import Part, shown
from qkv.planning.timing import Time

LABEL = 26


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
    yield ""
    yield from _fit(found)
    yield from _speed(found)
    yield from _crossover(found)
    if found.training:
        yield ""
        yield "Training, AdamW in mixed precision:"
        for part in found.training:
            yield row(part)
        yield f"{'in all':<{LABEL}}{shown(sum(p.bytes for p in found.training)):>12}"
    if found.notes:
        yield ""
        yield from found.notes


def row(part: Part) -> str:
    off = f" (to {part.band:.0%})" if part.band else ""
    return f"{part.name:<{LABEL}}{shown(part.bytes):>12}  {part.formula}{off}"


def _fit(found: Plan) -> Iterator[str]:
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


def _speed(found: Plan) -> Iterator[str]:
    if found.profile is None or found.prefill is None or found.decode is None:
        yield "No times: measure this machine once (qkv plan --measure), or name a --device."
        return
    yield ""
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


def _crossover(found: Plan) -> Iterator[str]:
    scores, attention = found.crossover.scores, found.crossover.attention
    if scores is None and attention is None:
        return
    yield ""
    yield (
        f"Attention costs more operations than the feed-forward from {_at(attention)} on, "
        f"scores and mixtures alone from {_at(scores)}."
    )


def _at(tokens: int | None) -> str:
    return "no length" if tokens is None else f"{tokens:,} tokens"
