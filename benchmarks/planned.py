"""What plans say beside what runs take: python -m benchmarks.planned [--rounds 5]

Each round measures the machine as `qkv plan --measure` does, and then runs every model at several contexts
and concurrencies, in a process of its own each: medians over the rounds are compared, as machines drift.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.machine import resident, wait_for_quiet
from benchmarks.models import GEMMA, RANDOM_1B, SMOLLM2, Files
from benchmarks.prompts import Prompts
from benchmarks.report import table
from benchmarks.run import DOCS, WORK, prompts, say
from benchmarks.workers import Worker, commands
from qkv.benching.figures import QUIET
from qkv.benching.machine import Moment, described
from qkv.benching.profile import BAND, measured
from qkv.planning import Profile, plan
from qkv.planning.source import read
from qkv.planning.timing import Time

MODELS = {SMOLLM2: "Q4_1", GEMMA: "Q4_K_M", RANDOM_1B: "Q4_0"}
POINTS = ((128, 1), (1024, 1), (4096, 1), (512, 8), (256, 24))  # tokens of a context, and sequences
NEW = 24  # tokens that each sequence is continued by
WITHIN = {"memory": 0.05, "prompt": BAND, "step": BAND}  # how far a run may be from its plan
INTRODUCTION = """# Plans, beside what runs take

Written by `make bench-plan`: see [benchmarks/README.md](../benchmarks/README.md#planning) for how. The raw
figures, round by round, are in [planning.json](planning.json).
"""


@dataclass(frozen=True)
class Found:
    """Bytes that are resident, seconds to read a prompt, and those of a step of all sequences."""

    memory: float
    prompt: float
    step: float


@click.command()
@click.option("--rounds", default=5, help="How often everything is measured.")
@click.option("--threads", default=os.cpu_count() or 1, help="Threads of all runs.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(MODELS)), help="Only this: a report keeps others."
)
@click.option("--patience", default=60.0, help="Seconds to wait for a quiet machine before each round.")
@click.option("--out", type=click.Path(path_type=Path), default=DOCS, help="Where the report goes.")
def main(rounds: int, threads: int, only: tuple[str, ...], patience: float, out: Path) -> None:
    """Compares plans with runs; says which are off by more than they may."""
    report = out / "planning.json"
    facts: dict[str, Any] = json.loads(report.read_text()) if only and report.exists() else {"models": {}}
    facts |= {"machine": described(), "threads": threads}
    texts = prompts()
    for name in only or MODELS:
        file = Files(name, WORK / "models").gguf(MODELS[name])
        samples = []
        for number in range(rounds):
            wait_for_quiet(patience)
            samples.append(list(compared(file, texts, number, threads)))
        when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        facts["models"][name] = {"type": MODELS[name], "date": when, "samples": samples}
    out.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(facts, indent=1) + "\n")
    report.with_suffix(".md").write_text(document(facts))
    off = [line for name in facts["models"] for line in far_off(facts, name)]
    say(f"Written to {out}; beyond their bands: {'; '.join(off) or 'none'}")


def compared(file: Path, texts: Prompts, number: int, threads: int) -> Iterator[dict[str, Any]]:
    """A round: at each point what a run took, what the plan says, and what others took of the machine."""
    profile = measured(threads, formats=(read(file).how.matrices,))
    for context, sequences in POINTS:
        took, others = run(file, texts, number, threads, context, sequences)
        said = planned(file, profile, context, sequences)
        ratios = ", ".join(f"{key} {asdict(said)[key] / value:.2f}" for key, value in asdict(took).items())
        say(f"{file.stem}, {context} x {sequences}, round {number + 1}, plan over run: {ratios}")
        yield {"took": asdict(took), "plan": asdict(said), "others": others}


def run(
    file: Path, texts: Prompts, number: int, threads: int, context: int, sequences: int
) -> tuple[Found, float]:
    """A process that reads one prompt of the whole context, and then ends so many texts together.

    Besides, the share of all cores that others had meanwhile.
    """
    with Worker(commands()["qkv"], WORK / "planned.log", threads) as worker:

        def rate(name: str, given: list[list[int]], new: int) -> float:
            answer = worker.ask(do="prefill_decode", prompts=given, new=new)
            return float(answer[f"{name}_tokens_per_s"])

        worker.ask(do="load", gguf=str(file), folder=None, type="", threads=threads)
        rate("decode", texts.take(number + 1, sequences, 64), 4)  # what is done at first is not counted
        before = Moment.now(worker.process.pid)
        prompt = context / rate("prefill", texts.take(number, 1, context), 1)
        step = sequences / rate("decode", texts.take(number, sequences, context - NEW), NEW)
        others = before.others(Moment.now(worker.process.pid), os.cpu_count() or 1)
        memory = resident(worker.process.pid)["resident"]
    return Found(memory, prompt, step), others


def planned(file: Path, profile: Profile, context: int, sequences: int) -> Found:
    found = plan(file, context=context, concurrency=sequences, profile=profile)
    return Found(found.bytes, seconds(found.prefill), seconds(found.decode))


def seconds(time: Time | None) -> float:
    if time is None:
        raise ValueError("A plan without a profile has no times.")
    return time.seconds


def medians(samples: Sequence[Sequence[Mapping[str, Any]]], point: int) -> list[tuple[str, float, float]]:
    """Of each figure at a point: what runs took and what plans said, in the middle of the rounds."""
    rounds = [each[point] for each in samples]
    both = [{key: median(each[of][key] for each in rounds) for key in WITHIN} for of in ("took", "plan")]
    return [(key, both[0][key], both[1][key]) for key in WITHIN]


def far_off(facts: Mapping[str, Any], name: str) -> list[str]:
    return [
        f"{name}, {context} x {sequences}, {key} {said / took:.2f}"
        for point, (context, sequences) in enumerate(POINTS)
        for key, took, said in medians(facts["models"][name]["samples"], point)
        if abs(took / said - 1) > WITHIN[key]
    ]


def document(facts: Mapping[str, Any]) -> str:
    machine = facts["machine"]
    where = (
        f"Measured on {machine['processor']}, {machine['cores']} cores "
        f"({', '.join(machine['instructions'])}), {machine['system']}, with {facts['threads']} threads. "
        "Medians of the rounds; in brackets the plan over the run in each round, least to greatest.\n"
    )
    return "\n".join([INTRODUCTION, where, *(_model(name, each) for name, each in facts["models"].items())])


def _model(name: str, found: Mapping[str, Any]) -> str:
    samples = found["samples"]
    quiet = sum(all(each["others"] <= QUIET for each in one) for one in samples)
    rows = []
    for point, (context, sequences) in enumerate(POINTS):
        row = [f"{context:,} x {sequences}"]
        for key, took, said in medians(samples, point):
            ratios = [one[point]["plan"][key] / one[point]["took"][key] for one in samples]
            scale, digits = (1e-6, 0) if key == "memory" else (1e3, 1)
            row += [f"{took * scale:,.{digits}f}", f"{said * scale:,.{digits}f}"]
            row.append(f"**{said / took:.2f}** ({min(ratios):.2f}-{max(ratios):.2f})")
        rows.append(row)
    head = ["context x sequences"]
    for what in ("resident, MB", "prompt, ms", "step, ms"):
        head += [what, "plan", "plan / run"]
    return (
        f"## {name} {found['type']}\n\n{found['date']}; {len(samples)} rounds, {quiet} of them quiet.\n\n"
        f"{table(head, rows)}\n"
    )


if __name__ == "__main__":
    main()
