"""Commands that measure: speed, and what the literature claims."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import click

from qkv.commands.group import command, write
from qkv.console import notes, progress
from qkv.errors import RequestError
from qkv.options import json_option, path_option, stretching


def _numbers(context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[int, ...]:
    """Whole numbers with commas between."""
    try:
        return tuple(int(part) for part in given.split(",")) if given is not None else ()
    except ValueError:
        raise click.BadParameter(f"{given!r} is not of the form 1,2.") from None


@command(
    "qkv bench",
    "qkv bench ./Llama-3.2-1B --threads 1,4,8 --streams 1",
    "qkv bench model.gguf --prompt 2048 --new 64 --rounds 3 --json",
    "qkv bench --peers",
    note="Rounds in which others took much of the machine are left out where three remain.",
)
@click.argument("source", default="smollm2")
@click.option(
    "--threads",
    "-t",
    callback=_numbers,
    metavar="1,2",
    help="Numbers of threads; default one, and one for each core.",
)
@click.option("--prompt", type=int, default=512, show_default=True, help="Tokens of each prompt.")
@click.option("--new", type=int, default=128, show_default=True, help="Tokens that each is continued by.")
@click.option(
    "--streams",
    callback=_numbers,
    metavar="1,8",
    default="1,8",
    show_default=True,
    help="Numbers of texts that are made together.",
)
@click.option("--rounds", type=int, default=5, show_default=True, help="How often each is measured, in turn.")
@click.option("--runtime", help="native, torch or numpy; default: the fastest there is for the model.")
@click.option("--peers", is_flag=True, help="Say how to compare with other engines, and end.")
@json_option
def bench(source: str, peers: bool, as_json: bool, **asked: Any) -> None:
    """Measure how fast this machine runs a model, and how near to its memory's limit that is.

    SOURCE is a folder, a .gguf file, hub name, or smollm2.
    """
    from qkv import benching

    if peers:
        said = benching.peers()
        click.echo(json.dumps({"peers": said}) if as_json else said)
        return
    with progress("measuring") as report:
        done = benching.bench(source, **asked, progress=report)
    click.echo(json.dumps(done.data(), ensure_ascii=False, allow_nan=False) if as_json else str(done))


@command(
    "qkv reproduce --list",
    "qkv reproduce word-order H25",
    "qkv reproduce all --html claims.html --markdown docs/claims.md",
    "qkv reproduce all --smoke --seeds 1 --json",
    "qkv reproduce all --kept --out docs/claims --markdown docs/claims.md",
    note="What does not hold is a finding; the status is 1 where an experiment failed.",
)
@click.argument("names", nargs=-1, metavar="NAME... | all")
@click.option("--list", "listed", is_flag=True, help="Say which claims there are, and end.")
@click.option("--smoke", is_flag=True, help="In seconds: shows that it runs, and finds nothing out.")
@click.option("--seeds", type=int, default=3, show_default=True, help="How often each is run.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Where results are kept, to go on from; default claims-results.",
)
@click.option("--again", is_flag=True, help="Also what is kept there already.")
@click.option("--kept", is_flag=True, help="Run nothing: report what is kept so far.")
@click.option("--threads", "-t", type=int, help="Processor threads; default two.")
@json_option
@path_option("--html", "one offline page, with pictures")
@path_option("--markdown", "the report, with a folder of pictures beside it")
def reproduce(
    names: tuple[str, ...],
    listed: bool,
    smoke: bool,
    kept: bool,
    out: Path | None,
    as_json: bool,
    html: Path | None,
    markdown: Path | None,
    **asked: Any,
) -> None:
    """Put what the literature claims to the test, each claim in minutes.

    NAME is a claim's name or number. Results are kept as they come: what was broken off goes on.
    """
    from qkv import claims
    from qkv.claims import pages

    if listed:
        known = [claim.data() for claim in claims.CLAIMS.values()]
        lines = (f"{each['name']:<24}  {each['number']:<4} {each['statement']}" for each in known)
        click.echo(json.dumps(known, ensure_ascii=False) if as_json else "\n".join(lines))
        return
    if not names:
        raise click.UsageError("Missing argument 'NAME': name claims, or all; --list says which there are.")
    size: Any = "smoke" if smoke else "full"
    if kept:
        done = claims.kept(names, size=size, out=out or claims.OUT)
    else:
        with progress("reproducing") as report:
            done = claims.reproduce(names, size=size, out=out or claims.OUT, progress=report, **asked)
    if html is not None:
        write(html, pages.html(done))
    if markdown is not None:
        files = pages.write_markdown(done, markdown)
        notes().print(f"wrote {markdown} and {len(files) - 1} pictures")
    click.echo(json.dumps(done.data(), ensure_ascii=False, allow_nan=False) if as_json else str(done))
    if done.failed:
        raise click.exceptions.Exit(1)


@command(
    "qkv context smollm2",
    "qkv context ./Llama-3.2-1B --text book.txt --length 16k --html context.html",
    "qkv context smollm2 --extend all --factor 2",
    "qkv context smollm2 --extend yarn --extend longrope --search 12",
    "qkv context smollm2 --budget 1k --length 4k --encoder minilm --html ways.html",
)
@click.argument("source", default="smollm2")
@stretching
@json_option
@path_option("--html", "one offline page, with curves")
def context(
    source: str,
    as_json: bool,
    html: Path | None,
    budget: int | None,
    encoder: str | None,
    weighing: bool,
    **asked: Any,
) -> None:
    """Measure how far a model's context carries, beside what is advertised.

    The loss of the same tokens with more and more of a text read; pass keys planted and asked for, by
    length and depth; tokens copied over a distance. With --extend: the order in which methods come out on
    a longer text, and where it differs from the papers'. With --budget: longer context, compression or
    retrieval? SOURCE is a folder, a .gguf file, hub name, or smollm2.
    """
    from qkv import context as measured

    given = {name: value for name, value in asked.items() if value not in (None, ())}
    _refuse_unused(budget, encoder, weighing, given)
    with _told() as told:
        found: Any
        if budget is None:
            found = measured.context(source, **given, told=told)
        else:
            ranker = measured.Lexical() if encoder is None else measured.Semantic(encoder)
            found = measured.compare(
                source, budget=budget, ranker=ranker, weighing=weighing, told=told, **given
            )
    if html is not None:
        write(html, measured.page(found))
    if as_json:
        click.echo(json.dumps(found.data(), ensure_ascii=False, allow_nan=False))
    elif html is None:
        click.echo(str(found))


# what says how the one is measured says nothing of the other
OF_MEASURING = ("texts", "extend", "factor", "search")


def _refuse_unused(budget: int | None, encoder: str | None, weighing: bool, given: dict[str, Any]) -> None:
    if budget is not None:
        unused = [f"--{name}" for name in OF_MEASURING if name in given]
        if unused:
            raise RequestError(f"{' and '.join(unused)} would do nothing beside --budget: leave them out.")
    elif encoder is not None or weighing:
        raise RequestError("--encoder and --weighing go with --budget.")
    elif "extend" not in given and ("factor" in given or "search" in given):
        raise RequestError("--factor and --search say how --extend extends: name a method with it.")


@contextmanager
def _told() -> Iterator[Callable[[str], None]]:
    """Shows what is measured, and how many things were."""
    with progress("measuring") as report:
        done = count(1)
        yield lambda what: report(next(done), None, f", {what}")
