"""Commands that read a model: what it is, what it takes, whether it is right."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import click

from qkv.commands.group import command, write
from qkv.console import progress
from qkv.errors import RequestError, UnsupportedError
from qkv.options import json_option, path_option, planning


@command(
    "qkv inspect ./Llama-3.1-8B",
    "qkv inspect config.json --html llama.html",
    "qkv inspect smollm2 --json",
)
@click.argument("source", default="smollm2")
@json_option
@path_option("--html", "one offline page")
@path_option("--svg", "the structure diagram")
def inspect(source: str, as_json: bool, html: Path | None, svg: Path | None) -> None:
    """Read a model's structure and the context it really supports; no weights are read.

    SOURCE is a folder, config.json, .gguf file, hub name, or smollm2.
    """
    from qkv import inspection

    found = inspection.inspect(source)
    if svg is not None:
        if found.model is None:
            raise UnsupportedError(f"{found.name} could not be described, so there is nothing to draw.")
        write(svg, inspection.diagram(found.model, found.name))
    if html is not None:
        write(html, inspection.page(found))
    if as_json:
        click.echo(json.dumps(found.data(), ensure_ascii=False))
    elif html is None and svg is None:
        click.echo(str(found))


@command("qkv compare ./Llama-3.1-8B ./Qwen3-8B", "qkv compare smollm2 ./Qwen3-8B --html both.html")
@click.argument("left")
@click.argument("right")
@json_option
@path_option("--html", "one offline page")
def compare(left: str, right: str, as_json: bool, html: Path | None) -> None:
    """Show only what differs between two models, and what follows from it."""
    from qkv import inspection

    found = inspection.compare(left, right)
    if html is not None:
        write(html, inspection.page(found))
    if as_json:
        click.echo(json.dumps(found.data(), ensure_ascii=False))
    elif html is None:
        click.echo(str(found))


@command(
    "qkv plan smollm2 --context 8k --concurrency 16",
    "qkv plan ./Llama-3.1-8B --memory 24GiB --weights q4_k --kv int8 --prefix 1k",
    "qkv plan ./config.json --device h100 --tensor-parallel 8 --html plan.html",
    "qkv plan --measure",
    note="Of this machine, times are known once it was measured (--measure; a minute or two).",
)
@click.argument("source", default="smollm2")
@planning
@click.option("--measure", is_flag=True, help="Measure this machine first, and keep the figures.")
@click.option("--threads", "-t", type=click.IntRange(min=1), help="Of --measure; default one for each core.")
@json_option
@path_option("--html", "one offline page, with curves")
def plan(
    source: str, measure: bool, threads: int | None, as_json: bool, html: Path | None, **asked: Any
) -> None:
    """Say what a model would take: memory by part, what fits, how fast. No weights are read.

    SOURCE is a folder, config.json, .gguf file, hub name, or smollm2.
    """
    from qkv import planning as sizing

    if threads is not None and not measure:
        raise RequestError("--threads is of --measure: give both.")
    if measure:
        from qkv.benching.profile import measured

        with progress("measuring") as report:
            measured(threads, progress=report).save(sizing.here())
    kept = sizing.here()
    if asked["device"] is None and kept.is_file():
        asked["profile"] = sizing.Profile.read(kept)
    found = sizing.plan(source, **{**asked, "prefix": asked["prefix"] or 0})
    if html is not None:
        write(html, sizing.page(found))
    if as_json:
        click.echo(json.dumps(found.data(), ensure_ascii=False, allow_nan=False))
    elif html is None:
        click.echo(str(found))


@command(
    "qkv convert ./Llama-3.1-8B llama.gguf",
    "qkv convert ./Qwen3-8B qwen.gguf --type Q8_0",
    "qkv convert model.gguf smaller.gguf --type Q4_K --json",
    note="Types: F32, F16, BF16, Q8_0, Q6_K, Q5_K, Q5_1, Q5_0, Q4_K, Q4_1, Q4_0.",
)
@click.argument("source")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--type", help="What matrices are stored in; default the types they have, without loss.")
@click.option("--ignore", multiple=True, help="A configuration key or tensor to do without.")
@json_option
def convert(source: str, out: Path, type: str | None, ignore: tuple[str, ...], as_json: bool) -> None:
    """Write a model as one .gguf file, and what each type in it cost in bytes and in error.

    SOURCE is a folder, a .gguf file, hub name, or smollm2.
    """
    from qkv import conversion

    with progress("converting") as report:
        done = conversion.convert(source, out, type, ignore, report)
    click.echo(json.dumps(done.data(), ensure_ascii=False) if as_json else str(done))


@command(
    "qkv verify smollm2",
    "qkv verify ./Llama-3.2-1B --text book.txt --tokens 2048",
    "qkv verify model.gguf --format Q8_0 --format Q4_K --json",
    note="Ends with status 1 where anything differs by more than it may.",
)
@click.argument("source", default="smollm2")
@click.option("--text", type=click.Path(path_type=Path), help="Read this file; default a text of qkv's own.")
@click.option("--tokens", type=int, default=512, show_default=True, help="At most so many of its tokens.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    help="Also with the weights in this format (Q8_0, Q4_K, ...); may be repeated.",
)
@click.option("--threads", "-t", type=int, help="Processor threads; fewer where others work too.")
@json_option
def verify(
    source: str, text: Path | None, tokens: int, formats: tuple[str, ...], threads: int | None, as_json: bool
) -> None:
    """Compare the native runtime with the reference, and with transformers, on a model of yours.

    SOURCE is a folder, a .gguf file, hub name, or smollm2.
    """
    from qkv import verification

    with progress("verifying") as report:
        done = verification.verify(source, text, tokens, formats, threads, report)
    click.echo(json.dumps(done.data(), ensure_ascii=False, allow_nan=False) if as_json else str(done))
    if not done.passed:
        raise click.exceptions.Exit(1)


@command(
    'qkv explain smollm2 "The cat did not cross the street because it was too"',
    'qkv explain smollm2 "The capital of France is" --target " Paris" --against " London"',
    'qkv explain smollm2 "The book fell off the table because it" --word book --word table',
    'qkv explain ./bert-base "The capital of France is [MASK]." --html why.html',
    'qkv explain minilm "A dog plays" --target "A puppy runs" --against "A stock fell"',
    'qkv explain ./opus-mt-en-de "The house is green" --json',
    'qkv explain smollm2 --behaviour cases.jsonl --without "layer 3 head 2" --without "layer 9" --by mean',
    note="Runs on torch. Attention is shown beside what was measured, and how far the two agree.",
)
@click.argument("source")
@click.argument("prompt", required=False)
@click.option("--target", metavar="ANSWER", help="What to explain; default: the likeliest answer.")
@click.option("--against", metavar="ANSWER", help="Why the target rather than this.")
@click.option("--blank", metavar="TOKEN", help="What takes the place of a token; default: a full stop.")
@click.option("--word", "words", multiple=True, metavar="WORD", help="Also without this word as a whole.")
@click.option("--heads", "most", type=click.IntRange(min=1), help="How many to name; default 6.")
@click.option(
    "--behaviour",
    "cases",
    metavar="FILE.jsonl",
    help='Instead of PROMPT, lines of {"prompt", "answer", "choices"}: how many are right, and how sure.',
)
@click.option(
    "--without", multiple=True, metavar="PART", help='Of --behaviour: also without "layer 3 head 2", say.'
)
@click.option("--by", metavar="HOW", help="Of --without: zero (default) or mean in its place.")
@click.option("--threads", "-t", type=click.IntRange(min=1), help="Processor threads.")
@json_option
@path_option("--html", "one offline page to explore")
def explain(
    source: str,
    prompt: str | None,
    cases: str | None,
    without: tuple[str, ...],
    by: str | None,
    threads: int | None,
    as_json: bool,
    html: Path | None,
    **asked: Any,
) -> None:
    """Say why a model answers PROMPT as it does: what each token, head and layer does to the answer.

    SOURCE is a folder, a .gguf file, hub name, or smollm2: a decoder (its next token), a masked language
    model (its [MASK]), a classifier (its class), an encoder-decoder (its first token, and all it answers
    against the prompt), or one that embeds texts (minilm: how like the target the prompt is).

    With --behaviour many prompts are scored, with their answers or choices, and parts taken out.
    """
    from qkv import explanation
    from qkv.model import load

    told = {name: value for name, value in asked.items() if value not in (None, ())}
    if (prompt is None) == (cases is None):
        raise click.UsageError("Give a PROMPT, or a file of them with --behaviour.")
    if cases is not None and told:
        raise RequestError(
            "--target, --against, --blank, --word and --heads explain one PROMPT: leave --behaviour out."
        )
    if (prompt is not None and without) or (by is not None and not without):
        raise RequestError("--without is of --behaviour, and --by of --without: give them together.")
    with progress("explaining") as report:
        model, done = load(source, runtime="torch", threads=threads), count(1)
        if cases is not None:
            scored = explanation.measure_behaviour(
                model,
                cases,
                without,
                by or "zero",
                lambda done, total, what: report(done, total, f", {what}"),
            )
        else:
            told["told"] = lambda what: report(next(done), None, f", {what}")
            found = explanation.explain(model, str(prompt), **told)
    if cases is not None:
        _show(scored.data(), scored.lines(), partial(explanation.cases_page, scored), as_json, html)
    else:
        coloured = explanation.lines(found, colours=sys.stdout.isatty())
        _show(found.data(), coloured, partial(explanation.page, found), as_json, html)


def _show(
    data: dict[str, Any], lines: Iterable[str], page: Callable[[], str], as_json: bool, html: Path | None
) -> None:
    """A page where one is asked for, the data, or else the lines."""
    if html is not None:
        write(html, page())
    if as_json:
        click.echo(json.dumps(data, ensure_ascii=False, allow_nan=False))
    elif html is None:
        for line in lines:
            click.echo(line)
