"""Axes: from values to pixels, and the round numbers to write beside them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Axis:
    """What an axis shows, with its unit: "loss, nats".

    `low` and `high` are its ends, from the data where not given; a linear axis that nearly reaches 0
    begins there. `ticks` are the values to write, else round ones. `marks` are values to draw a line
    at, by name.
    """

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] = ()
    marks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """An axis over [low, high], laid onto the pixels from `start` to `end`."""

    axis: Axis
    low: float
    high: float
    start: float = 0.0
    end: float = 1.0

    @staticmethod
    def of(axis: Axis, values: Iterable[float]) -> Scale:
        """Over what is drawn. Without any value, over 0 to 1 (1 to 10 on a logarithmic axis)."""
        known = [value for value in values if math.isfinite(value) and (not axis.log or value > 0)]
        known = known or ([1.0, 10.0] if axis.log else [0.0, 1.0])
        low, high = min(known), max(known)
        if not axis.log and 0 < low < 0.4 * high:
            low = 0.0
        low = low if axis.low is None else axis.low
        high = high if axis.high is None else axis.high
        if low >= high:  # one value: some room on both sides
            low, high = (low / 2, low * 2) if axis.log else (low - 0.5, low + 0.5)
        return Scale(axis, low, high)

    def onto(self, start: float, end: float) -> Scale:
        return replace(self, start=start, end=end)

    def __call__(self, value: float) -> float:
        """The pixel of a value; what is beyond the ends is drawn at them."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.axis.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        found = list(self.axis.ticks) or (self._powers() if self.axis.log else self._steps())
        inside = [value for value in found if self.low <= value <= self.high]
        # between 2 and 5, say, there is no power to write
        return inside or [value for value in self._steps() if self.low <= value <= self.high]

    def labels(self) -> list[str]:
        """The ticks as people write them, with as many digits as tell them apart."""
        ticks = self.ticks()
        found = [number(value) for value in ticks]
        digits = 4
        while len(set(found)) < len(ticks) and digits < 16:
            digits += 1
            found = [f"{value:,.{digits}g}" for value in ticks]
        return found

    def _steps(self) -> list[float]:
        """At most six multiples of 1, 2 or 5 times a power of ten."""
        power = 10.0 ** math.floor(math.log10(self.high - self.low))
        step = next(
            s for s in (power * f for f in (0.1, 0.2, 0.5, 1, 2, 5)) if (self.high - self.low) / s <= 5
        )
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _powers(self) -> list[float]:
        """Powers of ten, with 2 and 5 times them where there are few."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1, 2, 5) if last - first <= 2 else (1,)
        every = max(1, (last - first) // 6)
        return [f * 10.0**power for power in range(first, last + 1, every) for f in factors]


def number(value: float) -> str:
    """As people write it: 20,000, 0.05, 3e-06."""
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if abs(value) >= 1 else f"{value:.3g}"
