"""Longer contexts without training: descriptions whose angles are slowed, by each known method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log, sqrt

import numpy as np

from qkv.errors import RequestError, UnsupportedError
from qkv.spec import NTK, Attention, Interpolation, LatentAttention, Model, Rotary, Yarn
from qkv.spec.layers import Mixer
from qkv.spec.rotary import Divided, Scaling, inverse_frequencies

Make = Callable[[Rotary, int, float, int, int], Scaling]  # of a head's dims, factor, original, length


def _dynamic(position: Rotary, dims: int, factor: float, original: int, length: int) -> Scaling:
    # what it is for a whole text of this length: nothing up to the original one
    return NTK(max(1.0, factor * max(length, original) / original - (factor - 1)))


def _longrope(position: Rotary, dims: int, factor: float, original: int, length: int) -> Scaling:
    """Searched divisors are a model's own; those that NTK amounts to stand in. Ding et al. 2024."""
    slowed = inverse_frequencies(position.theta * factor ** (dims / (dims - 2)), dims)
    divisors = inverse_frequencies(position.theta, dims) / slowed
    temperature = sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    return Divided(tuple(float(d) for d in np.asarray(divisors)), temperature)


EXTENSIONS: dict[str, Make] = {
    "linear": lambda position, dims, factor, original, length: Interpolation(factor),
    "ntk": lambda position, dims, factor, original, length: NTK(factor),
    "dynamic": _dynamic,
    "yarn": lambda position, dims, factor, original, length: Yarn(factor, original),
    "longrope": _longrope,
}


def extended(model: Model, kind: str, factor: float, original: int, length: int) -> Model:
    """The model for texts of `length` tokens, its rotations slowed by one of `EXTENSIONS`.

    `original` is the context it was trained for. Raises RequestError for another method or a factor
    below 1, UnsupportedError for a model without rotary positions, or whose rotations are slowed already.
    """
    if kind not in EXTENSIONS:
        raise RequestError(f"extend is {kind!r}; it can be {', '.join(EXTENSIONS)}.")
    if factor < 1:
        raise RequestError(f"factor is {factor:g}; it must be at least 1.")
    if model.decoder is None:
        raise UnsupportedError("Only decoders are extended.")
    turned = 0

    def slowed(mixer: Mixer) -> Mixer:
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
        scaling = EXTENSIONS[kind](position, dims, factor, original, length)
        return replace(mixer, position=replace(position, scaling=scaling))

    layers = tuple(layer.changed(slowed) for layer in model.decoder.layers)
    if not turned:
        raise UnsupportedError("This model has no rotary positions to slow.")
    return replace(model, decoder=replace(model.decoder, layers=layers))
