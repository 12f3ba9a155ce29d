"""The command line: one command a verb. It parses, calls the library, and shows; nothing else."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

import qkv
from qkv.errors import QkvError, RequestError

if TYPE_CHECKING:
    from qkv.model import Model, Stream

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Read, run, size and explain Transformers on your own machine.",
)
notes = Console(stderr=True, highlight=False)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Folder, .gguf file, hub name (org/name), or smollm2.")
]
MaxNew = Annotated[
    int | None, typer.Option("--max-new-tokens", "-n", help="At most this many; default 256 or what fits.")
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
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", help="A configuration key or tensor to do without.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.command(
    epilog='Examples: [bold]qkv generate "The capital of France is"[/]   '
    '[bold]qkv generate -m ./model.gguf -n 64 --temperature 0.8 --seed 1 "Once"[/]   '
    "[bold]echo A long text | qkv generate -[/]"
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
    ignore: Ignore = None,
    as_json: AsJson = False,
) -> None:
    """Continue a text, streamed as it is made; speed and memory go to standard error."""
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded, seconds = _load(model, dtype, device, ignore)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    with _progress("reading the prompt") as progress:
        stream = loaded.stream(
            text,
            max_new_tokens=max_new_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
            progress=progress,
            **sampling,
        )
        pieces = iter(stream)
        first = next(pieces, "")
    if not as_json:
        typer.echo(text + first, nl=False)
    for piece in pieces:
        if not as_json:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
    if as_json:
        typer.echo(json.dumps(_report(loaded, stream, seconds), ensure_ascii=False))
    else:
        typer.echo()
        _show_speed(stream, seconds)


@app.command(
    epilog="In the conversation: /reset starts again, /system TEXT sets the instruction, /quit ends. "
    'Examples: [bold]qkv chat[/]   [bold]qkv chat -m ./model.gguf --system "Answer in French."[/]'
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
    ignore: Ignore = None,
    as_json: AsJson = False,
) -> None:
    """Talk with a model, by its own template. Reads turns from the terminal or standard input."""
    loaded, _ = _load(model, dtype, device, ignore)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
    }
    messages = _opening(system)
    for turn in _turns():
        command, _, rest = turn.partition(" ")
        if command == "/quit":
            return
        if command in ("/reset", "/system"):
            messages = _opening(rest or (system if command == "/reset" else None))
            continue
        if command.startswith("/"):
            notes.print(f"There is no command {command}; there are /reset, /system and /quit.")
            continue
        messages.append({"role": "user", "content": turn})
        try:
            answer = _answer(loaded, messages, max_new_tokens, sampling, show=not as_json)
        except QkvError as problem:  # one turn failed; the conversation goes on
            messages.pop()
            notes.print(str(problem))
            continue
        messages.append({"role": "assistant", "content": answer})
        if as_json:
            typer.echo(json.dumps(messages[-1], ensure_ascii=False))


def _opening(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _turns() -> Iterator[str]:
    """What the user says, line by line, until the end of the input."""
    terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo()
            return
        if line.strip():
            yield line.strip()


def _answer(
    loaded: Model, messages: list[dict[str, str]], limit: int | None, sampling: dict[str, Any], show: bool
) -> str:
    """Streams one answer; Ctrl-C ends it early and keeps what there is."""
    stream = loaded.stream(loaded.chat(messages), max_new_tokens=limit, **sampling)
    try:
        for piece in stream:
            if show:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
    except KeyboardInterrupt:
        notes.print(" (stopped)", end="")
    if show:
        typer.echo()
    return stream.completion.text


def _load(source: str, dtype: str | None, device: str, ignore: list[str] | None) -> tuple[Model, float]:
    """The model, and the seconds it took; a line of progress for those who wait."""
    started = time.perf_counter()
    with _progress("loading") as progress:
        model = qkv.load(source, dtype, device, ignore or (), progress)
    return model, time.perf_counter() - started


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on a terminal that counts, once two seconds have passed, and is gone at the end."""
    started, status = time.perf_counter(), notes.status("")

    def report(done: int, total: int) -> None:
        if time.perf_counter() - started > 2 and notes.is_terminal:
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
    done = stream.completion
    notes.print(
        f"[dim]loaded in {load_seconds:.1f} s"
        f" | prompt {len(done.prompt):,} tokens at {done.prefill_speed:,.0f}/s"
        f" | text {len(done.tokens):,} tokens at {done.decode_speed:,.1f}/s"
        f" | {_peak_memory() / 1e9:.2f} GB at most | ended by {done.finish_reason}[/]",
        soft_wrap=True,
    )


def _peak_memory() -> int:
    """Bytes resident at most so far."""
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
    """Runs the command; an error is one sentence and exit status 1."""
    try:
        app()
    except QkvError as problem:
        notes.print(f"[bold red]qkv:[/] {problem}", markup=True, soft_wrap=True)
        sys.exit(1 if not isinstance(problem, RequestError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
