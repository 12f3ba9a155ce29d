"""The model: stacks, and the head that reads the last of them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import CapacityError, RequestError, UnsupportedError
from qkv.nn import (  # noqa: F401  (they register what they implement)
    attention,
    biases,
    disentangled,
    experts,
    feed_forward,
    heads,
    inputs,
    latent,
    layers,
    norms,
    recurrent,
    rotary,
)
from qkv.nn.build import build_if
from qkv.nn.cache import Cache
from qkv.nn.layers import Stack
from qkv.nn.layout import Layout, Source
from qkv.nn.taps import NoTap, Tap


class Transformer(nn.Module):
    """The reference model of a description. Parameters carry the description's names."""

    def __init__(self, node: spec.Model):
        super().__init__()
        if node.towers:
            raise UnsupportedError("Towers (images, audio) can be described but not run in torch yet.")
        self.spec = node
        self.encoder = build_if(node.encoder)
        self.decoder = build_if(node.decoder)
        self.head = build_if(node.head, node.trunk.width)
        tie(self, node)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"],
        source: Int[Tensor, "batch source_length"] | None = None,
        *,
        layout: Layout | None = None,
        source_layout: Layout | None = None,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
        last_only: bool = False,
    ) -> Float[Tensor, "batch length vocab"] | Float[Tensor, "batch length width"]:
        """What the head makes of the states (logits, for a language head), or the states without one.

        `source` are the tokens the encoder of an encoder-decoder reads: needed at the first call,
        kept by the cache for later ones. Layouts default to unpadded rows. With a cache, the tokens
        follow those it holds; after an error it is as before. `last_only` gives the last place of
        each row only.
        """
        layout = _checked(tokens, layout)
        held = cache.length if cache is not None else 0
        try:
            if self.encoder is not None and self.decoder is not None:
                layout = replace(layout, source=self.read(source, source_layout, cache, tap), _memo={})
                within = tap.at("decoder")
            elif source is not None:
                raise RequestError("Only a model with an encoder and a decoder reads a source.")
            else:
                within = tap
            seen = layout if cache is None else cache.extend(layout)
            states = self.trunk(tokens, seen, cache, within)
            if self.head is None:
                return states
            return tap("logits", self.head(states[:, -1:] if last_only else states))
        except BaseException as problem:
            if cache is not None:
                cache.truncate(held)
            if _out_of_memory(problem):
                batch, length = tokens.shape
                raise CapacityError(
                    f"There is no memory for a pass over {length:,} tokens in {batch:,} rows; give it fewer."
                ) from None
            raise

    @property
    def trunk(self) -> Stack:
        """The stack whose output the head reads."""
        return cast(Stack, self.encoder if self.decoder is None else self.decoder)

    def read(
        self,
        source: Tensor | None,
        layout: Layout | None = None,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
    ) -> Source:
        """What the encoder makes of the source: once, where there is a cache to keep it."""

        def encode() -> tuple[Tensor, Tensor]:
            if source is None:
                raise RequestError("This model reads a source beside its tokens, and none was given.")
            placed = _checked(source, layout)
            states = cast(Stack, self.encoder)(source, placed, None, tap.at("encoder"))
            return states, placed.positions

        return Source(*(encode() if cache is None else cache.keep("source", encode)))


def _checked(tokens: Tensor, layout: Layout | None) -> Layout:
    """The layout of these tokens: unpadded rows unless another was given."""
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise RequestError(f"Tokens must be (batch, length), both at least 1; got {tuple(tokens.shape)}.")
    layout = layout or Layout.unpadded(tokens.shape[0], tokens.shape[1], tokens.device)
    layout.check(tuple(tokens.shape))
    return layout


def _out_of_memory(problem: BaseException) -> bool:
    """Torch's processor allocator has no error class of its own."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(problem, kinds) or (
        isinstance(problem, RuntimeError) and "allocate memory" in str(problem)
    )


def tie(module: nn.Module, node: spec.Model) -> None:
    """Makes parameters that the description shares one and the same."""
    first: dict[str, nn.Parameter] = {}
    for tensor in node.tensors():
        owner, _, leaf = tensor.name.rpartition(".")
        parameter = first.setdefault(tensor.key, module.get_parameter(tensor.name))
        setattr(module.get_submodule(owner), leaf, parameter)
