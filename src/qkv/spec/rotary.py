"""How a rotary position's frequencies are stretched to contexts longer than those trained on.

One small class a method. `frequencies(theta, dims, length)` gives the angle a position advances
each pair by, (dims / 2,) float32, and the factor that multiplies cosines and sines. `length` is
the total length of the call, cache included; only methods that depend on it look at it.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from qkv.spec.node import Node, node

Frequencies = NDArray[np.float32]


def inverse_frequencies(theta: float, dims: int) -> NDArray[np.float64]:
    """theta^(-2i/dims) for each pair i. Su et al. 2021, section 3.2.2. Cast to float32 only at the end."""
    return theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


@node
class Scaling(Node):
    """Base of the methods."""

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        raise TypeError(f"{type(self).__name__} does not define frequencies")


@node
class Interpolation(Scaling):
    """Every angle divided by `factor`: position interpolation. Chen et al. 2023."""

    factor: float

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        return (inverse_frequencies(theta, dims) / self.factor).astype(np.float32), 1.0


@node
class NTK(Scaling):
    """The base raised: the fastest pair stays, the slowest is divided by `factor`. bloc97, June 2023."""

    factor: float

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        base = theta * self.factor ** (dims / (dims - 2))
        return inverse_frequencies(base, dims).astype(np.float32), 1.0


@node
class DynamicNTK(Scaling):
    """NTK with a factor that follows the length of this call; up to `original` positions nothing changes."""

    factor: float
    original: int

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        grown = self.factor * max(length, self.original) / self.original - (self.factor - 1)
        base = theta * grown ** (dims / (dims - 2))
        return inverse_frequencies(base, dims).astype(np.float32), 1.0


@node
class Proportional(Scaling):
    """The fastest `share` of the pairs turns as in the whole head, the others stand still. Gemma 4.

    Unlike `Rotary(dims=...)`, whose frequencies are spread over the dimensions that turn, and whose
    pairs lie within them.
    """

    share: float
    factor: float = 1.0

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        turning = np.arange(dims // 2) < int(self.share * dims // 2)
        return (inverse_frequencies(theta, dims) * turning / self.factor).astype(np.float32), 1.0


def mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature: 0.1 * weight * ln(factor) + 1, and 1 for factors up to 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@node
class Yarn(Scaling):
    """Fast pairs kept, slow pairs divided by `factor`, a ramp between, and a temperature. Peng et al. 2023.

    `ramp="code"` is what every released model was trained with: linear in the pair's index between
    two rounded indices (`truncate=False` keeps them unrounded). `ramp="paper"` is linear in the
    number of turns within the original length. An explicit `attention_factor` is final; otherwise
    it follows from the two mscales when both are given, else from the factor alone.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    ramp: Literal["code", "paper"] = "code"

    def bounds(self, theta: float, dims: int) -> tuple[float, float]:
        """The pair indices between which the ramp of the deployed code runs."""

        def index(turns: float) -> float:
            return dims * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dims - 1)

    def kept(self, theta: float, dims: int) -> NDArray[np.float64]:
        """gamma: 1 where a pair's frequency is kept, 0 where it is divided by the factor."""
        if self.ramp == "paper":
            turns = self.original * inverse_frequencies(theta, dims) / (2 * math.pi)
            return np.clip((turns - self.beta_slow) / (self.beta_fast - self.beta_slow), 0, 1)
        low, high = self.bounds(theta, dims)
        if low == high:
            high += 0.001  # the deployed code's way round a division by zero
        return 1 - np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        plain, gamma = inverse_frequencies(theta, dims), self.kept(theta, dims)
        mixed = plain / self.factor * (1 - gamma) + plain * gamma
        return mixed.astype(np.float32), self.temperature()

    def temperature(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(self.factor, self.mscale) / mscale(self.factor, self.mscale_all_dim)
        return mscale(self.factor)


@node
class Llama3(Scaling):
    """Long wavelengths divided by `factor`, short ones kept, a mix between. Llama 3.1's released code."""

    factor: float
    low: float
    high: float
    original: int

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        plain = inverse_frequencies(theta, dims)
        turns = self.original * plain / (2 * math.pi)  # L / wavelength
        band = max(self.high - self.low, 1e-9)  # Llama 4 has none: a pair is kept or divided
        kept = np.clip((turns - self.low) / band, 0, 1)
        return ((1 - kept) * plain / self.factor + kept * plain).astype(np.float32), 1.0


@node
class LongRope(Scaling):
    """A searched divisor for each pair: `short` up to the original length, `long` beyond. Ding et al. 2024.

    The deployed code has one list for the whole call and no unscaled first positions.
    `attention_factor` multiplies always, also with the short list.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    factor: float
    attention_factor: float | None = None

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        divisors = np.asarray(self.long if length > self.original else self.short, np.float64)
        factor = self.attention_factor
        if factor is None:
            grows = self.factor > 1
            factor = math.sqrt(1 + math.log(self.factor) / math.log(self.original)) if grows else 1.0
        return (inverse_frequencies(theta, dims) / divisors).astype(np.float32), factor


@node
class Divided(Scaling):
    """Each pair's angle divided by a number of its own: how GGUF files store a scaling (rope_freqs).

    `attention_factor` multiplies cosines and sines.
    """

    divisors: tuple[float, ...]
    attention_factor: float = 1.0

    def frequencies(self, theta: float, dims: int, length: int) -> tuple[Frequencies, float]:
        plain = inverse_frequencies(theta, dims)
        return (plain / np.asarray(self.divisors, np.float64)).astype(np.float32), self.attention_factor
