"""Commands that write text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

import qkv
from qkv import console
from qkv.commands.group import command
from qkv.console import notes, progress
from qkv.errors import QkvError
from qkv.options import answering, filing, json_option, loading, model_option, sampling

if TYPE_CHECKING:
    from qkv.engine import Completion
    from qkv.model import Model, Prompt, Stream


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
