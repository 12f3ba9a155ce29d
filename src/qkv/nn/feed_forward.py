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
    "silu": F.silu,
    "sigmoid": F.sigmoid,
    "tanh": F.tanh,
    "identity": lambda x: x,
}


def activation(name: spec.ClampedSwish | str) -> Callable[[Tensor], Tensor]:
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UnsupportedError(f"The activation {name} is not known ({', '.join(ACTIVATIONS)}).")
    return ACTIVATIONS[name]


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
        self.activation = activation(node.activation)
        self.gate = Linear(width, node.hidden, node.bias)
        self.up = Linear(width, node.hidden, node.bias)
        self.down = Linear(node.hidden, width, node.bias)

    def forward(self, x: Float[Tensor, "*rows width"], tap: Tap = NoTap()) -> Float[Tensor, "*rows width"]:
        hidden = tap("hidden", self.activation(self.gate(x)) * self.up(x))
        return tap("output", self.down(hidden))
