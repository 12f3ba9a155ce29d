"""The context of a model as its own weights show it, beside what is advertised; and of its extensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from qkv.context.extend import Stretch, chosen
from qkv.context.reading import Reader, machine_of
from qkv.context.result import DEPTHS, Context
from qkv.context.stretching import Methods
from qkv.context.tasks import by_context, copying, retrieval
from qkv.errors import RequestError, UnsupportedError
from qkv.loading import load
from qkv.runtime.choice import generates

SHORTEST = 512


def context(
    source: str | Path = "smollm2",
    *,
    text: Path | None = None,
    length: int | None = None,
    texts: int = 4,
    times: int = 3,
    extend: Sequence[str] = (),
    factor: float = 2.0,
    search: int = 0,
    threads: int | None = None,
    told: Callable[[str], None] = lambda what: None,
) -> Context:
    """Measures how far a model's context carries: loss with more and more read, pass keys,
    copying.

    `text` is a long UTF-8 file (None: the manual of Python that comes with it); the losses are of
    `texts` stretches of it, before which up to `length` tokens (None: the advertised context) are read.
    Of each length and depth `times` pass keys are asked for. `extend` names methods (see `EXTENSIONS`,
    or "all") that are compared, without training, on a text of `factor` times the advertised context.
    LongRoPE's divisors are the best of `search` lists on as much of the text that follows; with 0 others
    stand in for them, and are named so. `told` hears what is measured next.

    Raises a QkvError for a source that cannot be loaded, UnsupportedError for one that writes no text, has
    no tokenizer or cannot be extended, RequestError for a text that is too short.
    """
    loaded = load(source, threads=threads)
    if not generates(loaded.spec) or loaded.spec.encoder is not None or loaded.tokenizer is None:
        raise UnsupportedError("A context is measured of decoders of text that have a tokenizer.")
    advertised = loaded.context or SHORTEST
    most = length or advertised
    if most > advertised:
        raise RequestError(
            f"length is {most:,} and this model is made for {advertised:,}: extend reads further."
        )
    methods = Methods(chosen(extend), Stretch(factor, advertised, round(factor * advertised)), search)
    methods.check(loaded.spec)
    told("reading the text")
    tokens, needed = loaded.tokenizer.encode(long_text(text)), max(most, methods.needed)
    if len(tokens) < needed:
        raise RequestError(
            f"The text has {len(tokens):,} tokens and {needed:,} are needed: "
            "give a longer one with text, or a shorter length."
        )
    reader = Reader(machine_of(loaded))
    lengths = _doubling(most)
    return Context(
        loaded.files.name,
        advertised,
        most,
        tuple(by_context(reader, tokens, lengths, texts, told)),
        tuple(retrieval(reader, loaded.tokenizer, tokens, lengths, DEPTHS, times, told)),
        tuple(copying(reader, loaded.vocab, [n for n in _doubling(most - 256) if n], 128, told)),
        tuple(methods.compare(loaded, tokens, told)),
        "the manual that comes with Python" if text is None else text.name,
    )


def long_text(path: Path | None) -> str:
    if path is None:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
        return "\n\n".join(topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {problem}.") from None


def _doubling(most: int) -> list[int]:
    found, length = [], SHORTEST
    while length < most:
        found.append(length)
        length *= 2
    return [*found, most]
