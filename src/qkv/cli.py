"""The command line: one command a verb. It parses, calls the library, and shows; nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import qkv
from qkv import console
from qkv.console import notes, progress
from qkv.errors import QkvError, RequestError, SourceError, UnsupportedError
from qkv.options import (
    answering,
    filing,
    json_option,
    loading,
    model_option,
    path_option,
    planning,
    sampling,
)

if TYPE_CHECKING:
    from qkv.engine import Completion
    from qkv.model import Model, Prompt, Stream


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        from qkv.runtime.built import status

        click.echo(f"qkv {qkv.__version__}, {status()}")
        context.exit()


@click.group(context_settings={"help_option_names": ["--help", "-h"]})
@click.option(
    "--version", is_flag=True, is_eager=True, callback=_version, help="Show the version and runtime."
)
def app(version: bool) -> None:
    """Read, run, size and explain Transformers on your own machine."""


def command(*examples: str, note: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """A command whose help ends with examples, each on a line of its own."""
    lines = "\n".join(("\b", "Examples:", *(f"  {example}" for example in examples)))
    return app.command(epilog=f"{note}\n\n{lines}")


@command(
    'qkv generate "The capital of France is"',
    'qkv generate -m ./model.gguf -n 64 --temperature 0.8 --seed 1 "Once"',
    'qkv generate -N 3 --presence-penalty 0.5 --logit-bias " the=-inf" "Once"',
    'qkv generate -m ./bart-large-cnn --beams 4 --length-penalty 2 "A long text"',
    'qkv generate --choice positive --choice negative "A fine film! This review is "',
    'qkv generate --json-schema schema.json "Name and age of Anna, who is 42, as JSON:"',
    "echo A long text | qkv generate -",
    "qkv generate --input prompts.jsonl --output answers.jsonl -n 64",
    """echo '{"prompt": "Once", "id": 7, "seed": 1}' | qkv generate --input -""",
)
@click.argument("prompt", required=False)
@filing
@model_option
@sampling
@answering
@loading
@json_option
def generate(
    prompt: str | None,
    source: str | None,
    output: str | None,
    overwrite: bool,
    model: str,
    how: dict[str, Any],
    as_json: bool,
    **asked: Any,
) -> None:
    """Continue PROMPT, streamed as it is made; - reads standard input.

    An encoder-decoder answers PROMPT. Speed, memory and log-probabilities go to standard error.

    Each line of --input is JSON: a text in quotes, or an object with "prompt" (a text or token ids) or
    "messages" (a conversation), with an "id" if wanted, and options of its own by their names in
    Python. They are served together, and each has a line of JSON in the output, in the same order. An
    output that ends early is gone on with, and becomes what it would have been; only what is sampled
    without a seed may differ. A line that cannot be served has an "error"; the status is then 1.
    """

    def load() -> tuple[Model, float]:
        found = _load(model, how)
        asked["speculate"] = _drafter(asked["speculate"], how)
        return found

    if prompt is None and source is not None:
        _answer_lines(load, source, output or "-", overwrite, asked)
        return
    if prompt is None or source is not None:
        found = "Missing argument 'PROMPT'" if prompt is None else "PROMPT and --input are both given"
        raise click.UsageError(f"{found}: give a text, or a file of them with --input.")
    if output is not None or overwrite:
        raise click.UsageError("--output and --overwrite are for --input.")
    # a last line break is echo's, not the text's
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    loaded, seconds = load()
    before = text if loaded.spec.encoder is None else ""
    if asked["n"] not in (None, 1):
        done = cast("list[Completion]", loaded.generate(text, **asked))
    else:
        done = [_streamed(loaded, text, before, as_json, asked)]
    if as_json:
        click.echo(json.dumps(console.report(loaded, done, seconds), ensure_ascii=False, allow_nan=False))
        return
    for number, completion in enumerate(done, 1):
        if len(done) > 1:
            notes().print(f"{number} of {len(done)}, ended by {console.ending(completion)}", style="dim")
            click.echo(before + completion.text)
        if asked["logprobs"] or asked["top_logprobs"]:
            console.show_logprobs(loaded, completion)
    console.show_speed(done, seconds)


def _answer_lines(
    load: Callable[[], tuple[Model, float]], source: str, output: str, overwrite: bool, asked: dict[str, Any]
) -> None:
    """Answers each line of a file, and says what that took."""
    from qkv.engine import files

    read = sys.stdin.buffer if source == "-" else Path(source)
    written = sys.stdout.buffer if output == "-" else Path(output)
    with files.opened(read, written, overwrite) as (lines, out):
        loaded, load_seconds = load()
        run, started = files.Run(loaded, lines, asked), time.perf_counter()
        # a count among answers on the same terminal would be in their way
        total = files.count(read) if notes().is_terminal else None
        shown = notes().is_terminal and not (output == "-" and sys.stdout.isatty())
        out.begin()
        with progress("generating") as report:

            def tell(tokens: int) -> None:
                rate = tokens / (time.perf_counter() - started)
                if shown:
                    report(out.lines, total, f" lines, {rate:,.1f} tokens/s")

            for data in run.answers(tell):
                out.write(data)
        console.show_run(run, out, load_seconds, time.perf_counter() - started)
    if out.failed:
        raise click.exceptions.Exit(1)


def _streamed(loaded: Model, text: str, before: str, silent: bool, asked: dict[str, Any]) -> Completion:
    """One answer, shown as it comes."""
    with progress("reading the prompt") as report:
        stream = loaded.stream(text, progress=report, **asked)
        first = next(stream, "")
    for piece in chain([before + first], stream):
        if not silent:
            click.echo(piece, nl=False)
    if not silent:
        click.echo()
    return stream.completion


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
        _write(svg, inspection.diagram(found.model, found.name))
    if html is not None:
        _write(html, inspection.page(found))
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
        _write(html, inspection.page(found))
    if as_json:
        click.echo(json.dumps(found.data(), ensure_ascii=False))
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

    if measure:
        from qkv.benching.profile import measured

        with progress("measuring") as report:
            measured(threads, progress=report).save(sizing.here())
    kept = sizing.here()
    if asked["device"] is None and kept.is_file():
        asked["profile"] = sizing.Profile.read(kept)
    found = sizing.plan(source, **{**asked, "prefix": asked["prefix"] or 0})
    if html is not None:
        _write(html, sizing.page(found))
    if as_json:
        click.echo(json.dumps(found.data(), ensure_ascii=False, allow_nan=False))
    elif html is None:
        click.echo(str(found))


@command(
    "qkv reproduce --list",
    "qkv reproduce word-order H25",
    "qkv reproduce all --html claims.html --markdown docs/claims.md",
    "qkv reproduce all --smoke --seeds 1 --json",
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
@click.option("--threads", "-t", type=int, help="Processor threads; default two.")
@json_option
@path_option("--html", "one offline page, with pictures")
@path_option("--markdown", "the report, with a folder of pictures beside it")
def reproduce(
    names: tuple[str, ...],
    listed: bool,
    smoke: bool,
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
    with progress("reproducing") as report:
        size: Any = "smoke" if smoke else "full"
        done = claims.reproduce(names, size=size, out=out or claims.OUT, progress=report, **asked)
    if html is not None:
        _write(html, pages.html(done))
    if markdown is not None:
        files = pages.write_markdown(done, markdown)
        notes().print(f"wrote {markdown} and {len(files) - 1} pictures")
    click.echo(json.dumps(done.data(), ensure_ascii=False, allow_nan=False) if as_json else str(done))
    if done.failed:
        raise click.exceptions.Exit(1)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise SourceError(f"{path} cannot be written: {problem.strerror}.") from None
    notes().print(f"wrote {path}")


@command(
    "qkv chat",
    'qkv chat -m ./model.gguf --system "Answer in French."',
    'echo "What is a token?" | qkv chat --json',
    note="In the conversation /reset starts again, /system TEXT also sets the instruction, /quit ends.",
)
@model_option
@click.option("--system", help="An instruction before the conversation.")
@sampling
@loading
@click.option("--json", "as_json", is_flag=True, help="Write a JSON object a turn instead.")
def chat(
    model: str,
    system: str | None,
    how: dict[str, Any],
    as_json: bool,
    **sampled: Any,
) -> None:
    """Talk with a model, by its own template. Reads turns from the terminal or standard input."""
    loaded, _ = _load(model, how)
    sampled["speculate"] = _drafter(sampled["speculate"], how)

    def answer(prompt: Prompt) -> Stream:
        return loaded.stream(prompt, **sampled)

    answer(loaded.chat([*_opening(system), _user("?")]))  # what cannot be served is said at once
    if sys.stdin.isatty():
        notes().print(f"{model}. /reset starts again, /system TEXT sets an instruction, /quit ends.")
    messages = _opening(system)
    for turn in _turns():
        command, _, rest = turn.partition(" ")
        if command == "/quit":
            return
        if command in ("/reset", "/system"):
            system = rest.strip() if command == "/system" else system
            messages = _opening(system)
        elif command.startswith("/"):
            notes().print(f"There is no command {command}; there are /reset, /system and /quit.")
        else:
            _take_turn(loaded, answer, messages, turn, as_json)


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _turns() -> Iterator[str]:
    """What the user says, line by line, until the end of the input."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            if terminal:
                click.echo()
            return
        if line.strip():
            yield line.strip()


def _take_turn(
    model: Model, answer: Callable[..., Stream], messages: list[dict[str, str]], turn: str, as_json: bool
) -> None:
    """Answers one turn and adds both to the messages; on a terminal a failed turn is not the end."""
    try:
        stream = answer(model.chat([*messages, _user(turn)]))
        _show_answer(stream, silent=as_json)
    except QkvError as problem:
        if not sys.stdin.isatty():
            raise
        notes().print(str(problem))
        return
    messages += [_user(turn), {"role": "assistant", "content": stream.completion.text}]
    if as_json:
        click.echo(json.dumps(messages[-1], ensure_ascii=False))


def _show_answer(stream: Stream, silent: bool) -> None:
    """Shows an answer as it comes; on a terminal Ctrl-C ends the answer and keeps what there is."""
    try:
        for piece in stream:
            if not silent:
                click.echo(piece, nl=False)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        notes().print(" (stopped)", end="")
    if not silent:
        click.echo()


def _load(source: str, how: dict[str, Any]) -> tuple[Model, float]:
    """The model, and the seconds it took; a line of progress for those who wait."""
    started = time.perf_counter()
    with progress("loading") as report:
        model = qkv.load(source, progress=report, **how)
    return model, time.perf_counter() - started


def _drafter(name: str | None, how: dict[str, Any]) -> Any:
    """What makes guesses: the text itself, or another model that is loaded alike."""
    if name is None or name == "ngram":
        return name
    with progress("loading") as report:
        return qkv.load(name, progress=report, **{**how, "ignore": ()})


def main() -> None:
    """Runs the command; an error is one sentence and exit status 1, or 2 for a wrong request."""
    # torch's threads spin while they wait: beside another busy process that makes both many times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        with app.make_context("qkv", sys.argv[1:] or ["--help"]) as context:
            app.invoke(context)  # not app(): that answers Ctrl-C with a line break
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except click.UsageError as problem:
        _fail(_sentence(problem.format_message()), 2)
    except QkvError as problem:
        _fail(str(problem), 2 if isinstance(problem, RequestError) else 1)
    except UnicodeDecodeError:
        _fail("Standard input is not UTF-8 text.", 2)
    except BrokenPipeError:  # who read the output has left; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as problem:
        _fail(f"{problem.strerror or problem}.", 1)
    except (KeyboardInterrupt, click.Abort):
        sys.exit(130)
    sys.exit(0)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", ".)", "?)")) else f"{text}."


def _fail(sentence: str, status: int) -> None:
    notes().print("qkv: ", style="bold red", end="")
    notes().print(sentence)
    sys.exit(status)


if __name__ == "__main__":
    main()
