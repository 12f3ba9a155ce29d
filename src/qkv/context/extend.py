"""Longer contexts without training: descriptions whose angles are slowed, by each known method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt

from qkv.errors import RequestError, UnsupportedError
from qkv.spec import NTK, Attention, Interpolation, LatentAttention, Model, Rotary, Yarn
from qkv.spec.layers import Mixer
from qkv.spec.rotary import Divided, Scaling, inverse_frequencies, mscale


@dataclass(frozen=True)
class Stretch:
    """By what a model is slowed: from `original` tokens, `factor` times, for a text of `length` tokens."""

    factor: float
    original: int
    length: int

    @property
    def grown(self) -> float:
        """Dynamic NTK's factor for a whole text of this length: 1 up to the original one."""
        times = max(self.length, self.original) / self.original
        return max(1.0, self.factor * times - (self.factor - 1))

    @property
    def temperature(self) -> float:
        """LongRoPE's, on cosines and sines. Ding et al. 2024."""
        return sqrt(1 + log(self.factor) / log(self.original)) if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Extension:
    """A method: the scaling of rotary positions with so many dims, and in words what it does here.

    One that `stands_in` is not what its paper does, and its words say what it is.
    """

    make: Callable[[Rotary, int, Stretch], Scaling]
    words: Callable[[Stretch], str]
    stands_in: bool = False


def _stand_in(position: Rotary, dims: int, by: Stretch) -> Scaling:
    """LongRoPE's divisors are searched for each model; those that NTK amounts to stand in."""
    slowed = inverse_frequencies(position.theta * by.factor ** (dims / (dims - 2)), dims)
    divisors = inverse_frequencies(position.theta, dims) / slowed
    return Divided(tuple(float(d) for d in divisors), by.temperature)


EXTENSIONS: dict[str, Extension] = {
    "linear": Extension(
        lambda position, dims, by: Interpolation(by.factor),
        lambda by: f"every angle divided by {by.factor:g}",
    ),
    "ntk": Extension(
        lambda position, dims, by: NTK(by.factor), lambda by: f"the base raised for {by.factor:g}"
    ),
    "dynamic": Extension(
        lambda position, dims, by: NTK(by.grown),
        lambda by: f"the base raised for {by.grown:g}, as it is at {by.length:,} tokens",
    ),
    "yarn": Extension(
        lambda position, dims, by: Yarn(by.factor, by.original),
        lambda by: f"slow pairs divided by {by.factor:g}, temperature {mscale(by.factor):.3f}",
    ),
    "longrope": Extension(
        _stand_in,
        lambda by: f"a stand-in: NTK's divisors, none searched; temperature {by.temperature:.3f}",
        stands_in=True,
    ),
}


def chosen(kinds: Sequence[str]) -> list[str]:
    """The methods that were asked for, each once; "all" are all. Raises RequestError for another."""
    for kind in kinds:
        if kind not in EXTENSIONS and kind != "all":
            raise RequestError(f"extend is {kind!r}; it can be {', '.join(EXTENSIONS)} or all.")
    return list(EXTENSIONS) if "all" in kinds else list(dict.fromkeys(kinds))


def extended(model: Model, kind: str, factor: float, original: int, length: int) -> Model:
    """The model for texts of `length` tokens, its rotations slowed by one of `EXTENSIONS`.

    `original` is the context it was trained for. Raises RequestError for another method or a factor
    below 1, UnsupportedError for a model without rotary positions, or whose rotations are slowed already.
    """
    (kind,) = chosen([kind])
    if factor < 1:
        raise RequestError(f"factor is {factor:g}; it must be at least 1.")
    by = Stretch(factor, original, length)
    return slowed(model, lambda position, dims: EXTENSIONS[kind].make(position, dims, by))


def slowed(model: Model, make: Callable[[Rotary, int], Scaling]) -> Model:
    """The model with a scaling for each of its rotary positions, made from it and its rotating dims.

    Raises UnsupportedError for a model without any, or whose rotations are slowed already.
    """
    if model.decoder is None:
        raise UnsupportedError("Only decoders are extended.")
    turned = 0

    def changed(mixer: Mixer) -> Mixer:
        nonlocal turned
        if not isinstance(mixer, Attention | LatentAttention) or not isinstance(mixer.position, Rotary):
            return mixer
        position = mixer.position
        if position.scaling is not None:
            raise UnsupportedError(
                f"This model's rotations are slowed already, by {type(position.scaling).__name__}: "
                "another way on top of it has no meaning."
            )
        turned += 1
        dims = position.dims or (mixer.rotary_dim if isinstance(mixer, LatentAttention) else mixer.head_dim)
        return replace(mixer, position=replace(position, scaling=make(position, dims)))

    layers = tuple(layer.changed(changed) for layer in model.decoder.layers)
    if not turned:
        raise UnsupportedError("This model has no rotary positions to slow.")
    return replace(model, decoder=replace(model.decoder, layers=layers))
