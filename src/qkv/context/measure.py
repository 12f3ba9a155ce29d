"""The context of a model as its own weights show it, beside what is advertised; and of its extensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from qkv.context.extend import EXTENSIONS, extended
from qkv.context.reading import Reader
from qkv.context.tasks import Bucket, Copied, Found, Given, by_context, by_position, copying, retrieval
from qkv.errors import RequestError, UnsupportedError
from qkv.loading import Loaded, load
from qkv.runtime.choice import choose, generates
from qkv.runtime.machine import Machine

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SHORTEST = 512
WORSE = 0.05  # nats a token that more context may cost
FOUND = 0.8  # of the share of pass keys that came back from shorter texts
COPIED = 0.5  # of the first time's loss


@dataclass(frozen=True)
class Extended:
    """A method, and the loss by position of texts `length` long with it."""

    kind: str
    factor: float
    buckets: tuple[Bucket, ...]

    def beyond(self, original: int) -> float:
        """The mean loss past the original length."""
        later = [b for b in self.buckets if b.start >= original]
        total = sum(b.end - b.start for b in later)
        return sum(b.loss * (b.end - b.start) for b in later) / max(1, total)


@dataclass(frozen=True)
class Context:
    """What was measured of one model. Lengths in tokens, losses in nats a token."""

    name: str
    advertised: int
    read: int  # the longest text that was read
    given: tuple[Given, ...]
    found: tuple[Found, ...]
    copied: tuple[Copied, ...]
    extensions: tuple[Extended, ...] = ()
    about: str = ""
    notes: tuple[str, ...] = field(default=())

    @property
    def by_loss(self) -> int:
        """The most context that costs the same tokens no more than 0.05 nats over the best with less."""
        best, end = float("inf"), 0
        for one in self.given:
            if one.loss > best + WORSE:
                break
            best, end = min(best, one.loss), one.context
        return end

    @property
    def by_retrieval(self) -> int:
        """The longest text from which keys came back at 80 % of the rate of all shorter ones, or better."""
        before, end = list[float](), 0
        for length, share in self.shares.items():
            if not share or (before and share < FOUND * fmean(before)):
                break
            before.append(share)
            end = length
        return end

    @property
    def shares(self) -> dict[int, float]:
        """Of each length: which share of the pass keys came back."""
        lengths = sorted({one.length for one in self.found})
        return {
            length: sum(f.right for f in self.found if f.length == length)
            / sum(f.asked for f in self.found if f.length == length)
            for length in lengths
        }

    @property
    def by_copying(self) -> int:
        """The furthest that tokens are copied from with at most half of their first loss."""
        end = 0
        for one in self.copied:
            if one.again > COPIED * one.first:
                break
            end = one.distance
        return end

    @property
    def usable(self) -> int:
        """The least of the three."""
        return min(self.by_loss, self.by_retrieval, self.by_copying)

    def order(self) -> list[tuple[str, float]]:
        """The extensions, and none, by their loss past the advertised length: the best first."""
        found = [(one.kind, one.beyond(self.advertised)) for one in self.extensions]
        return sorted(found, key=lambda each: each[1])

    def data(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {
            **asdict(self),
            "usable": self.usable,
            "by_loss": self.by_loss,
            "by_retrieval": self.by_retrieval,
            "by_copying": self.by_copying,
            "order": [{"kind": kind, "loss": loss} for kind, loss in self.order()],
        }

    def __str__(self) -> str:
        from qkv.context.report import lines

        return "\n".join(lines(self))


def context(
    source: str | Path = "smollm2",
    *,
    text: Path | None = None,
    length: int | None = None,
    texts: int = 4,
    times: int = 3,
    extend: Sequence[str] = (),
    factor: float = 2.0,
    threads: int | None = None,
    told: Callable[[str], None] = lambda what: None,
) -> Context:
    """Measures how far a model's context carries: loss with more and more read, pass keys,
    copying.

    `text` is a long UTF-8 file (None: the manual of Python that comes with it); the losses are of
    `texts` stretches of it, before which up to `length` tokens (None: the advertised context) are read.
    Of each length and depth `times` pass keys are asked for. `extend` names methods (see `EXTENSIONS`,
    or "all") that are compared, without training, on a text of `factor` times the advertised context.
    `told` hears what is measured next.

    Raises a QkvError for a source that cannot be loaded, UnsupportedError for one that writes no text or
    has no tokenizer, RequestError for a text that is too short.
    """
    loaded = load(source, threads=threads)
    if not generates(loaded.spec) or loaded.spec.encoder is not None or loaded.tokenizer is None:
        raise UnsupportedError("A context is measured of decoders of text that have a tokenizer.")
    advertised = loaded.context or SHORTEST
    most = min(length or advertised, advertised)
    told("reading the text")
    tokens = loaded.tokenizer.encode(long_text(text))
    kinds = list(EXTENSIONS) if "all" in extend else list(dict.fromkeys(extend))
    longest = round(factor * advertised) if kinds else most
    if len(tokens) < max(most, longest):
        raise RequestError(
            f"The text has {len(tokens):,} tokens and {max(most, longest):,} are needed: "
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
        tuple(_extensions(loaded, kinds, factor, tokens[:longest], told)),
        "the manual that comes with Python" if text is None else text.name,
    )


def _extensions(
    loaded: Loaded, kinds: Sequence[str], factor: float, tokens: list[int], told: Callable[[str], None]
) -> list[Extended]:
    """Each method on one long text, and the model as it is."""
    found = []
    for kind in ["none", *kinds] if kinds else []:
        model, original = loaded.spec, loaded.context or SHORTEST
        if kind != "none":
            model = extended(model, kind, factor, original, len(tokens))
        description = replace(loaded.description, model=model)
        files = replace(loaded.files, description=description)
        choice = choose(None, model)
        reader = Reader(machine_of(Loaded(files, choice, loaded.dtype, threads=loaded.threads)))
        told(f"a text of {len(tokens):,} tokens, {kind}")
        buckets = by_position(reader, tokens)
        found.append(Extended(kind, factor, tuple(buckets)))
    return found


def machine_of(loaded: Loaded) -> Machine:
    if loaded.choice.runtime != "torch":
        return loaded.machine
    module = import_module("qkv.runtime.torch_machine")
    machine: Machine = module.TorchMachine(loaded.model)
    return machine


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
