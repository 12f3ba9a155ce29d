"""The command line: one command a verb. It parses, calls the library, and shows; nothing else."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

import qkv
from qkv.errors import QkvError, RequestError, SourceError, TokenizerError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console

    from qkv.engine import Completion
    from qkv.model import Model, Prompt, Stream

Command = TypeVar("Command", bound=Callable[..., None])


def options(*each: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(each):
            command = option(command)
        return command

    return decorate


loading = options(
    click.option(
        "--runtime",
        help="What generates: native, torch or numpy; default: the fastest there is for the model.",
    ),
    click.option("--dtype", help="Of torch: float32, bfloat16 or float16; default: the file's."),
    click.option("--device", default="cpu", show_default=True, help="cpu, or of torch: cuda, mps."),
    click.option(
        "--threads",
        "-t",
        type=click.IntRange(min=1),
        help="Processor threads; fewer where others work too.",
    ),
    click.option("--ignore", multiple=True, help="A configuration key or tensor to do without."),
)


def _biases(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> Any:
    """TOKEN=NUMBER, each token an id or a text, as the library takes them."""
    found: dict[int | str, float] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        try:
            token, value = int(name) if name.isascii() and name.isdigit() else name, float(number)
        except ValueError:
            raise click.BadParameter(f"{text!r} is not of the form TOKEN=NUMBER.") from None
        if token in found:
            raise click.BadParameter(f"{name!r} is given twice.")
        found[token] = value
    return found or None


sampling = options(
    click.option(
        "--max-new-tokens", "-n", type=int, help="At most this many; default the model's own, or 256."
    ),
    click.option(
        "--temperature", type=float, help="0 is greedy; without it, other sampling options make it 1."
    ),
    click.option("--top-k", type=int, help="Keep this many of the likeliest tokens."),
    click.option("--top-p", type=float, help="Keep the fewest tokens whose probabilities reach this."),
    click.option("--min-p", type=float, help="Keep tokens of at least this share of the likeliest."),
    click.option("--repetition-penalty", type=float, help="Above 1 discourages repeats."),
    click.option("--presence-penalty", type=float, help="-2 to 2, off each token the answer already holds."),
    click.option(
        "--frequency-penalty", type=float, help="-2 to 2, off a token each time the answer holds it."
    ),
    click.option(
        "--logit-bias",
        multiple=True,
        callback=_biases,
        metavar="TOKEN=NUMBER",
        help="Add to a token's logit; -inf forbids it. An id, or a text of one token; may be repeated.",
    ),
    click.option("--seed", type=int, help="The same seed gives the same text."),
)
answering = options(
    click.option("--stop", multiple=True, help="Stop before this text; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at an end token."),
    click.option("--samples", "-N", "n", type=int, help="So many answers, the prompt read once."),
    click.option("--beams", type=int, help="Search for the likeliest answer, this many at a time."),
    click.option(
        "--length-penalty", type=float, help="Of a search: above 1 favours long answers, default 1."
    ),
    click.option(
        "--logprobs",
        type=click.Choice(["raw", "processed"]),
        help="Show each token's: the model's own, or as drawn.",
    ),
    click.option("--top-logprobs", type=int, help="Show so many of the likeliest tokens beside each."),
)
model_option = click.option(
    "--model",
    "-m",
    default="smollm2",
    show_default=True,
    help="Folder, .gguf file, hub name (org/name), or smollm2.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Write a JSON object instead.")


def path_option(name: str, about: str) -> Callable[[Command], Command]:
    return click.option(name, type=click.Path(path_type=Path), help=f"Write {about} to this file.")


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
    "echo A long text | qkv generate -",
)
@click.argument("prompt")
@model_option
@sampling
@answering
@loading
@json_option
def generate(
    prompt: str,
    model: str,
    runtime: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    ignore: tuple[str, ...],
    as_json: bool,
    **asked: Any,
) -> None:
    """Continue PROMPT, streamed as it is made; - reads standard input.

    An encoder-decoder answers PROMPT. Speed, memory and log-probabilities go to standard error.
    """
    # a last line break is echo's, not the text's
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    loaded, seconds = _load(model, dtype, device, ignore, runtime, threads)
    before = text if loaded.spec.encoder is None else ""
    if asked["n"] not in (None, 1):
        done = cast("list[Completion]", loaded.generate(text, **asked))
    else:
        done = [_streamed(loaded, text, before, as_json, asked)]
    if as_json:
        click.echo(json.dumps(_report(loaded, done, seconds), ensure_ascii=False, allow_nan=False))
        return
    for number, completion in enumerate(done, 1):
        if len(done) > 1:
            notes().print(f"{number} of {len(done)}, ended by {_ending(completion)}", style="dim")
            click.echo(before + completion.text)
        if asked["logprobs"] or asked["top_logprobs"]:
            _show_logprobs(loaded, completion)
    _show_speed(done, seconds)


def _streamed(loaded: Model, text: str, before: str, silent: bool, asked: dict[str, Any]) -> Completion:
    """One answer, shown as it comes."""
    with _progress("reading the prompt") as progress:
        stream = loaded.stream(text, progress=progress, **asked)
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

    with _progress("converting") as progress:
        done = conversion.convert(source, out, type, ignore, progress)
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

    with _progress("verifying") as progress:
        done = verification.verify(source, text, tokens, formats, threads, progress)
    click.echo(json.dumps(done.data(), ensure_ascii=False, allow_nan=False) if as_json else str(done))
    if not done.passed:
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
    runtime: str | None,
    dtype: str | None,
    device: str,
    threads: int | None,
    ignore: tuple[str, ...],
    as_json: bool,
    **sampled: Any,
) -> None:
    """Talk with a model, by its own template. Reads turns from the terminal or standard input."""
    loaded, _ = _load(model, dtype, device, ignore, runtime, threads)

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


def _load(
    source: str,
    dtype: str | None,
    device: str,
    ignore: tuple[str, ...],
    runtime: str | None,
    threads: int | None,
) -> tuple[Model, float]:
    """The model, and the seconds it took; a line of progress for those who wait."""
    started = time.perf_counter()
    with _progress("loading") as progress:
        model = qkv.load(source, dtype, device, ignore, progress, runtime, threads)
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


def _report(model: Model, done: list[Completion], load_seconds: float) -> dict[str, Any]:
    """What there is to know, of one answer at the top, of several in a list."""
    each = [_answer(completion) for completion in done]
    return {
        **(each[0] if len(each) == 1 else {"answers": each}),
        "prompt_tokens": len(done[0].prompt),
        "load_seconds": load_seconds,
        "prefill_tokens_per_second": done[0].prefill_speed,
        "decode_tokens_per_second": sum(completion.decode_speed for completion in done),
        "peak_memory_bytes": _peak_memory(),
        "parameters": model.spec.parameters(),
        "runtime": model.runtime,
    }


def _answer(done: Completion) -> dict[str, Any]:
    found = {
        "text": done.text,
        "finish_reason": done.finish_reason,
        "tokens": done.tokens,
        "logprobs": done.logprobs,
    }
    more = {"top_logprobs": done.top_logprobs, "score": done.score, "error": done.error}
    return found | {name: value for name, value in more.items() if value not in (None, [])}


def _ending(done: Completion) -> str:
    score = "" if done.score is None else f", score {done.score:.4f}"
    return f"{done.error or done.finish_reason}{score}"


def _show_logprobs(model: Model, done: Completion) -> None:
    """A line for each token: its log-probability, its text, and the likeliest ones."""
    for place, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
        likeliest = done.top_logprobs[place] if done.top_logprobs else []
        beside = ", ".join(f"{_spelled(model, other)} {value:.3f}" for other, value in likeliest)
        notes().print(f"{logprob:9.3f}  {_spelled(model, token)}" + (f"  of {beside}" if beside else ""))


def _spelled(model: Model, token: int) -> str:
    try:
        return repr(model.tokenizer.decode([token], skip_special=False) if model.tokenizer else token)
    except TokenizerError:  # the model has more ids than its tokenizer has texts
        return str(token)


def _show_speed(answers: list[Completion], load_seconds: float) -> None:
    done, peak = answers[0], _peak_memory()
    memory = "" if peak is None else f" | {peak / 1e9:.2f} GB at most"
    count = sum(len(completion.tokens) for completion in answers)
    ended = f" | ended by {_ending(done)}" if len(answers) == 1 else ""
    notes().print(
        f"loaded in {load_seconds:.1f} s"
        f" | prompt {len(done.prompt):,} tokens at {done.prefill_speed:,.0f}/s"
        f" | text {count:,} tokens at {sum(each.decode_speed for each in answers):,.1f}/s"
        f"{memory}{ended}",
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
