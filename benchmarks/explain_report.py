"""The page of what `benchmarks.explain` found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report import spread, table
from qkv.benching.figures import QUIET

INTRODUCTION = """# Explaining, beside TransformerLens

Written by `make bench-explain`: see [benchmarks/README.md](../benchmarks/README.md#explaining) for how. The
raw figures are in [explaining.json](explaining.json).
"""


def worst(parity: Mapping[str, Mapping[str, float]]) -> str:
    """The method with the largest difference, in words."""
    name = max(parity, key=lambda method: parity[method]["difference"])
    return f"at most {parity[name]['difference']:.1e} ({name})"


def ratios(samples: Mapping[str, Sequence[Mapping[str, float]]], key: str) -> list[float]:
    """How many times as long the second side takes as the first, round by round."""
    ours, theirs = samples.values()
    return [their[key] / our[key] for our, their in zip(ours, theirs, strict=True)]


def document(facts: Mapping[str, Any], methods: Mapping[str, str]) -> str:
    return "\n".join([INTRODUCTION, _where(facts), _parity(facts, methods), _speed(facts), _memory(facts)])


def _where(facts: Mapping[str, Any]) -> str:
    machine = facts["machine"]
    sides = "; ".join(facts["speed"]["explainers"].values())
    threads = _count(facts["threads"], "thread")
    when = ", ".join(f"{part} on {date}" for part, date in facts["dates"].items())
    return (
        f"Measured on {machine['processor']}, {machine['cores']} cores "
        f"({', '.join(machine['instructions'])}), {machine['system']}, with {threads} each, in float32: "
        f"{sides}. Done: {when}.\n"
    )


def _parity(facts: Mapping[str, Any], methods: Mapping[str, str]) -> str:
    rows = [
        [methods[name], f"{found['difference']:.1e}", f"{found['largest']:.2f}"]
        for name, found in facts["parity"].items()
    ]
    shape = _shape(facts["shapes"]["parity"])
    head = ("method", "largest difference", "largest number")
    return f"## The same numbers\n\nGPT-2's kind with random weights: {shape}.\n\n{table(head, rows)}\n"


def _speed(facts: Mapping[str, Any]) -> str:
    speed = facts["speed"]
    rows = []
    for name, samples in speed["samples"].items():
        clock, processor = ([each[key] for each in samples] for key in ("seconds", "processor_seconds"))
        quiet = sum(each["others"] <= QUIET for each in samples)
        rows.append(
            [speed["explainers"][name], spread(clock), spread(processor), f"{quiet} of {len(samples)}"]
        )
    clock, processor = (ratios(speed["samples"], key) for key in ("seconds", "processor_seconds"))
    rows.append(["times as fast, round by round", spread(clock), spread(processor), ""])
    head = ("sweep over every head, zeroed", "seconds", "seconds of processor", "quiet rounds")
    shape = f"{_shape(facts['shapes']['speed'])}; a prompt of {facts['tokens']} tokens"
    return (
        f"## A sweep over every head\n\n{shape}. In turns, medians of {_count(len(clock), 'round')} with the "
        f"least and the greatest. The effects differ by {speed['difference']:.1e} at most.\n\n"
        f"{table(head, rows)}\n"
    )


def _memory(facts: Mapping[str, Any]) -> str:
    rows = [
        [found["explainer"], *(_megabytes(found[key]) for key in ("usual", "returned", "bound"))]
        for found in facts["memory"].values()
    ]
    head = ("the same sweep", "resident more, MB", "where all is returned, MB", "stated beforehand, MB")
    how = (
        "In a process of its own each, after a sweep on two tokens has read all weights and code. The first "
        "is what the system sees; the second, where the heap gives back at once what is freed. What is "
        "stated is that of tensors, without the holes that a heap is left with."
    )
    return f"## Memory\n\n{how}\n\n{table(head, rows)}\n"


def _shape(shape: Mapping[str, int]) -> str:
    return (
        f"{shape['layers']} layers, width {shape['width']}, {shape['heads']} heads, {shape['vocab']:,} tokens"
    )


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
