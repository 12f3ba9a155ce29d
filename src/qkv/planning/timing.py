"""How long steps take: reading and computing at once, added up over what a step does (a roofline)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any

from qkv.planning.cache import Layers, read
from qkv.planning.profile import Profile, overlapped
from qkv.planning.weights import Stored, read_in_a_step
from qkv.planning.workspace import ROWS, vocabulary, widths
from qkv.spec import Attention, LatentAttention, Model

ANSWERED = 12  # bytes that go through memory for a number of an answer: its line is read, written, read again
SOME, MANY = 16, 128  # rows that are still a few, and from which on each costs the same


@dataclass(frozen=True)
class Time:
    """Seconds, of which the truth is within the band either way."""

    seconds: float
    formula: str
    band: float

    @property
    def range(self) -> tuple[float, float]:
        return self.seconds * (1 - self.band), self.seconds * (1 + self.band)

    def data(self) -> dict[str, Any]:
        low, high = self.range
        return {"seconds": self.seconds, "low": low, "high": high, "formula": self.formula}


@dataclass(frozen=True)
class Costs:
    """A model's weights in a format, on a machine, a share of them on each of several devices.

    `packing` is how much larger its weights are than the format says.
    """

    model: Model
    how: Stored
    at: Profile
    devices: int = 1
    packing: float = 1.0

    def products(self, rows: int, answers: int, held: float = 0) -> tuple[float, str]:
        """Seconds of all products of a step: of reading their weights, and of computing meanwhile.

        Those of the head come last, for `answers` of the rows. `held` are the bytes that it reads besides.
        """
        weights, flops = self.of_a_step(rows, answers)
        inside, of_them = self.of_a_step(rows, answers, replace(self.model, head=None))
        read = weights / self.devices + held
        reading, seconds = (
            sum(both)
            for both in zip(
                self._at_once(inside, of_them, rows, read),
                self._at_once(weights - inside, flops - of_them, max(answers, 1), read),
                strict=True,
            )
        )
        words = f"{weights / 1e6:,.0f} MB of weights ({1e3 * reading:.2f} ms)"
        if rows > 1:
            words += f" for {flops / 1e9:,.2f} GFLOP of {rows:,} rows ({1e3 * seconds:.2f} ms in all)"
        return seconds, words

    def of_a_step(self, rows: int, answers: int, model: Model | None = None) -> tuple[int, int]:
        """Bytes of weights that it reads, as packed, and operations with them, on all devices."""
        weights, flops = read_in_a_step(model or self.model, self.how, rows, answers)
        return round(weights * self.packing), flops

    def _at_once(self, weights: int, flops: int, rows: int, read: float) -> tuple[float, float]:
        """Seconds of going through weights, in a step that reads so many bytes, and with their products."""
        format, at = self.how.matrices, self.at
        reading = at.seconds(weights / self.devices, at.of(at.weights, format), read)
        few, many = at.of(at.few, format), at.of(at.compute, format)
        return reading, overlapped(reading, flops / self.devices / (few + (many - few) * _many(rows)))

    def beside(self, rows: int, answers: int, read: float = 0) -> float:
        """Seconds of a step that are neither products nor attention; it reads so many bytes for those."""
        at, numbers = self.at, answers * vocabulary(self.model)
        of_layers = len(self.model.trunk.layers) * (at.layer + at.number * widths(self.model).all * rows)
        through = ANSWERED * numbers
        answering = at.answer * answers + at.logit * numbers + at.seconds(through, inf, read + through)
        return at.step + of_layers + answering

    def decode(self, kept: list[Layers], context: int, rows: int) -> Time:
        """A step that gives each of `rows` sequences of `context` tokens its next one."""
        held = rows * read(kept, context)
        products, words = self.products(rows, rows, held)
        weights = self.of_a_step(rows, rows)[0] / self.devices
        attending = self.at.seconds(held, self.at.cache, weights + held)
        beside = self.beside(rows, rows, weights + held)
        formula = (
            f"{words}, {held / 1e6:,.0f} MB of cache ({1e3 * attending:.2f} ms), "
            f"and {1e3 * beside:.2f} ms beside"
        )
        return Time(products + attending + beside, formula, self.at.band)

    def prefill(self, length: int) -> Time:
        """Reading a prompt of so many tokens, in steps of at most 512."""
        seconds, steps = 0.0, -(-length // ROWS)
        for step in range(steps):
            rows, last = min(ROWS, length - step * ROWS), step == steps - 1
            seconds += self.products(rows, int(last))[0] + self.beside(rows, int(last))
        mixing = attention_flops(self.model, length) / self.devices
        products = self.model.flops(length) / self.devices - mixing
        formula = (
            f"{products / 1e9:,.1f} GFLOP of products at "
            f"{self.at.of(self.at.compute, self.how.matrices) / 1e9:,.0f} GFLOP/s, {mixing / 1e9:,.2f} of "
            f"attention at {self.at.attention / 1e9:,.0f}, in {steps:,} step{'s' * (steps != 1)}"
        )
        attending = (
            mixing / self.at.attention + self.at.pair * attention_pairs(self.model, length) / self.devices
        )
        return Time(seconds + attending, formula, self.at.band)


def _many(rows: int) -> float:
    """How far from a few rows (0) to many (1): by the logarithm between."""
    return min(1.0, max(0.0, log(rows / SOME) / log(MANY / SOME)))


def attention_flops(model: Model, length: int) -> float:
    """Of scores and mixtures alone, over visible pairs."""
    return float(sum(count * mixer.mixing_flops(length, 0) for mixer, count in _attending(model).items()))


def attention_pairs(model: Model, length: int) -> float:
    """Visible pairs of a query and a key, of all heads."""
    total = 0.0
    for mixer, count in _attending(model).items():
        rotary = mixer.rotary_dim if isinstance(mixer, LatentAttention) else 0
        a_pair = 2 * (mixer.head_dim + rotary + (mixer.value_dim or mixer.head_dim))
        total += count * mixer.mixing_flops(length, 0) / a_pair
    return total


def _attending(model: Model) -> Counter[Attention | LatentAttention]:
    return Counter(m for m in model.trunk.mixers() if isinstance(m, Attention | LatentAttention))


@dataclass(frozen=True)
class Crossover:
    """From how many tokens of context scores and mixtures cost a token more than the feed-forward.

    `scores` counts them alone, `attention` with the four projections. None where they never do.
    """

    scores: int | None
    attention: int | None


def crossover(model: Model, most: int = 1 << 20) -> Crossover:
    """Where attention overtakes the feed-forward in operations of one pass, by bisection."""
    widths = model.trunk.width
    forward = projected = 0
    for mixer in model.trunk.mixers():
        per_token = 2 * sum(t.used for t in mixer.tensors(widths) if t.multiplies)
        if mixer.role == "feed_forward":
            forward += per_token
        else:
            projected += per_token

    def first(beside: int) -> int | None:
        def over(length: int) -> bool:
            return attention_flops(model, length) + beside * length >= forward * length

        if not forward or not over(most):
            return None
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if over(middle) else (middle, high)
        return high

    return Crossover(first(0), first(projected))
