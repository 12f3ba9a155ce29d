"""Activations in numpy, by the names the description uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import UnsupportedError
from qkv.spec.feed_forward import Activation, ClampedSwish

Floats = NDArray[np.float32]


def sigmoid(x: Any) -> Floats:
    """1 / (1 + exp(-x)), by the form whose exponential cannot overflow."""
    e = np.exp(-np.abs(x))
    found: Floats = np.where(x >= 0, 1, e) / (1 + e)
    return found


_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.square(np.maximum(x, 0)),
    "gelu": lambda x: (x * 0.5 * (1 + _erf(x / math.sqrt(2)))).astype(np.float32),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "identity": lambda x: x,
}


def activated(kind: Activation, x: Floats) -> Floats:
    """The activation of that name, or the clamped swish, of each number."""
    if isinstance(kind, ClampedSwish):
        bounded = np.minimum(x, kind.limit)
        return bounded * sigmoid(kind.alpha * bounded)
    if kind not in ACTIVATIONS:
        raise UnsupportedError(f"The activation {kind} is not known ({', '.join(ACTIVATIONS)}).")
    return ACTIVATIONS[kind](x)


def gated(kind: Activation, gate: Floats, up: Floats) -> Floats:
    """activation(gate) * up; a clamped swish bounds and moves `up` as well."""
    if isinstance(kind, ClampedSwish):
        up = np.clip(up, -kind.limit, kind.limit) + np.float32(kind.offset)
    return activated(kind, gate) * up
