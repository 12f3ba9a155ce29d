"""Layers and stacks: residual steps around the mixers."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.nn.build import build, build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.feed_forward import activation
from qkv.nn.layout import Layout
from qkv.nn.norms import through
from qkv.nn.taps import NoTap, Tap


@implements(spec.Layer)
class Layer(nn.Module):
    """x <- post(skip * x + gate * scale * after(sum of branch_i(norm_i(before(x))))) for each step in turn.

    Its parts carry the names the description gives them: `attention`, `attention_before`, ...
    """

    def __init__(self, node: spec.Layer, width: int):
        super().__init__()
        self.steps = node.named()
        for sublayer, step, branches in self.steps:
            for slot in ("before", "after", "post", "gate"):
                setattr(self, f"{step}_{slot}", build_if(getattr(sublayer, slot), width))
            for name, branch in branches:
                setattr(self, f"{name}_norm", build_if(branch.norm, width))
                setattr(self, name, build(branch.mixer, width))
                setattr(self, f"{name}_norm_after", build_if(branch.after, width))

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        place: str = "",
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        x = tap("input", x)
        for i, (sublayer, step, branches) in enumerate(self.steps):
            read = self.through(f"{step}_before", x, layout)
            outputs = []
            for name, branch in branches:
                mixer, inputs = getattr(self, name), self.through(f"{name}_norm", read, layout)
                if isinstance(branch.mixer, spec.Experts):
                    output = mixer(inputs, layout, tap.at(name))
                elif branch.mixer.role == "feed_forward":
                    output = mixer(inputs, tap.at(name))
                else:
                    output = mixer(inputs, layout, cache, f"{place}.{name}", tap.at(name))
                outputs.append(self.through(f"{name}_norm_after", output, layout))
            total = functools.reduce(torch.add, outputs)
            added = self.through(f"{step}_after", total, layout).to(x.dtype)
            added = self.through(f"{step}_gate", _times(sublayer.scale, added), layout)
            x = _times(sublayer.skip, x) + added
            x = self.through(f"{step}_post", x, layout)
            if i == 0 and len(self.steps) > 1:
                x = tap("middle", x)
        return tap("output", x)

    def through(self, slot: str, x: Tensor, layout: Layout) -> Tensor:
        return through(getattr(self, slot), x, layout)


def _times(factor: float, x: Tensor) -> Tensor:
    return x if factor == 1 else factor * x


@implements(spec.Gate)
class Gate(nn.Module):
    """activation(weight) * x: one weight, or one a channel.

    At tanh(0) a step adds nothing, so that layers put into a trained model leave it as it was
    (Alayrac et al. 2022, section 2.2); a small weight a channel is LayerScale (Touvron et al. 2021).
    """

    def __init__(self, node: spec.Gate, width: int):
        super().__init__()
        self.activation = activation(node.activation or "identity")
        self.weight = nn.Parameter(torch.empty(width if node.over == "channel" else 1))

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        return x * self.activation(self.weight).to(x.dtype)


@implements(spec.Stack)
class Stack(nn.Module):
    """An input, the layers, and a final norm where there is one."""

    def __init__(self, node: spec.Stack):
        super().__init__()
        self.embedding = build(node.input)
        self.layers = nn.ModuleList(build(layer, node.width) for layer in node.layers)
        self.norm = build_if(node.norm, node.width)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
        until: int | None = None,
    ) -> Float[Tensor, "batch length width"]:
        """x is what `embedding` makes of the inputs. `until`: so many layers, and no norm after them."""
        x = tap("embedding", x)
        for i, layer in enumerate(self.layers[:until]):
            x = layer(x, layout, cache, str(i), tap.at("layers", i))
        return x if until is not None else tap("final", through(self.norm, x, layout))
