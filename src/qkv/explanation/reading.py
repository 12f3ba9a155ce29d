"""A model and what it reads: passes over it, whole or from a layer on, and how much was run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.footprint import Footprint, Need, Watched, nbytes
from qkv.explanation.metric import Metric
from qkv.explanation.result import Axis
from qkv.model import Model
from qkv.nn import Layout, NoTap, Tap, Taps, Transformer, tap_names
from qkv.nn.layers import Stack
from qkv.nn.layout import Source
from qkv.nn.norms import BatchNorm, through
from qkv.nn.taps import Replace

TOKENS = 4096  # so many are in one pass over several rows, at most
BROKEN, CHARACTER = "\ufffd", 4  # what stands for a piece of a character; it has so many tokens at most


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


class First(NamedTuple):
    """What the first pass shows: the states that are kept, and what one row of a later pass takes.

    `row` are bytes held at once, up to the head; `sizes` those of each point; `answers` the head gives
    so many numbers at a place.
    """

    states: dict[Place, Float[Tensor, "batch length width"]]
    row: int
    sizes: dict[str, int]
    answers: int


class Reading:
    """What methods explain: a model, and a prompt that it reads.

    `model` is a `qkv.Model` or its network; `tokens` a text, token ids, or a batch of rows of equal
    length (batch, length): methods explain one row, and take more as a reference. `source` is what the
    encoder of an encoder-decoder reads, `types` the tokens' own. Where a stack reads images or audio,
    its features stand in the place of tokens. Nothing is padded.

    The states before each layer are kept after the first pass, and later passes begin at the first
    layer that something changes. `counts` says how much was run.

    `memory` are the bytes that the tensors of a sweep (ablation or patching) may take beside the
    weights, for what it keeps and for a batch of rows: batches are as large as fit, and a sweep of which
    not even one row fits is refused before it begins. None: as many rows as have 4,096 tokens. What the
    first pass takes, of the prompt alone, is known only after it.

    Raises RequestError for what the model does not read, UnsupportedError for models with towers.
    """

    def __init__(
        self,
        model: Model | Transformer,
        tokens: Any,
        source: Any = None,
        *,
        types: Any = None,
        memory: int | None = None,
    ):
        if isinstance(model, Model) and model.tapped is not None:
            raise RequestError("This model is tapped: explain it after the tap's block.")
        self.model = model
        self.network = model.network if isinstance(model, Model) else model
        self.spec = self.network.spec
        if memory is not None and (type(memory) is not int or memory < 1):
            raise RequestError(f"memory must be a whole number of bytes, 1 or more, and is {memory!r}.")
        self.counts, self.memory = Counts(), memory
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
        return Axis(name, tuple(self.labels(given[0].tolist())))

    def labels(self, tokens: Sequence[int]) -> Iterator[str]:
        """A text for each token; one that is a piece of a character says of which, and which: "书 1/2"."""
        start = 0
        while start < len(tokens):
            count = self._pieces(tokens[start : start + CHARACTER])
            text = self.text(tokens[start : start + count])
            yield from [text] if count == 1 else (f"{text} {i}/{count}" for i in range(1, count + 1))
            start += count

    def _pieces(self, tokens: Sequence[int]) -> int:
        """How many of the first tokens make whole characters; 1 where none do."""
        counts = range(1, len(tokens) + 1)
        return next((count for count in counts if BROKEN not in self.text(tokens[:count])), 1)

    def text(self, tokens: Sequence[int]) -> str:
        tokenizer = self.model.tokenizer if isinstance(self.model, Model) else None
        if tokenizer is None:
            return " ".join(map(str, tokens))
        return tokenizer.decode(list(tokens), skip_special=False)

    def label(self, token: int) -> str:
        return self.text([token])

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
    def first(self) -> First:
        """Of states before each layer of each side, before its last norm, and after (the depth, and one
        more)."""
        places = {
            Place(number, layer): f"{side.prefix}layers.{layer}.input"
            for number, side in enumerate(self.sides)
            for layer in range(side.depth)
        }
        for number, side in enumerate(self.sides):
            before = f"layers.{side.depth - 1}.output" if side.depth else "embedding"
            places[Place(number, side.depth)] = side.prefix + before
            places[Place(number, side.depth + 1)] = f"{side.prefix}final"
        embeddings = self.embeddings
        with torch.no_grad(), Footprint() as footprint:
            taps = Watched(places.values(), self.names, footprint)
            answers = self.run(taps, inputs=embeddings, places=()).shape[-1]
        sizes = {name: -(-size // self.batch) for name, size in taps.sizes.items()}
        states = {place: taps[point] for place, point in places.items()}
        return First(states, -(-footprint.most // self.batch), sizes, answers)

    def state(self, place: Place) -> Float[Tensor, "batch length width"]:
        """The stream where a pass may begin, with nothing changed; past the depth, after the last norm."""
        return self.embeddings[place.side] if place.layer < 0 else self.first.states[place]

    # what is taken

    def need(
        self,
        points: Iterable[Iterable[str]],
        held: Iterable[Tensor],
        metric: Metric | None,
        rows: int,
        found: Mapping[str, int],
    ) -> Need:
        """What a sweep takes, so many rows at most together, of which each batch is at some of these points.

        It changes them or reads them. `held` are values that it keeps, and `found` so many rows of
        points that it is to give. `metric` is what it asks for, None for nothing behind the layers.
        Raises RequestError where `memory` does not hold one row.
        """
        row = max(map(self._row, points), default=self._row(())) + self._head(metric)
        kept = nbytes([*self.embeddings, *self.first.states.values(), *held])
        kept += sum(count * self.first.sizes[point] for point, count in found.items())
        return Need(kept, row, min(rows, self._at_once(kept, row)))

    def rows_of_reference(self, points: Sequence[str], kept: int) -> int:
        """How many rows of another reading are read at a time, of which these points are wanted.

        So many rows of what stands there are kept. Raises RequestError where `memory` does not hold one
        more.
        """
        if self.memory is None:
            return self.most_rows
        row = self._row(points)
        values = kept * sum(self.first.sizes[point] for point in points)
        return self._at_once(nbytes([*self.embeddings, *self.first.states.values()]) + values, row)

    def _row(self, points: Iterable[str]) -> int:
        """Bytes of one row, up to the head. What is put or read at a point stays until the pass ends."""
        points = set(points)
        self._show([point for point in points if point not in self.first.sizes])
        return self.first.row + self._uneven() + sum(self.first.sizes[point] for point in points)

    def _head(self, metric: Metric | None) -> int:
        """Of a row, more than enough for every metric here: four copies of the answers in fp32, sixteen
        of the states that they are made of."""
        if metric is None or metric.places is None:
            return 0
        return 4 * len(metric.places) * (4 * self.first.answers + 16 * self.spec.trunk.width)

    def _uneven(self) -> int:
        """What a row may take more than the first pass shows: all its tokens may go to one expert."""
        return max(
            (
                4 * self.length(number) * (4 * mixer.expert.hidden + 4 * side.node.width)
                for number, side in enumerate(self.sides)
                for mixer in side.node.mixers()
                if isinstance(mixer, spec.Experts)
            ),
            default=0,
        )

    def _show(self, points: Sequence[str]) -> None:
        """Counts a pass that shows these points, which the model's fast attention did not have."""
        if not points:
            return
        with torch.no_grad(), Footprint() as footprint:
            taps = Watched(points, self.names, footprint)
            self.run(taps, inputs=self.embeddings, places=())
        sizes = {name: -(-size // self.batch) for name, size in taps.sizes.items()}
        row = max(self.first.row, -(-footprint.most // self.batch))
        self.first = self.first._replace(row=row, sizes=self.first.sizes | sizes)

    def _at_once(self, kept: int, row: int) -> int:
        if self.memory is None:
            return self.most_rows
        if self.memory < kept + row:
            raise RequestError(
                f"This keeps {kept:,} bytes and takes {row:,} for one row, more than a memory of "
                f"{self.memory:,}: give at least {kept + row:,}."
            )
        return min(self.most_rows, (self.memory - kept) // row)

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
        """The values of points, (batch, ...) each, without gradient, from passes of their own."""
        points = list(points)
        first, *more = self.pieces(points, self.most_rows) if points else ({},)
        return {p: torch.cat([x, *(piece[p] for piece in more)]) if more else x for p, x in first.items()}

    def pieces(self, points: Sequence[str], rows: int) -> Iterator[dict[str, Tensor]]:
        """The same, so many rows at a time."""
        for first in range(0, self.batch, rows):
            taps = self.taps(points)
            with torch.no_grad():
                self.run(taps, inputs=[x[first : first + rows] for x in self.embeddings], places=())
            yield {point: taps[point] for point in points}

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
