"""The benchmarks, one command: python -m benchmarks.run [--quick]; see README.md beside this file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

import qkv.sources
from benchmarks import cases, environments, measure, picture, report, workers
from benchmarks.machine import Bandwidth
from benchmarks.prompts import Prompts
from qkv.benching.machine import described
from qkv.checkpoints import read_gguf
from qkv.text import from_gguf

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work"
DOCS = HERE.parent / "docs"


@click.command()
@click.option("--quick", is_flag=True, help="A few cases, three rounds: about five minutes.")
@click.option("--only", multiple=True, help="Only cases whose name holds this text: 'Q8_0, 2 threads'.")
@click.option("--engines", help="Only these engines: qkv,llama. The first is whose tokens are compared with.")
@click.option("--extra", multiple=True, metavar="NAME=COMMAND", help="One more engine: a worker's command.")
@click.option("--threads", help="Numbers of threads: 1,2. Without it one, and as many as there are cores.")
@click.option("--rounds", type=int, help="Rounds of each case, instead of its own number.")
@click.option("--patience", type=float, default=60, help="Seconds to wait for a quiet machine, each time.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the report goes instead of docs/.")
def main(
    quick: bool,
    only: tuple[str, ...],
    engines: str | None,
    extra: tuple[str, ...],
    threads: str | None,
    rounds: int | None,
    patience: float,
    out: Path | None,
) -> None:
    """Measures qkv side by side with its peers, and writes benchmarks.json, .md and .svg."""
    counts = [int(count) for count in threads.split(",")] if threads else [1, os.cpu_count() or 1]
    chosen = cases.quick(counts) if quick else cases.full(counts)
    chosen = cases.narrowed(chosen, only, rounds)
    commands = selected(workers.commands(extra), engines)
    missing = [peer for peer in environments.ENGINES if not environments.ready(peer)]
    if missing:
        say(f"Not set up, and left out: {', '.join(missing)} (python -m benchmarks.environments)")
    WORK.mkdir(exist_ok=True)
    bench = measure.Bench(
        commands=commands,
        prompts=prompts(),
        bandwidth=Bandwidth(HERE / "bandwidth.cpp", WORK),
        work=WORK,
        starts=1 if quick or rounds else 3,
        patience=patience,
        say=say,
    )
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": described(),
        "load_average": os.getloadavg(),
    }
    place = out or (WORK / "quick" if quick else DOCS)
    measured, started = kept(place, facts["machine"]) if only else ([], [])
    for group, here in cases.grouped(chosen).items():
        more, begun = bench.group(group, here)
        measured, started = joined(measured, more), added(started, begun)
        write(place, facts, measured, started)  # after each group: a run that is stopped keeps what it has
    say(f"Written to {place}")


def selected(commands: dict[str, list[str]], wanted: str | None) -> dict[str, list[str]]:
    """The engines that were asked for, in that order; all of them without a word."""
    if wanted is None:
        return commands
    names = wanted.split(",")
    unknown = [name for name in names if name not in commands]
    if unknown:
        raise click.BadParameter(f"{unknown[0]} is not here ({', '.join(commands)}).")
    return {name: commands[name] for name in names}


def prompts() -> Prompts:
    """Prompts by the packaged model's tokenizer, whose vocabulary all models here have."""
    return Prompts.of_python(from_gguf(read_gguf(qkv.sources.find("smollm2")).metadata).encode)


def kept(folder: Path, machine: Mapping[str, Any]) -> tuple[list[measure.Measured], list[measure.Started]]:
    """What the report there holds, where there is one. Refuses a report of another machine: one is of one."""
    report = folder / "benchmarks.json"
    if not report.exists():
        return [], []
    data = json.loads(report.read_text())
    for fact in ("processor", "cores", "instructions"):
        if data["machine"][fact] != machine[fact]:
            was = data["machine"]["processor"]
            raise click.ClickException(f"The report in {folder} is of another machine ({was}): choose --out.")
    return [measure.Measured.of(each) for each in data["cases"]], [
        measure.Started.of(each) for each in data["starts"]
    ]


def joined(before: list[measure.Measured], now: list[measure.Measured]) -> list[measure.Measured]:
    """What was measured again takes its old place, as a whole: engines are compared in one run."""
    found = list(before)
    for new in now:
        place = next((n for n, old in enumerate(found) if cases.same(old.case, new.case)), len(found))
        found[place : place + 1] = [new]
    return found


def added(before: list[measure.Started], now: list[measure.Started]) -> list[measure.Started]:
    """Those of engines and groups without any as well: a part of a group's cases needs less memory."""
    held = {(each.group, each.engine) for each in before}
    return before + [each for each in now if (each.group, each.engine) not in held]


def write(
    folder: Path,
    facts: dict[str, Any],
    measured: list[measure.Measured],
    started: list[measure.Started],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        **facts,
        "cases": [each.data() for each in measured],
        "starts": [each.data() for each in started],
    }
    guide = os.path.relpath(HERE / "README.md", folder.resolve())
    (folder / "benchmarks.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "benchmarks.md").write_text(report.document(facts, measured, started, guide))
    (folder / "benchmarks.svg").write_text(picture.draw(measured))


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
