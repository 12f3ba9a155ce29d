"""Layers and stacks: residual steps around the mixers."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.nn.build import build, build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.layout import Layout
from qkv.nn.taps import NoTap, Tap


@implements(spec.Layer)
class Layer(nn.Module):
    """x <- post(skip * x + scale * after(sum of branch_i(norm_i(before(x))))) for each step in turn.

    Its parts carry the names the description gives them: `attention`, `attention_before`, ...
    """

    def __init__(self, node: spec.Layer, width: int):
        super().__init__()
        self.steps = node.named()
        for sublayer, step, branches in self.steps:
            if sublayer.gate is not None:
                raise UnsupportedError("Gated residual steps cannot be run in torch yet.")
            for slot in ("before", "after", "post"):
                setattr(self, f"{step}_{slot}", build_if(getattr(sublayer, slot), width))
            for name, branch in branches:
                setattr(self, f"{name}_norm", build_if(branch.norm, width))
                setattr(self, name, build(branch.mixer, width))

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
            read = self.through(f"{step}_before", x)
            outputs = []
            for name, branch in branches:
                mixer, inputs = getattr(self, name), self.through(f"{name}_norm", read)
                if branch.mixer.role == "feed_forward":
                    outputs.append(mixer(inputs, tap.at(name)))
                else:
                    outputs.append(mixer(inputs, layout, cache, f"{place}.{name}", tap.at(name)))
            total = functools.reduce(torch.add, outputs)
            added = self.through(f"{step}_after", total).to(x.dtype)
            x = _times(sublayer.skip, x) + _times(sublayer.scale, added)
            x = self.through(f"{step}_post", x)
            if i == 0 and len(self.steps) > 1:
                x = tap("middle", x)
        return tap("output", x)

    def through(self, slot: str, x: Tensor) -> Tensor:
        norm = getattr(self, slot)
        return x if norm is None else norm(x)


def _times(factor: float, x: Tensor) -> Tensor:
    return x if factor == 1 else factor * x


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
        inputs: Tensor,
        layout: Layout,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        x = tap("embedding", self.embedding(inputs, layout))
        for i, layer in enumerate(self.layers):
            x = layer(x, layout, cache, str(i), tap.at("layers", i))
        return tap("final", x if self.norm is None else self.norm(x))
