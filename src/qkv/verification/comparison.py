"""Answers beside those of the reference, in pieces."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import exp, inf

import numpy as np
from numpy.typing import NDArray

from qkv.errors import UnsupportedError
from qkv.runtime.interpreter import Floats
from qkv.verification.report import Row
from qkv.verification.text import Text


class Clock:
    """Counts the seconds that pieces take to be made, without those of whoever takes them."""

    def __init__(self) -> None:
        self.seconds, self.pieces = 0.0, 0

    def over(self, pieces: Iterator[Floats]) -> Iterator[Floats]:
        while True:
            started = time.perf_counter()
            piece = next(pieces, None)
            self.seconds += time.perf_counter() - started
            if piece is None:
                return
            self.pieces += 1
            yield piece


class Tally:
    """Sums over answers that come in pieces, beside the reference's; in fp64, few rows at a time."""

    def __init__(self, text: Text, reference: Floats):
        self.text, self.reference, self.done = text, reference, 0
        self.off = self.most = self.divergence = self.surprise = 0.0
        self.agreed = self.told = 0

    def add(self, answers: Floats) -> None:
        rows, width = answers.shape
        if (left := len(self.reference) - self.done) < rows or width != self.reference.shape[1]:
            shape = (left, self.reference.shape[1])
            raise UnsupportedError(f"its answers are {answers.shape}, and those of the reference {shape}")
        step = max(1, (1 << 20) // width)
        for start in range(0, rows, step):
            piece = answers[start : start + step].astype(np.float64)
            self._add(piece, self.reference[self.done : self.done + len(piece)].astype(np.float64))

    def _add(self, ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> None:
        self.off = float(np.maximum(self.off, np.abs(ours - theirs).max()))
        self.most = float(np.maximum(self.most, np.abs(theirs).max()))
        if self.text.probable:
            ours -= _log_total(ours)
            theirs -= _log_total(theirs)
            self.divergence += float((np.exp(theirs) * (theirs - ours)).sum())
            self.agreed += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        if self.text.targets is not None:
            targets = self.text.targets[self.done : self.done + len(ours)]
            told = np.flatnonzero(targets >= 0)
            self.surprise -= float(ours[told, targets[told]].sum())
            self.told += len(told)
        self.done += len(ours)

    @property
    def perplexity(self) -> float | None:
        """Of the tokens that were to be told; None where there are none."""
        if not self.told:
            return None
        surprise = self.surprise / self.told
        return exp(surprise) if surprise < 700 else inf

    def row(self, what: str, speed: float, threads: bool | None = None, pieces: bool | None = None) -> Row:
        if self.done != len(self.reference):
            raise UnsupportedError(
                f"it gives {self.done:,} answers, and the reference {len(self.reference):,}"
            )
        probable = self.text.probable
        return Row(
            what,
            speed,
            self.off / (self.most or 1.0),
            max(self.divergence / self.done, 0.0) if probable else None,
            self.agreed / self.done if probable else None,
            self.perplexity,
            threads,
            pieces,
        )


def _log_total(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm of the sum of exponentials, (rows, 1)."""
    top = logits.max(-1, keepdims=True)
    found: NDArray[np.float64] = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return found


def same(a: Floats, b: Floats) -> bool:
    """Bit for bit: 0 is not -0."""
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))
