"""The report: what was measured as tables of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.cases import Case, Group
from benchmarks.measure import Measured, Outcome, Started
from qkv.benching.figures import Spread, chosen, number, share_of_limit

INTRODUCTION = """# Benchmarks

Written by `make bench`: see [benchmarks/README.md]({guide}) for what is measured, how, and
how to read it. The raw figures are in [benchmarks.json](benchmarks.json).
"""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; columns after the first are numbers, at the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def spread(values: Sequence[float]) -> str:
    """The median, with the least and the greatest value where there are several."""
    found = Spread.of(values)
    if found is None:
        return ""
    if found.count == 1:
        return number(found.median)
    return f"**{number(found.median)}** ({number(found.low)}-{number(found.high)})"


def case_rows(measured: Measured, names: Mapping[str, str]) -> list[list[str]]:
    """A row for each engine that has samples."""
    rows = []
    for engine, outcome in measured.outcomes.items():
        samples = chosen(outcome.samples)
        if not samples:
            continue
        shares = [share_of_limit(sample, measured.bytes_per_token) for sample in samples]
        quiet = sum(sample.quiet for sample in outcome.samples)
        rows.append(
            [
                f"{names.get(engine) or engine}: {outcome.format}",
                spread([sample.prefill for sample in samples]),
                spread([sample.decode for sample in samples]),
                f"{100 * median(shares):.0f} %",
                number(median(outcome.same)),
                f"{quiet} of {len(outcome.samples)}",
            ]
        )
    return rows


HEAD = (
    "engine: format",
    "prefill, tokens/s",
    "decode, tokens/s",
    "of the limit",
    "same tokens",
    "quiet rounds",
)


def cases(found: Sequence[Measured], names: Mapping[str, str]) -> str:
    parts = []
    for measured in found:
        bandwidths = [
            sample.bandwidth / 1e9 for each in measured.outcomes.values() for sample in each.samples
        ]
        if not bandwidths:
            continue
        limit = median(bandwidths) * 1e9 / measured.bytes_per_token
        case = measured.case
        said = (
            f"Memory read at {spread(bandwidths)} GB/s; {measured.bytes_per_token / 1e6:,.1f} MB a token: "
            f"at most {number(limit)} tokens/s. Measured {measured.date}."
        )
        parts += [f"### {title(case)}", said, table(HEAD, case_rows(measured, names))]
    return "\n\n".join(parts)


def title(case: Case) -> str:
    streams = f", {case.streams} streams" if case.streams > 1 else ""
    threads = f"{case.group.threads} thread{'s' * (case.group.threads > 1)}"
    return f"{case.group.type}, {threads}: prompt {case.prompt:,}, {case.new} new{streams}"


SECTIONS: tuple[tuple[str, Callable[[Case], bool]], ...] = (
    ("one stream", lambda case: case.streams == 1 and case.prompt == 512),
    ("long contexts", lambda case: case.streams == 1 and case.prompt != 512),
    ("many streams", lambda case: case.streams > 1),
)


def sections(found: Sequence[Measured], names: Mapping[str, str]) -> list[str]:
    parts = []
    for model in dict.fromkeys(measured.case.group.model for measured in found):
        for heading, belongs in SECTIONS:
            here = [each for each in found if each.case.group.model == model and belongs(each.case)]
            if here:
                parts += [f"## {model}: {heading}", cases(here, names)]
    return parts


def starts(found: Sequence[Started]) -> str:
    """From process start to first token, and the memory that is held after all cases of the group."""
    rows = []
    for each in found:
        if each.seconds:
            held = [f"{each.memory[key] / 1e6:,.0f}" if each.memory else "" for key in ("resident", "peak")]
            rows.append([f"{each.engine}: {group_name(each.group)}", spread(each.seconds), *held])
    return table(("engine: model", "start to first token, s", "resident, MB", "at most, MB"), rows)


def group_name(group: Group) -> str:
    return f"{group.model} {group.type}, {group.threads} thread{'s' * (group.threads > 1)}"


def refusals(found: Sequence[Measured]) -> str:
    """Why there is no figure where there is none, each reason once."""
    reasons: dict[str, list[str]] = {}
    for measured in found:
        for engine, outcome in measured.outcomes.items():
            if outcome.error:
                reasons.setdefault(f"{engine}: {one_line(outcome)}", []).append(str(measured.case))
    return "\n".join(
        f"- {reason} ({len(where)} case{'s' * (len(where) > 1)})" for reason, where in reasons.items()
    )


def one_line(outcome: Outcome) -> str:
    return " ".join(outcome.error.split()).rstrip(".")


def document(
    facts: Mapping[str, Any], found: Sequence[Measured], started: Sequence[Started], guide: str
) -> str:
    """The whole page. `facts` say when, where and under which load it was measured; `guide` tells how."""
    machine = facts["machine"]
    names = {each.engine: each.name for each in started if each.name}
    load = ", ".join(f"{value:.1f}" for value in facts["load_average"])
    about = (
        f"Measured on {machine['processor']}, {machine['cores']} cores "
        f"({', '.join(machine['instructions'])}), {machine['system']}; load average before the last run, "
        f"{facts['date']}: {load}. Engines: {'; '.join(names.values())}."
    )
    parts = [
        INTRODUCTION.format(guide=guide) + "\n" + about,
        "![Decoding and prefill, one stream](benchmarks.svg)",
    ]
    parts += sections(found, names)
    parts += ["## Start and memory", starts(started)]
    missing = refusals(found)
    if missing:
        parts += ["## Not measured", missing]
    return "\n\n".join(parts) + "\n"
