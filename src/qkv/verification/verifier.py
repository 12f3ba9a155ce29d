"""Takes a model through the reference, the native runtime and transformers, and holds each to its bound.

The reference is torch in fp32 (numpy where torch is not installed) on the values that the file holds,
decoded. Everything else reads the same tokens: the native runtime with these values as fp32, which
shows its arithmetic; with the file's own format and a cache of 16 and of 8 bits, which is how people
run it; with formats that the file could be converted to; and transformers, as a second opinion on
the reference itself. Of all tokens only the reference's answers are held; others come in pieces.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import cast

import numpy as np

from qkv.checkpoints import ENCODERS, FORMATS, StoredTensor
from qkv.errors import RequestError, UnsupportedError
from qkv.families.sentence import MODULES
from qkv.generation_config import Bounds
from qkv.loading import Loaded, Parameters, Progress, checked, opened
from qkv.loading.room import check_memory
from qkv.runtime import Rows
from qkv.runtime.assembly import FORMATS_KEPT
from qkv.runtime.built import missing
from qkv.runtime.choice import INSTALL, Choice, has_torch
from qkv.runtime.interpreter import Floats
from qkv.runtime.lower import Lowered, lower
from qkv.runtime.machine import Interpreted
from qkv.runtime.native import CacheType, Native
from qkv.runtime.threads import default_threads
from qkv.sources import find
from qkv.verification.comparison import Clock, Tally, same
from qkv.verification.passes import (
    Changed,
    begin,
    decoded,
    in_pieces,
    piece_size,
    quantised,
    through_torch,
    torch_threads,
)
from qkv.verification.report import Row, Verification
from qkv.verification.text import Text, text_for
from qkv.verification.theirs import network_of, quietly, through_transformers

# what a row may be off, the largest difference relative to the largest logit; of probabilities in nats
EXACT = 1e-4  # fp32 against fp32: the order of sums, and nothing else
DIVERGENCE, AGREEMENT = 0.05, 0.90  # the file's own format, whose inputs are rounded to 8 bits
STATES = 0.2  # the same, of hidden states, which make no probabilities
OTHERS = 1e-3  # transformers, whose mathematics is the same and whose code is not

SPREAD = 32  # answers that are kept of the whole text read in one step
DEFAULT_FORMATS = ("Q8_0", "Q6_K", "Q4_K", "Q4_0")
WRITABLE = tuple(name for name in ENCODERS if name in FORMATS_KEPT)


def verify(
    source: str | Path,
    text: str | Path | None = None,
    tokens: int = 512,
    formats: str | Iterable[str] = (),
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Runs a model on the reference, the native runtime and transformers, and compares their answers.

    `source` is as for `load`. `text` is what is read, its first `tokens` tokens: a text, or the Path of
    a file that holds one; None is one that comes with qkv. A model without a tokenizer reads random
    token ids, always the same. `formats` are formats to quantise the weights to; without any, a source
    that is not quantised gets Q8_0, Q6_K, Q4_K and Q4_0. `threads` None are as many as do good.
    `progress` is told how many of how many passes are done.

    Raises a QkvError for a source that cannot be loaded, for a model that reads images or audio, and
    for a request that makes no sense. What exceeds its bound is no error: see `Verification.problems`.
    """
    wanted = _formats(formats)
    for name, number, least in (("tokens", tokens, 2), ("threads", 1 if threads is None else threads, 1)):
        if not Bounds(Integral, least).hold(number):
            raise RequestError(f"{name} is {number!r}; it must be {Bounds(Integral, least)}.")
    loaded = _opened(source)
    return _Verifier(loaded, text_for(loaded, text, tokens), wanted, threads, progress).run()


def _formats(given: str | Iterable[str]) -> tuple[str, ...]:
    names = tuple(str(name).upper() for name in ([given] if isinstance(given, str) else given))
    for name in names:
        if name not in WRITABLE:
            raise RequestError(f"format {name!r} is not known ({', '.join(WRITABLE)}).")
    return tuple(dict.fromkeys(names))


def _opened(source: str | Path) -> Loaded:
    """The files, checked. Of a model that embeds, the states of each token say more than one vector."""
    path, ignored = find(source), tuple[str, ...]()
    files = opened(path)
    if files.modules:
        ignored = (MODULES,)
        files = opened(path, ignored)
    places = checked(files, ignored)
    if files.description.model.features in ("trunk", "encoder"):
        raise UnsupportedError(
            f"{files.name} reads images or audio, and only models of text can be verified."
        )
    loaded = Loaded(files, Choice("torch", "it is the reference"), "float32", ignore=ignored)
    loaded.places = places
    return loaded


class _Verifier:
    """Takes one runtime after the other, so that the weights of one are in memory at a time."""

    def __init__(
        self,
        loaded: Loaded,
        text: Text,
        formats: tuple[str, ...],
        threads: int | None,
        progress: Progress | None,
    ):
        self.loaded, self.text, self.threads, self.progress = loaded, text, threads, progress
        self.weights = Parameters(loaded.files, loaded.places)
        kinds = formats_of(loaded)
        blocks = any(FORMATS[kind].block > 1 for kind in kinds)
        self.formats = formats or (() if blocks else DEFAULT_FORMATS)
        most = max(kinds, key=kinds.__getitem__, default="F32")
        self.kind = most if len(kinds) < 2 else f"mostly {most}"
        self.count = threads or default_threads()
        self.other = 1 if self.count > 1 else 2
        self.rows: list[Row] = []
        self.absent: list[str] = []
        self.problems: list[str] = []
        self.done, self.passes = 0, 0

    def run(self) -> Verification:
        try:
            lowered, reason = lower(self.loaded.spec), missing()
        except UnsupportedError as problem:
            lowered, reason = None, str(problem).rstrip(".")
        native = lowered is not None and reason is None
        self.passes = 5 + len(self.formats) if native else 2
        self._reference(lowered, reason)
        self._count()
        if lowered is None or reason is not None:
            self.absent.append(f"The native runtime is not compared: {reason}.")
        else:
            self._natives(lowered)
        self._transformers()
        self._count()
        name, text = self.loaded.files.name, self.text
        ran = any(row.threads is not None for row in self.rows)
        found = tuple(self.rows), tuple(self.absent), tuple(self.problems)
        return Verification(
            name, text.about, len(text.tokens), *found, (self.count, self.other) if ran else None
        )

    def _count(self) -> None:
        gc.collect()  # the weights of what has just run
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.passes)

    def _reference(self, lowered: Lowered | None, reason: str | None) -> None:
        """Holds the answers of all tokens, (tokens, width); or the one answer for all, (1, width)."""
        files, text, clock = self.loaded.files, self.text, Clock()
        pieces = clock.over(self._reading(lowered, reason))
        first = next(pieces)
        width, count = first.shape[1], 1 if len(first) == 1 and not text.causal else len(text.tokens)
        check_memory(files.name, 4 * count * width, f"for the answers of {count:,} tokens", "cpu")
        self.reference = np.empty((count, width), np.float32)
        done = 0
        for piece in chain([first], pieces):
            self.reference[done : done + len(piece)] = piece
            done += len(piece)
        tally = Tally(text, self.reference)
        tally.add(self.reference)
        what = f"reference: {'torch' if has_torch() else 'numpy'}, fp32"
        self.rows.append(Row(what, self._speed(clock), perplexity=tally.perplexity))
        if not np.isfinite(self.reference).all():
            self.problems.append("The reference's own answers are not all finite numbers.")

    def _reading(self, lowered: Lowered | None, reason: str | None) -> Iterator[Floats]:
        """By torch, else by numpy. The weights are there when this returns."""
        files = self.loaded.files
        if has_torch():
            from qkv.loading.network import fill

            network = fill(files, self.loaded.places, "float32", "cpu")
            return self._on_torch(through_torch(network, self.text))
        if lowered is None:
            raise UnsupportedError(f"{reason}; and torch is not installed: {INSTALL}.")
        check_memory(files.name, self.loaded.spec.parameters() * 4, "as fp32", "cpu")
        return in_pieces(Interpreted(lowered, self.weights), self.text)

    def _on_torch(self, pieces: Iterator[Floats]) -> Iterator[Floats]:
        with torch_threads(self.threads):
            yield from pieces

    def _speed(self, clock: Clock) -> float:
        """Tokens a second. What cannot be read in pieces is read whole for each."""
        count = len(self.text.tokens) * (1 if self.text.causal else clock.pieces)
        return count / max(clock.seconds, 1e-9)

    def _natives(self, lowered: Lowered) -> None:
        """Each way to run it. A row says what is different from the row before: the weights, or the cache."""
        ways: list[tuple[str, Mapping[str, StoredTensor], CacheType, bool | None]] = [
            ("native, weights as F32, cache f32", Changed(self.weights, decoded, 4), "f32", True),
            (f"native, as stored ({self.kind}), cache bf16", self.weights, "bf16", False),
            (f"native, as stored ({self.kind}), cache int8", self.weights, "int8", False),
        ]
        seen = set[tuple[str, ...]]()
        for format in self.formats:
            changed, kinds = quantised(lowered, self.weights, format)
            if kinds in seen:  # where blocks do not fit, several formats become one and the same
                continue
            seen.add(kinds)
            label = format if kinds == (format,) else f"{format} ({', '.join(kinds)})"
            ways.append((f"native, {label}, cache bf16", changed, "bf16", None))
        self.passes = len(ways) + 2
        for what, weights, cache, exact in ways:
            try:
                machine = Native(lowered, weights, self.count, cache)
            except UnsupportedError as problem:
                self.absent.append(f"{what} is not compared: {str(problem).rstrip('.')}.")
            else:
                self._native(what, machine, exact)
                del machine
            self._count()

    def _native(self, what: str, machine: Native, exact: bool | None) -> None:
        """A text read twice side by side, on two numbers of threads; and, before, in one step."""
        text, clock, tally = self.text, Clock(), Tally(self.text, self.reference)
        count = len(text.tokens)
        chosen = sorted({*range(count - 1, -1, -max(count // SPREAD, 1))})
        whole = None
        if text.causal:
            begin(machine, text, 0)
            whole = machine.step(Rows.of(text.tokens, wanted=chosen))
            machine.forget(0)
        few = type(machine.workers)(self.other)
        many, size = machine.workers, piece_size(machine.width)
        beside, start, threads, pieces = in_pieces(machine, text, 1), 0, True, True
        for piece in clock.over(in_pieces(machine, text, 0)):
            machine.workers = few
            threads &= same(piece, next(beside))
            machine.workers = many
            tally.add(piece)
            if whole is not None:
                here = [i for i, row in enumerate(chosen) if start <= row < start + size]
                pieces &= same(whole[here], piece[[chosen[i] - start for i in here]])
            start += len(piece)
        row = tally.row(what, self._speed(clock), threads, pieces if whole is not None else None)
        self.rows.append(row)
        self._check(row, exact)

    def _check(self, row: Row, exact: bool | None) -> None:
        """`exact`: against the bound of fp32, or of the file's own format; None: only bits are checked."""
        if exact is not None:
            for name, value, bound in self._bounds(row, exact):
                if not value <= bound:  # nor is what is no number
                    self.problems.append(f"{row.what}: {name} is {value:.2g}, and may be {bound:g}.")
        if row.threads is False:
            self.problems.append(f"{row.what}: {self.other} and {self.count} threads give different bits.")
        if row.pieces is False:
            self.problems.append(f"{row.what}: reading at once and in pieces gives different bits.")

    def _bounds(self, row: Row, exact: bool) -> Iterator[tuple[str, float, float]]:
        difference = cast(float, row.difference)
        if exact:
            yield "the difference", difference, EXACT
        elif row.divergence is None or row.agreement is None:
            yield "the difference", difference, STATES
        else:
            yield "the divergence", row.divergence, DIVERGENCE
            yield "the share of other top tokens", 1 - row.agreement, 1 - AGREEMENT

    def _transformers(self) -> None:
        absent = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if absent:
            self.absent.append(
                f"transformers is not compared: {absent[0]} is not installed (pip install {absent[0]})."
            )
            return
        clock, tally = Clock(), Tally(self.text, self.reference)
        try:
            with quietly() as version:
                network = network_of(self.loaded)
                for piece in clock.over(self._on_torch(through_transformers(network, self.text))):
                    tally.add(piece)
            row = tally.row(f"transformers {version}, fp32", self._speed(clock))
        except Exception as problem:  # another library may fail in any way, which is no fault of the model
            reason = str(problem).strip().split("\n")[0].rstrip(".") or type(problem).__name__
            self.absent.append(f"transformers is not compared: {reason}.")
            return
        self.rows.append(row)
        off = cast(float, row.difference if row.divergence is None else row.divergence)
        if not off <= OTHERS:
            name = "difference" if row.divergence is None else "divergence"
            self.problems.append(
                f"{row.what}: the {name} is {off:.2g}, and may be {OTHERS:g}; "
                "one of the two reads the files wrongly."
            )


def formats_of(loaded: Loaded) -> dict[str, int]:
    """The formats of the matrices that hold parameters, and their bytes."""
    found: dict[str, int] = {}
    for tensor in (loaded.files.tensors[name] for name in loaded.places.theirs):
        if len(tensor.shape) > 1:
            found[tensor.format] = found.get(tensor.format, 0) + tensor.nbytes
    return found
