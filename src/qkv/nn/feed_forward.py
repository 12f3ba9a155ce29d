"""What each position does on its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.nn.build import implements
from qkv.nn.linear import Linear
from qkv.nn.taps import NoTap, Tap

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021
    "gelu": F.gelu,  # x * Phi(x), exact
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * F.sigmoid(1.702 * x),  # Hendrycks and Gimpel 2016; CLIP
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "identity": lambda x: x,
}


def activation(kind: str | spec.ClampedSwish) -> Callable[[Tensor], Tensor]:
    """The function of a name, or the clamped swish."""
    if isinstance(kind, spec.ClampedSwish):
        return partial(_clamped_swish, kind)
    if kind not in ACTIVATIONS:
        raise UnsupportedError(f"The activation {kind} is not known ({', '.join(ACTIVATIONS)}).")
    return ACTIVATIONS[kind]


def _clamped_swish(kind: spec.ClampedSwish, x: Tensor) -> Tensor:
    bounded = x.clamp(max=kind.limit)
    return bounded * F.sigmoid(kind.alpha * bounded)


def gated(
    kind: str | spec.ClampedSwish, gate: Float[Tensor, "*rows hidden"], up: Float[Tensor, "*rows hidden"]
) -> Float[Tensor, "*rows hidden"]:
    """activation(gate) * up; a clamped swish bounds and moves `up` as well."""
    if isinstance(kind, spec.ClampedSwish):
        up = up.clamp(-kind.limit, kind.limit) + kind.offset
    return activation(kind)(gate) * up


@implements(spec.Dense)
class Dense(nn.Module):
    """down(activation(up(x))). Vaswani et al. 2017, section 3.3. Taps: hidden (after activation), output."""

    def __init__(self, node: spec.Dense, width: int):
        super().__init__()
        self.activation = activation(node.activation)
        self.up = Linear(width, node.hidden, node.bias)
        self.down = Linear(node.hidden, width, node.bias)

    def forward(self, x: Float[Tensor, "*rows width"], tap: Tap = NoTap()) -> Float[Tensor, "*rows width"]:
        hidden = tap("hidden", self.activation(self.up(x)))
        return tap("output", self.down(hidden))


@implements(spec.Gated)
class Gated(nn.Module):
    """down(activation(gate(x)) * up(x)). Shazeer 2020. Taps: hidden (the product), output."""

    def __init__(self, node: spec.Gated, width: int):
        super().__init__()
        activation(node.activation)  # refused now, if it is not known
        self.activation = node.activation
        self.gate = Linear(width, node.hidden, node.bias)
        self.up = Linear(width, node.hidden, node.bias)
        self.down = Linear(node.hidden, width, node.bias)

    def forward(self, x: Float[Tensor, "*rows width"], tap: Tap = NoTap()) -> Float[Tensor, "*rows width"]:
        hidden = tap("hidden", gated(self.activation, self.gate(x), self.up(x)))
        return tap("output", self.down(hidden))
