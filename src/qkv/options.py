"""What commands of one kind are given, each kind as one decorator."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from qkv.errors import RequestError

Command = TypeVar("Command", bound=Callable[..., None])


def options(*each: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in this order."""

    def decorate(command: Command) -> Command:
        for option in reversed(each):
            command = option(command)
        return command

    return decorate


def _bytes(context: click.Context, parameter: click.Parameter, given: str | None) -> int | None:
    """A size as people write it: 500MB, 2GiB, or bytes."""
    if given is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?)b?|b?)", given.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{given!r} is no size, such as 500MB or 2GiB.")
    number, unit, binary = found.groups()
    power = 0 if unit is None else "kmgt".index(unit.lower()) + 1
    return int(float(number) * (1024 if binary else 1000) ** power)


_HOW = options(
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
    click.option("--kv", help="How the native runtime keeps keys and values: f32, bf16 or int8."),
    click.option(
        "--cache",
        callback=_bytes,
        metavar="SIZE",
        help="What keys and values may take: 2GiB; default: what is free.",
    ),
    click.option(
        "--compress",
        metavar="POLICY:TOKENS",
        help="Keep only so many tokens' keys and values: sinks:1024, or on torch h2o:1024, snapkv:1024.",
    ),
    click.option("--ignore", multiple=True, help="A configuration key or tensor to do without."),
)


def loading(command: Command) -> Command:
    """What says how a model is loaded; the command gets it as `how`, the arguments of `qkv.load`."""

    @wraps(command)
    def gathered(**given: Any) -> None:
        names = ("runtime", "dtype", "device", "threads", "kv", "cache", "compress", "ignore")
        command(how={name: given.pop(name) for name in names}, **given)

    return _HOW(cast("Command", gathered))


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
    click.option(
        "--speculate",
        metavar="ngram|MODEL",
        help="Guess what comes next, from the text itself or by a smaller model: same text, sooner.",
    ),
)


def _schema(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """The text of a schema, which may be in a file."""
    if given is None or given.strip() == "true" or given.lstrip().startswith("{"):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except OSError as problem:
        reason = problem.strerror or str(problem)
    except ValueError:
        reason = "not UTF-8 text"
    raise click.BadParameter(f"{given!r} is neither JSON nor a file that can be read: {reason}.")


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
    click.option(
        "--json-schema",
        callback=_schema,
        metavar="FILE_OR_JSON",
        help="The answer is JSON of this schema; true: any object.",
    ),
    click.option("--regex", help="The whole answer matches this expression."),
    click.option(
        "--choice",
        multiple=True,
        callback=lambda context, parameter, given: list(given) or None,
        help="The answer is this text, or another given so; may be repeated.",
    ),
)
filing = options(
    click.option(
        "--input", "source", metavar="FILE", help="Answer each line of this JSONL file; - is standard input."
    ),
    click.option(
        "--output",
        metavar="FILE",
        help="Write the answers there, and go on where it ends; default: standard output.",
    ),
    click.option("--overwrite", is_flag=True, help="Begin the output anew."),
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


def _tokens(context: click.Context, parameter: click.Parameter, given: str | None) -> int | None:
    """A number of tokens as people write it: 8192, 8k."""
    if given is None:
        return None
    from qkv.planning import tokens

    try:
        return tokens(given)
    except RequestError as problem:
        raise click.BadParameter(str(problem)) from None


planning = options(
    click.option(
        "--memory", callback=_bytes, metavar="SIZE", help="On each device: 24GiB; default: what is free."
    ),
    click.option(
        "--context", "-c", callback=_tokens, metavar="TOKENS", help="8k, 131072; default: the model's."
    ),
    click.option("--concurrency", "-n", type=click.IntRange(min=1), default=1, help="Sequences at once."),
    click.option("--weights", metavar="FORMAT", help="bf16, q8_0, q4_k, fp8, ...; default: as stored."),
    click.option("--kv", default="bf16", show_default=True, help="Keys and values: f32, bf16, fp8 or int8."),
    click.option("--prefix", callback=_tokens, metavar="TOKENS", help="That all sequences begin with alike."),
    click.option("--reads", type=click.IntRange(min=0), default=0, help="Tokens or frames an encoder reads."),
    click.option("--device", metavar="NAME", help="h100, rtx-4090, ...: its public figures."),
    click.option(
        "--tensor-parallel", type=click.IntRange(min=1), default=1, help="Devices that share the model."
    ),
    click.option(
        "--train", "batch", type=click.IntRange(min=1), help="Also training, with so many sequences."
    ),
)

stretching = options(
    click.option(
        "--text",
        type=click.Path(path_type=Path),
        help="Read this long file; default: Python's manual.",
    ),
    click.option(
        "--length",
        callback=_tokens,
        metavar="TOKENS",
        help="Up to so many: 4k; default: the advertised context, or 4k with --budget.",
    ),
    click.option(
        "--texts",
        type=click.IntRange(min=1),
        help="Stretches of the text whose loss is taken; default 4.",
    ),
    click.option(
        "--times",
        type=click.IntRange(min=1),
        help="Pass keys of each length and depth, default 3; with --budget questions, default 5.",
    ),
    click.option(
        "--extend",
        multiple=True,
        metavar="METHOD",
        help="Also with linear, ntk, dynamic, yarn, longrope (may be repeated), or all.",
    ),
    click.option("--factor", type=float, help="How much longer, with --extend; default 2."),
    click.option(
        "--search",
        type=click.IntRange(min=1),
        metavar="LISTS",
        help="With longrope: look for its divisors, a text read for each list; default: a stand-in for them.",
    ),
    click.option(
        "--budget",
        callback=_tokens,
        metavar="TOKENS",
        help="Instead: facts in a document of --length, with room for so many tokens, in every way.",
    ),
    click.option(
        "--encoder",
        metavar="SOURCE",
        help="With --budget: what ranks the parts of a document; minilm, say. Default: words in common.",
    ),
    click.option(
        "--weighing", is_flag=True, help="With --budget: also h2o and snapkv, which run on torch: slow."
    ),
    click.option(
        "--threads", "-t", type=click.IntRange(min=1), help="Processor threads; default one for each core."
    ),
)
