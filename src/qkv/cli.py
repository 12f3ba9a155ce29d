"""The command line: one command a verb. It parses, calls the library, and shows; nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import qkv
from qkv.errors import QkvError, RequestError, SourceError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from qkv.model import Model, Stream

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Read, run, size and explain Transformers on your own machine.",
)
Usage: Any = typer.BadParameter.__mro__[2]  # click's base of all its errors, wherever typer keeps click

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Folder, .gguf file, hub name (org/name), or smollm2.")
]
MaxNew = Annotated[
    int | None,
    typer.Option("--max-new-tokens", "-n", help="At most this many; default the model's own, or 256."),
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep this many of the likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Keep the fewest tokens whose probabilities reach this.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens of at least this share of the likeliest.")]
Penalty = Annotated[float | None, typer.Option("--repetition-penalty", help="Above 1 discourages repeats.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop before this text; may be repeated.")]
DType = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default: the file's.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps.")]
Threads = Annotated[
    int | None, typer.Option("--threads", "-t", min=1, help="Processor threads; fewer where others work too.")
]
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", help="A configuration key or tensor to do without.")
]
Source = Annotated[str, typer.Argument(help="Folder, config.json, .gguf file, hub name, or smollm2.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write one offline page to this file.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Write the structure diagram to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write a JSON object instead; in a chat one a turn.")]


@app.command(
    epilog="""Examples:

    [bold]qkv generate "The capital of France is"[/]

    [bold]qkv generate -m ./model.gguf -n 64 --temperature 0.8 --seed 1 "Once"[/]

    [bold]echo A long text | qkv generate -[/]"""
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: ModelOption = "smollm2",
    max_new_tokens: MaxNew = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at an end token.")] = False,
    dtype: DType = None,
    device: Device = "cpu",
    threads: Threads = None,
    ignore: Ignore = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streamed as it is made; speed and memory go to standard error."""
    # a last line break is echo's, not the text's
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    loaded, seconds = _load(model, dtype, device, ignore, threads)
    with _progress("reading the prompt") as progress:
        stream = loaded.stream(
            text,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            progress=progress,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
        )
        first = next(stream, "")
    if as_json:
        for _ in stream:
            pass
        typer.echo(json.dumps(_report(loaded, stream, seconds), ensure_ascii=False))
        return
    typer.echo(text + first, nl=False)
    for piece in stream:
        typer.echo(piece, nl=False)
    typer.echo()
    _show_speed(stream, seconds)


@app.command(
    epilog="""Examples:

    [bold]qkv inspect ./Llama-3.1-8B[/]

    [bold]qkv inspect config.json --html llama.html[/]

    [bold]qkv inspect smollm2 --json[/]"""
)
def inspect(
    source: Source = "smollm2",
    as_json: AsJson = False,
    html: Html = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Write the structure diagram to this file.")
    ] = None,
) -> None:
    """Read a model's structure and the context it really supports; no weights are read."""
    from qkv import inspection

    found = inspection.inspect(source)
    if svg is not None:
        if found.model is None:
            raise UnsupportedError(f"{found.name} could not be described, so there is nothing to draw.")
        _write(svg, inspection.diagram(found.model, found.name))
    if html is not None:
        _write(html, inspection.page(found))
    if as_json:
        typer.echo(json.dumps(found.data(), ensure_ascii=False))
    elif html is None and svg is None:
        typer.echo(str(found))


@app.command(
    epilog="""Example:

    [bold]qkv compare ./Llama-3.1-8B ./Qwen3-8B[/]"""
)
def compare(
    left: Annotated[str, typer.Argument(help="A source.")],
    right: Annotated[str, typer.Argument(help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Show only what differs between two models, and what follows from it."""
    found = qkv.compare(left, right)
    typer.echo(json.dumps(found.data(), ensure_ascii=False) if as_json else str(found))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise SourceError(f"{path} cannot be written: {problem.strerror}.") from None
    notes().print(f"wrote {path}")


@app.command(
    epilog="""In the conversation /reset starts again, /system TEXT also sets the instruction, /quit ends.

    Examples:

    [bold]qkv chat[/]

    [bold]qkv chat -m ./model.gguf --system "Answer in French."[/]

    [bold]echo "What is a token?" | qkv chat --json[/]"""
)
def chat(
    model: ModelOption = "smollm2",
    system: Annotated[str | None, typer.Option(help="An instruction before the conversation.")] = None,
    max_new_tokens: MaxNew = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Penalty = None,
    seed: Seed = None,
    dtype: DType = None,
    device: Device = "cpu",
    threads: Threads = None,
    ignore: Ignore = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model, by its own template. Reads turns from the terminal or standard input."""
    loaded, _ = _load(model, dtype, device, ignore, threads)
    answer = partial(
        loaded.stream,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
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


@cache
def notes() -> Console:
    """Standard error. Made when first written to: most commands never do."""
    from rich.console import Console

    # no markup: what is shown may hold a user's or a file's [brackets]
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


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
                typer.echo()
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
        typer.echo(json.dumps(messages[-1], ensure_ascii=False))


def _show_answer(stream: Stream, silent: bool) -> None:
    """Shows an answer as it comes; on a terminal Ctrl-C ends the answer and keeps what there is."""
    try:
        for piece in stream:
            if not silent:
                typer.echo(piece, nl=False)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        notes().print(" (stopped)", end="")
    if not silent:
        typer.echo()


def _load(
    source: str, dtype: str | None, device: str, ignore: list[str] | None, threads: int | None
) -> tuple[Model, float]:
    """The model, and the seconds it took; a line of progress for those who wait."""
    started = time.perf_counter()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with _progress("loading") as progress:
        model = qkv.load(source, dtype, device, ignore or (), progress)
    return model, time.perf_counter() - started


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on a terminal that counts, once two seconds have passed, and is gone at the end."""
    started, status = time.perf_counter(), notes().status("")

    def report(done: int, total: int) -> None:
        if time.perf_counter() - started > 2 and notes().is_terminal:
            status.start()
            status.update(f"{what}: {done:,} of {total:,}")

    try:
        yield report
    finally:
        status.stop()


def _report(model: Model, stream: Stream, load_seconds: float) -> dict[str, Any]:
    done = stream.completion
    return {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "prompt_tokens": len(done.prompt),
        "tokens": done.tokens,
        "logprobs": done.logprobs,
        "load_seconds": load_seconds,
        "prefill_tokens_per_second": done.prefill_speed,
        "decode_tokens_per_second": done.decode_speed,
        "peak_memory_bytes": _peak_memory(),
        "parameters": model.spec.parameters(),
    }


def _show_speed(stream: Stream, load_seconds: float) -> None:
    done, peak = stream.completion, _peak_memory()
    memory = "" if peak is None else f" | {peak / 1e9:.2f} GB at most"
    notes().print(
        f"loaded in {load_seconds:.1f} s"
        f" | prompt {len(done.prompt):,} tokens at {done.prefill_speed:,.0f}/s"
        f" | text {len(done.tokens):,} tokens at {done.decode_speed:,.1f}/s"
        f"{memory} | ended by {done.finish_reason}",
        style="dim",
    )


def _peak_memory() -> int | None:
    """Bytes resident at most so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qkv {qkv.__version__}, running on torch; the native runtime is not built yet")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Show the version and runtime."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command; an error is one sentence and exit status 1, or 2 for a wrong request."""
    # torch's threads spin while they wait: beside another busy process that makes both many times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except Usage as problem:
        _fail(f"{problem.format_message().rstrip('.')}.", 2)
    except QkvError as problem:
        _fail(str(problem), 2 if isinstance(problem, RequestError) else 1)
    except UnicodeDecodeError:
        _fail("Standard input is not UTF-8 text.", 2)
    except OSError as problem:
        _fail(f"{problem.strerror or problem}.", 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status)


def _fail(sentence: str, status: int) -> None:
    notes().print("qkv: ", style="bold red", end="")
    notes().print(sentence)
    sys.exit(status)


if __name__ == "__main__":
    main()
