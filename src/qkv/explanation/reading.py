"""A model and what it reads: passes over it, whole or from a layer on, and how much was run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.metric import Metric
from qkv.explanation.result import Axis
from qkv.model import Model
from qkv.nn import Layout, NoTap, Tap, Taps, Transformer, tap_names
from qkv.nn.layers import Stack
from qkv.nn.layout import Source
from qkv.nn.norms import BatchNorm, through
from qkv.nn.taps import Replace

TOKENS = 4096  # so many are in one pass over several rows, at most


class Place(NamedTuple):
    """Where a pass begins: before a layer of a side. Layer -1 is the embedding, the depth the last norm."""

    side: int
    layer: int


FIRST = Place(0, -1)


@dataclass
class Counts:
    """Calls of the model, and the layers they computed, one for each row."""

    passes: int = 0
    layers: int = 0


class Side(NamedTuple):
    """A stack, the name its points begin with ("", "encoder." or "decoder."), and what it reads."""

    prefix: str
    stack: Stack
    node: spec.Stack
    given: Tensor

    @property
    def depth(self) -> int:
        return len(self.node.layers)


class Reading:
    """What methods explain: a model, and a prompt that it reads.

    `model` is a `qkv.Model` or its network; `tokens` a text, token ids, or a batch of rows of equal
    length (batch, length): methods explain one row, and take more as a reference. `source` is what the
    encoder of an encoder-decoder reads, `types` the tokens' own. Where a stack reads images or audio,
    its features stand in the place of tokens. Nothing is padded.

    The states before each layer are kept after the first pass, and later passes begin at the first
    layer that something changes. `counts` says how much was run.

    Raises RequestError for what the model does not read, UnsupportedError for models with towers.
    """

    def __init__(self, model: Model | Transformer, tokens: Any, source: Any = None, *, types: Any = None):
        if isinstance(model, Model) and model._tap is not None:
            raise RequestError("This model is tapped: explain it after the tap's block.")
        self.model = model
        self.network = model.network if isinstance(model, Model) else model
        self.spec = self.network.spec
        self.counts = Counts()
        _refuse(self.network)
        self.types = self._ids(types)
        if self.types is not None and getattr(self.network.trunk.embedding, "types", None) is None:
            raise RequestError("This model has no use for types.")
        self.sides = self._read(tokens, source)
        self.names = tap_names(self.spec)

    def _read(self, tokens: Any, source: Any) -> tuple[Side, ...]:
        if self.network.paired == (source is None):
            raise RequestError(
                "This model reads a source beside its tokens, and none was given."
                if self.network.paired
                else "This model has no use for a source."
            )
        trunk, node = self.network.trunk, self.spec.trunk
        if not self.network.paired:
            return (Side("", trunk, node, self._given(node, tokens)),)
        encoder, reads = cast(Stack, self.network.encoder), cast(spec.Stack, self.spec.encoder)
        sides = (
            Side("encoder.", encoder, reads, self._given(reads, source)),
            Side("decoder.", trunk, node, self._given(node, tokens)),
        )
        if len(sides[0].given) != len(sides[1].given):
            raise RequestError(
                f"There are {len(sides[1].given)} rows of tokens, and {len(sides[0].given)} of what is read."
            )
        return sides

    def _given(self, node: spec.Stack, given: Any) -> Tensor:
        """Tokens as (batch, length), features as they are."""
        if not isinstance(node.input, spec.Tokens):
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise RequestError("This stack reads images or audio: give its features.")
            return given.to(self.device)
        if isinstance(given, str):
            if not isinstance(self.model, Model):
                raise RequestError("Only a loaded model reads texts: give token ids.")
            given = self.model.encode(given)
        ids = self._ids(given)
        if ids is None or ids.ndim != 2 or 0 in ids.shape:
            raise RequestError("Tokens must be a text, token ids, or rows of them of equal length.")
        return ids

    def _ids(self, given: Any) -> Int[Tensor, "batch length"] | None:
        if given is None:
            return None
        try:
            ids = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise RequestError("Tokens must be whole numbers, in rows of equal length.") from None
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise RequestError("Tokens must be whole numbers, in rows of equal length.")
        return (ids if ids.ndim > 1 else ids[None]).to(self.device, torch.long)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def batch(self) -> int:
        return len(self.sides[0].given)

    def length(self, side: int = -1) -> int:
        """Of the rows of a side's stream: of the trunk's, unless given."""
        one = self.sides[side]
        return int(cast(Any, one.stack.embedding).rows(one.given)[1])

    def one(self) -> Reading:
        """This, where it is of one row. Raises RequestError otherwise."""
        if self.batch != 1:
            raise RequestError(f"One prompt is explained at a time, and here are {self.batch}.")
        return self

    def alike(self, other: Reading) -> None:
        """Raises RequestError unless the other reads as many tokens with the same model."""
        if other.network is not self.network:
            raise RequestError("Both prompts must be read by the same model.")
        for side in range(len(self.sides)):
            ours, theirs = self.length(side), other.length(side)
            if ours != theirs:
                raise RequestError(
                    f"Both must have as many tokens, place for place: here are {ours:,} and {theirs:,}."
                )

    def tokens_axis(self, side: int = -1, name: str = "token") -> Axis:
        """The tokens of a side: their texts where the model has a tokenizer, else their ids as text."""
        given = self.sides[side].given
        if given.is_floating_point():
            return Axis(name, tuple(f"row {i}" for i in range(self.length(side))))
        return Axis(name, tuple(map(self.label, given[0].tolist())))

    def label(self, token: int) -> str:
        tokenizer = self.model.tokenizer if isinstance(self.model, Model) else None
        return str(token) if tokenizer is None else tokenizer.decode([token], skip_special=False)

    def taps(self, names: Iterable[str] | Mapping[str, Replace | None]) -> Taps:
        return Taps(names, self.names)

    def place(self, point: str) -> Place:
        """The last place a pass can begin at and still come by this point. Raises RequestError for none."""
        for number, side in enumerate(self.sides):
            if point in self.names and point.startswith(side.prefix):
                first, *rest = point.removeprefix(side.prefix).split(".")
                if first == "layers":
                    return Place(number, int(rest[0]))
                if first in ("embedding", "final"):
                    return Place(number, -1 if first == "embedding" else side.depth)
        raise RequestError(f"{point!r} is not a point of this model's stacks.")

    # what is kept

    @cached_property
    def embeddings(self) -> tuple[Float[Tensor, "batch length width"], ...]:
        """What each side's layers read, without gradient."""
        found = []
        with torch.no_grad():
            for number, side in enumerate(self.sides):
                more = (self.types,) if number == len(self.sides) - 1 and self.types is not None else ()
                found.append(side.stack.embedding(side.given, self.layout(number, self.batch), *more))
        return tuple(found)

    @cached_property
    def _states(self) -> dict[Place, Float[Tensor, "batch length width"]]:
        """Before each layer of each side, before its last norm, and after (the depth, and one more)."""
        places = {
            Place(number, layer): f"{side.prefix}layers.{layer}.input"
            for number, side in enumerate(self.sides)
            for layer in range(side.depth)
        }
        for number, side in enumerate(self.sides):
            before = f"layers.{side.depth - 1}.output" if side.depth else "embedding"
            places[Place(number, side.depth)] = side.prefix + before
            places[Place(number, side.depth + 1)] = f"{side.prefix}final"
        taps = self.taps(places.values())
        with torch.no_grad():
            self.run(taps, inputs=self.embeddings, places=())
        return {place: taps[point] for place, point in places.items()}

    def state(self, place: Place) -> Float[Tensor, "batch length width"]:
        """The stream where a pass may begin, with nothing changed; past the depth, after the last norm."""
        return self.embeddings[place.side] if place.layer < 0 else self._states[place]

    # passes

    def run(
        self,
        tap: Tap = NoTap(),
        *,
        start: Place = FIRST,
        rows: int | None = None,
        inputs: Sequence[Float[Tensor, "rows length width"]] | None = None,
        places: Sequence[int] | None = None,
        end: Place | None = None,
    ) -> Tensor:
        """A pass, of the batch or (where it is of one) of so many `rows` alike, that begins at `start`.

        `inputs` take the place of the embeddings of each side. A head for every token answers at
        `places` alone, where given. Gives logits (rows, places, answers), with gradient; what stands
        before layer `end`, where that is given, and no more is computed.
        """
        rows = self.batch if rows is None else rows
        rows = rows if inputs is None else len(inputs[0])
        self.counts.passes += 1
        source: Source | None = None
        for number, side in enumerate(self.sides):
            layout = self.layout(number, rows, source)
            if number < start.side:
                x = self._rows(self.state(Place(number, side.depth + 1)), rows)
            else:
                layer = start.layer if number == start.side else -1
                held = self.state(Place(number, layer)) if inputs is None else inputs[number]
                stop = end.layer if end is not None and end.side == number else None
                x = self._through(side, self._rows(held, rows), layer, layout, tap, stop)
                if stop is not None:
                    return x
            source = Source(x, layout.positions)
        return self.answer(x, layout, places, tap)

    def _through(
        self, side: Side, x: Tensor, layer: int, layout: Layout, tap: Tap, stop: int | None
    ) -> Tensor:
        """One side's layers from this one on, and its norm."""
        tap = tap.at(side.prefix[:-1]) if side.prefix else tap
        if layer < 0:
            x, layer = tap("embedding", x), 0
        for i in range(layer, side.depth if stop is None else stop):
            x = side.stack.layers[i](x, layout, None, str(i), tap.at("layers", i))
            self.counts.layers += len(x)
        return x if stop is not None else tap("final", through(side.stack.norm, x, layout))

    def answer(self, x: Tensor, layout: Layout, places: Sequence[int] | None, tap: Tap = NoTap()) -> Tensor:
        """What the head makes of the states behind the last norm; the states themselves without one."""
        head, node = self.network.head, self.spec.head
        if node is not None and not node.every_token:
            return tap("logits", cast(nn.Module, head)(x, layout)[:, None])
        x = x if places is None else x[:, list(places)]
        return x if head is None else tap("logits", head(x))

    def layout(self, number: int, rows: int, source: Source | None = None) -> Layout:
        side = self.sides[number]
        layout = cast(Any, side.stack.embedding).layout(side.given[:1].expand(rows, *side.given.shape[1:]))
        return cast(Layout, replace(layout, source=source, _memo={}))

    def _rows(self, x: Tensor, rows: int) -> Tensor:
        if len(x) == rows:
            return x
        if len(x) != 1:
            raise RequestError(f"One prompt is explained at a time, and here are {len(x)}.")
        return x.expand(rows, *x.shape[1:])

    @property
    def most_rows(self) -> int:
        """Of one pass."""
        return max(1, TOKENS // max(self.length(side) for side in range(len(self.sides))))

    # answers

    def places(self, metric: Metric) -> tuple[int, ...] | None:
        """Where the metric reads. Raises RequestError where this model does not answer there."""
        once = self.spec.head is not None and not self.spec.head.every_token
        places = metric.places
        if once != (places is None):
            raise RequestError(
                "This head answers once for the whole sequence: the metric's place must be None."
                if once
                else "This head answers at every token: give the metric a place."
            )
        for place in places or ():
            if not -self.length() <= place < self.length():
                raise RequestError(f"There is no place {place} in a prompt of {self.length():,} tokens.")
        return places

    def value(self, metric: Metric) -> Float[Tensor, " batch"]:
        """The metric with nothing changed, for each row."""
        places = self.places(metric)
        last = Place(len(self.sides) - 1, self.sides[-1].depth)
        with torch.no_grad():
            return metric(self.run(start=last, places=places))

    def read(self, points: Iterable[str]) -> dict[str, Tensor]:
        """The values of points, (batch, ...) each, without gradient, from a pass of their own."""
        points = list(points)
        if not points:
            return {}
        taps = self.taps(points)
        with torch.no_grad():
            self.run(taps, inputs=self.embeddings, places=())
        return {point: taps[point] for point in points}

    def since(self, before: Counts) -> dict[str, float]:
        """How much was run since, as facts of a result."""
        return {
            "passes": self.counts.passes - before.passes,
            "layers": self.counts.layers - before.layers,
        }


def _refuse(network: Transformer) -> None:
    if network.towers:
        raise UnsupportedError("A model whose towers read images or audio cannot be explained yet.")
    if any(isinstance(module, BatchNorm) and module.training for module in network.modules()):
        raise RequestError("In training, batch normalisation mixes rows: call network.eval() first.")
