"""Explanations side by side with TransformerLens: python -m benchmarks.explain [--rounds 7]

One run compares what both find on the same random weights of GPT-2's shape, times a sweep over every head
in turns, and weighs what a sweep takes of memory; see README.md beside this file.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import environments, explain_report, gpt2
from benchmarks.explainers.protocol import METHODS, Question
from benchmarks.workers import Worker
from qkv.benching.figures import rotated
from qkv.benching.machine import Moment, described

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work" / "explain"
DOCS = HERE.parent / "docs"
PARTS = ("parity", "memory", "speed")
OURS, THEIRS = "qkv", "transformer_lens"
TOLERANCE = 1e-4  # of the largest difference, where numbers are logits
RETURNED = ("MALLOC_MMAP_THRESHOLD_=65536",)  # larger blocks are the system's own, not holes in a heap
SMALL = gpt2.Shape(layers=6, width=256, heads=8, vocab=1000)
LARGE = gpt2.Shape(layers=12, width=768, heads=12, vocab=50257)  # GPT-2's own, the smallest
SPREAD = 0.1  # of the small model's matrices: its logits then spread over some 20


@click.command()
@click.option("--rounds", default=7, help="Sweeps of each side that are timed.")
@click.option("--threads", default=1, help="Threads of both sides.")
@click.option("--length", default=64, help="Tokens of the prompt that is timed.")
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Only this: a report keeps the rest.")
@click.option("--out", type=click.Path(path_type=Path), default=DOCS, help="Where the report goes.")
def main(rounds: int, threads: int, length: int, only: tuple[str, ...], out: Path) -> None:
    """Compares, times and weighs both sides; fails where they differ by more than the tolerance."""
    if not environments.ready(THEIRS):
        sys.exit(f"It takes its peer: python -m benchmarks.environments {THEIRS}")
    chosen = only or PARTS
    report = out / "explaining.json"
    facts = json.loads(report.read_text()) if only and report.exists() else {"dates": {}}
    facts |= {
        "machine": described(),
        "threads": threads,
        "tokens": length,
        "shapes": {"parity": asdict(SMALL), "speed": asdict(LARGE)},
    }
    asked = question(LARGE, length)
    work: dict[str, Callable[[], Any]] = {
        "parity": lambda: compared(
            gpt2.write(WORK / "small", SMALL, spread=SPREAD), question(SMALL, 20), threads
        ),
        "memory": lambda: weighed(gpt2.write(WORK / "gpt2", LARGE), asked, threads),
        "speed": lambda: timed(gpt2.write(WORK / "gpt2", LARGE), asked, threads, rounds),
    }
    for part in chosen:
        facts[part] = work[part]()
        facts["dates"][part] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        say(f"done: {part}")
    out.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(facts, indent=1) + "\n")
    report.with_suffix(".md").write_text(explain_report.document(facts, METHODS))
    say(f"Written to {out}; they differ by {explain_report.worst(facts['parity'])}")
    if any(each["difference"] > TOLERANCE for each in facts["parity"].values()):
        sys.exit(f"They differ by more than {TOLERANCE:g}: {explain_report.worst(facts['parity'])}")


def question(shape: gpt2.Shape, length: int) -> Question:
    generator = np.random.default_rng(1)
    prompt, other, *reference = generator.integers(0, shape.vocab, (7, length)).tolist()
    return Question(prompt, other, reference, token=5, against=9)


@contextmanager
def started(name: str, folder: Path, threads: int, *settings: str) -> Iterator[tuple[Worker, str]]:
    """A side's process with the model loaded, and what it calls itself; settings are of its environment."""
    python = sys.executable if name == OURS else str(environments.python(name))
    program = HERE / "explainers" / f"{name}_worker.py"
    with Worker(["env", *settings, python, str(program)], WORK / f"{name}.log", threads) as worker:
        yield worker, worker.ask(do="load", folder=str(folder), threads=threads)["explainer"]


def compared(folder: Path, asked: Question, threads: int) -> dict[str, dict[str, float]]:
    """By method: the largest difference of the two sides, and the largest number."""
    found: dict[str, Mapping[str, np.ndarray]] = {}
    for name in (OURS, THEIRS):
        out = WORK / f"{name}.npz"
        with started(name, folder, threads) as (worker, _):
            worker.ask(do="answers", question=asdict(asked), out=str(out))
        found[name] = np.load(out)
    return {
        method: {
            "difference": float(np.abs(found[OURS][method] - found[THEIRS][method]).max()),
            "largest": float(np.abs(found[THEIRS][method]).max()),
        }
        for method in METHODS
    }


def weighed(folder: Path, asked: Question, threads: int) -> dict[str, dict[str, Any]]:
    """What a sweep takes, in a process of its own each: as it is, and where the heap keeps no holes."""
    found: dict[str, dict[str, Any]] = {}
    for name in (OURS, THEIRS):
        for how, settings in (("usual", ()), ("returned", RETURNED)):
            with started(name, folder, threads, *settings) as (worker, called):
                taken = worker.ask(do="memory", question=asdict(asked))
            found.setdefault(name, {"explainer": called, "bound": taken["bound"]})[how] = taken["growth"]
    return found


def timed(folder: Path, asked: Question, threads: int, rounds: int) -> dict[str, Any]:
    """Sweeps in turns, each side first in every other round, after one of each that is not counted."""
    samples: dict[str, list[dict[str, Any]]] = {OURS: [], THEIRS: []}
    with ExitStack() as running:
        sides = {name: running.enter_context(started(name, folder, threads)) for name in samples}
        values = {name: np.array(swept(worker, asked)["values"]) for name, (worker, _) in sides.items()}
        for number in range(rounds):
            for name in rotated(list(sides), number):
                taken = swept(sides[name][0], asked)
                samples[name].append({key: taken[key] for key in ("seconds", "processor_seconds", "others")})
                say(f"{name}: {taken['seconds']:.1f} s, {taken['processor_seconds']:.1f} s of processor")
    return {
        "explainers": {name: called for name, (_, called) in sides.items()},
        "samples": samples,
        "difference": float(np.abs(values[OURS] - values[THEIRS]).max()),
    }


def swept(worker: Worker, asked: Question) -> dict[str, Any]:
    """A sweep, with the share of all cores that others had meanwhile."""
    before = Moment.now(worker.process.pid)
    taken = worker.ask(do="sweep", question=asdict(asked))
    others = before.others(Moment.now(worker.process.pid), os.cpu_count() or 1)
    return {**taken, "others": others}


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
