"""The model: stacks, what feeds them, and the head that reads the last of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

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
    towers,
)
from qkv.nn.build import build, build_if
from qkv.nn.cache import Cache
from qkv.nn.layers import Stack
from qkv.nn.layout import Layout, Source
from qkv.nn.taps import NoTap, Tap, Taps
from qkv.nn.towers import Features, Towers


class Transformer(nn.Module):
    """The reference model of a description. Parameters carry the description's names."""

    def __init__(self, node: spec.Model):
        super().__init__()
        _refuse(node)
        self.spec = node
        self.towers = Towers(build(tower) for tower in node.towers)
        self.encoder = build_if(node.encoder)
        self.decoder = build_if(node.decoder)
        self.head = build_if(node.head, node.trunk.width)
        tie(self, node)

    def forward(
        self,
        tokens: Int[Tensor, "batch length"] | None = None,
        source: Int[Tensor, "batch source_length"] | None = None,
        *,
        types: Int[Tensor, "batch length"] | None = None,
        features: Features | None = None,
        layout: Layout | None = None,
        source_layout: Layout | None = None,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
        last_only: bool = False,
    ) -> Float[Tensor, "batch length vocab"] | Float[Tensor, "batch length width"]:
        """What the head makes of the states (logits, for a language head), or the states without one.

        Heads that answer once for a sequence give (batch, answer).

        `types` are the tokens' own (BERT's segments), 0 where not given. `source` are the tokens the
        encoder of an encoder-decoder reads. `features` are images (batch, channels, height, across) or
        audio (batch, channels, frames): for the stack that reads them in the place of tokens, else for
        the towers (for several, a sequence of one each, or None). Where a tower's rows replace tokens,
        they fill the places of the call in order; where they are read, there is one image or audio a row.

        Source and features that are read are needed at the first call, and kept by the cache for later
        ones. Layouts default to unpadded rows. With a cache, the tokens follow those it holds; after
        an error it is as before. `last_only` gives the last place of each row only.
        """
        self._check(tokens=tokens, source=source, types=types, features=features)
        self._check_head(cache, last_only)
        layout = _placed(self.trunk, features if self.spec.features == "trunk" else tokens, layout)
        held = cache.length if cache is not None else 0
        try:
            if self.paired:
                read = features if self.spec.features == "encoder" else source
                layout = _reading(layout, self.read(read, source_layout, cache, tap))
            elif self.towers:
                layout = _reading(layout, self.towers.read(features, cache, tap))
            seen = layout if cache is None else cache.extend(layout)
            if tokens is None:
                x = self.trunk.embedding(features, seen)
            else:
                put = self.towers.put(features, tokens, layout, tap) if self.towers else ()
                x = self.trunk.embedding(tokens, seen, types, put)
            states = self.trunk(x, seen, cache, tap.at("decoder") if self.paired else tap)
            return self._answer(states[:, -1:] if last_only else states, seen, tap)
        except BaseException as problem:
            if cache is not None:
                cache.truncate(held)
            if _out_of_memory(problem):
                batch, length = layout.shape
                raise CapacityError(
                    f"There is no memory for a pass over {length:,} tokens in {batch:,} rows; give it fewer."
                ) from None
            raise

    @property
    def trunk(self) -> Stack:
        """The stack whose output the head reads."""
        return cast(Stack, self.encoder if self.decoder is None else self.decoder)

    @property
    def paired(self) -> bool:
        """Whether a decoder reads an encoder."""
        return self.encoder is not None and self.decoder is not None

    def read(
        self,
        source: Features | None,
        layout: Layout | None = None,
        cache: Cache | None = None,
        tap: Tap = NoTap(),
    ) -> Source:
        """What the encoder makes of the source (tokens, images or audio): once, where a cache keeps it."""
        if cache is not None and cache.length and source is not None:
            raise RequestError("This cache already holds what is read: give it at the first call only.")
        states: Tensor | None = None
        documents = layout.documents if layout is not None else None

        def encode() -> tuple[Tensor, ...]:
            nonlocal states
            encoder = cast(Stack, self.encoder)
            if source is None:
                what = "a source" if self.spec.features is None else encoder.embedding.reads
                raise RequestError(f"This model reads {what} beside its tokens, and none was given.")
            placed = _placed(encoder, source, layout)
            states = encoder(encoder.embedding(source, placed), placed, None, tap.at("encoder"))
            return (placed.positions,)

        (positions,) = encode() if cache is None else cache.keep("source", encode)
        return Source(states, positions, documents)

    def ahead(
        self, tokens: Int[Tensor, "batch length"], *, layout: Layout | None = None
    ) -> tuple[Float[Tensor, "batch shorter vocab"], ...]:
        """Logits of the next token, of the one after it, and so on: see `heads.MultiToken`.

        All at once and without a cache, as a loss over several tokens needs them. Element k has k
        places fewer than there are tokens, and its place i tells token i + k + 1.
        """
        if not isinstance(self.head, heads.MultiToken):
            raise RequestError("This model's head tells nothing of the tokens after the next.")
        layout = _placed(self.trunk, tokens, layout)
        states = Taps("final", ["final"])
        first = self(tokens, layout=layout, tap=states)
        embedding = cast(inputs.Tokens, self.trunk.embedding)
        return first, *self.head.ahead(states["final"], tokens, layout, embedding)

    def _check(self, **given: Any) -> None:
        """Refuses what nobody reads, and a trunk with nothing to read."""
        reads = self.spec.features
        used = {
            "tokens": reads != "trunk",
            "source": self.paired and reads != "encoder",
            "types": getattr(self.trunk.embedding, "types", None) is not None,
            "features": reads is not None,
        }
        for name, value in given.items():
            if value is not None and not used[name]:
                raise RequestError(f"This model has no use for {name}.")

    def _check_head(self, cache: Cache | None, last_only: bool) -> None:
        head = self.spec.head
        if last_only and not isinstance(head, spec.Language | spec.MultiToken):
            raise RequestError("Only a head over the vocabulary answers for the last place alone.")
        if cache is not None and head is not None and not head.every_token:
            raise RequestError(
                "This head answers once for a whole row, so nothing is read in parts: call without a cache."
            )

    def _answer(self, states: Tensor, layout: Layout, tap: Tap) -> Tensor:
        head = self.spec.head
        if self.head is None or head is None:
            return states
        answer = self.head(states) if head.every_token else self.head(states, layout)
        return tap("logits", answer)


def _refuse(node: spec.Model) -> None:
    """What would otherwise be left out in silence, or has no meaning here."""
    if node.towers and (node.encoder is not None or node.features != "towers"):
        raise UnsupportedError("Towers feed a decoder of tokens alone; anything else cannot be run in torch.")
    if sum(isinstance(tower.join, spec.Read) for tower in node.towers) > 1:
        raise UnsupportedError("Two towers that cross-attention reads cannot be run in torch.")
    if isinstance(node.head, spec.MultiToken) and not isinstance(node.trunk.input, spec.Tokens):
        raise UnsupportedError("A head that tells several tokens ahead needs a model of tokens.")


def _placed(stack: Stack, given: Features | None, layout: Layout | None) -> Layout:
    """The layout of what this stack is given to read: unpadded rows unless another was given."""
    embedding = cast(inputs.Tokens | inputs.Patches | inputs.Frames, stack.embedding)
    if not isinstance(given, Tensor):
        raise RequestError(f"This model reads {embedding.reads}, and the call gives none.")
    if layout is None:
        return embedding.layout(given)
    layout.check(embedding.rows(given))
    return layout


def _reading(layout: Layout, beside: Source | None) -> Layout:
    if beside is None:
        return layout
    batch, others = layout.shape[0], len(beside.positions)
    if batch != others:
        raise RequestError(f"There are {batch} rows of tokens, and {others} of what is read beside them.")
    if (layout.documents is None) != (beside.documents is None):
        raise RequestError("Either both the tokens and what they read are packed documents, or neither.")
    return replace(layout, source=beside, _memo={})


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
