"""Who may see whom: predicates over absolute positions, combined with & and |. True means visible.

A mask is evaluated on integer arrays (numpy or torch) of query positions (..., query, 1) and key
positions (..., 1, key). Masks that depend on the batch hold no data: they ask the `layout` they
are evaluated with. Position -1 marks a token that is not there; attention hides it whatever the
mask says, so `Padding` needs to be written only where a mask is evaluated alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from qkv.spec.node import Node, node

Interval = tuple[Any, Any]


@node
class Mask(Node):
    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        """Boolean array (..., query, key)."""
        raise TypeError(f"{type(self).__name__} does not define what is visible")

    @property
    def reach(self) -> int | None:
        """How many of the latest keys, its own included, a query can need; None for all."""
        return None

    def kept(self, length: int) -> int:
        """How many keys of so many a query after them can still need."""
        first = self.streaming.first if self.streaming is not None else 0
        return length if self.reach is None else min(length, first + self.reach)

    @property
    def streaming(self) -> Streaming | None:
        """The part that also shows the first keys, whose distances it counts anew; None without one."""
        return None

    def interval(self, query: Any) -> Interval | None:
        """First and last visible key of each query of one unpadded sequence, if one run; else None."""
        return None

    def pairs(self, length: int) -> int:
        """Visible (query, key) pairs of one unpadded sequence: what block-skipping attention computes."""
        query = np.arange(length)
        run = self.interval(query)
        if run is not None:
            first, last = np.maximum(run[0], 0), np.minimum(run[1], length - 1)
            return int(np.maximum(last - first + 1, 0).sum())
        key, total = query[None, :], 0
        for start in range(0, length, 512):  # slabs: the whole square does not fit for long contexts
            rows = query[start : start + 512, None]
            total += int(np.broadcast_to(self.visible(rows, key), (len(rows), length)).sum())
        return total

    def draw(self, length: int) -> str:
        """A picture in text: a row a query, a column a key; # is visible."""
        position = np.arange(length)
        seen = np.broadcast_to(self.visible(position[:, None], position[None, :]), (length, length))
        return "\n".join("".join("#" if s else "." for s in row) for row in seen)

    def __and__(self, other: Mask) -> Mask:
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other)


@node
class Everything(Mask):
    """Every token sees every token."""

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return (query == query) & (key == key)

    def interval(self, query: Any) -> Interval:
        return query * 0, query * 0 + (1 << 62)


@node
class Causal(Mask):
    """A query sees itself and everything before it."""

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return key <= query

    def interval(self, query: Any) -> Interval:
        return query * 0, query


@node
class Window(Mask):
    """A query sees `before` keys up to and including its own, and `after` keys past it."""

    before: int
    after: int = 0

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return (key > query - self.before) & (key <= query + self.after)

    @property
    def reach(self) -> int:
        return self.before

    def interval(self, query: Any) -> Interval:
        return query - self.before + 1, query + self.after


@node
class Streaming(Mask):
    """The first keys, always, and a window: `first + window` keys at most. Xiao et al. 2023 (StreamingLLM).

    Places are counted as if what is out of sight had never been: a query stands at most at `place`
    first + window - 1 from the first keys. To the keys of its window its distances are what they are.
    """

    first: int
    window: int

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return (key < self.first) | (key > query - self.window)

    def place(self, query: Any) -> Any:
        """Where a query stands, seen from the first keys."""
        return query + (self.first + self.window - 1 - query) * (query >= self.first + self.window)

    @property
    def reach(self) -> int:
        return self.window

    @property
    def streaming(self) -> Streaming:
        return self


@node
class Chunk(Mask):
    """Positions are cut into chunks of `size`; a query sees its own chunk only (Llama 4's local layers)."""

    size: int

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return query // self.size == key // self.size

    @property
    def reach(self) -> int:
        return self.size

    def interval(self, query: Any) -> Interval:
        start = query // self.size * self.size
        return start, start + self.size - 1


@node
class Strided(Mask):
    """Keys at a distance that is a multiple of `stride`, either way. Child et al. 2019."""

    stride: int

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return (query - key) % self.stride == 0


@node
class Dilated(Mask):
    """`keys` keys `step` apart, ending with the query's own. Longformer's dilated window."""

    keys: int
    step: int

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        distance = query - key
        return (distance >= 0) & (distance < self.keys * self.step) & (distance % self.step == 0)

    @property
    def reach(self) -> int:
        return (self.keys - 1) * self.step + 1


@node
class Global(Mask):
    """The named positions see everything and everything sees them. Longformer, BigBird."""

    positions: tuple[int, ...]

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        seen = (query != query) | (key != key)  # all False, in the caller's own kind of array
        for position in self.positions:
            seen = seen | (query == position) | (key == position)
        return seen


@node
class Blocks(Mask):
    """A map of blocks of `size` positions: row i lists the key blocks that query block i sees."""

    size: int
    map: tuple[tuple[int, ...], ...]

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        seen = (query != query) | (key != key)
        for row, columns in enumerate(self.map):
            for column in columns:
                seen = seen | ((query // self.size == row) & (key // self.size == column))
        return seen


@node
class Padding(Mask):
    """Only tokens that are there: both positions are at least 0."""

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return (query >= 0) & (key >= 0)

    def interval(self, query: Any) -> Interval:
        return Everything().interval(query)


@node
class Prefix(Mask):
    """Every query sees the sequence's prefix, whose length the layout holds: `Causal() | Prefix()`."""

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        if layout is None or layout.prefix is None:
            return (query != query) | (key != key)  # no prefix: shows nothing
        return (query == query) & (key < layout.prefix[..., None, None])


@node
class Documents(Mask):
    """Packed documents: a query sees keys of its own document, numbered by the layout."""

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        if layout is None or layout.documents is None:
            return (query == query) & (key == key)  # one document
        return layout.documents[..., :, None] == layout.key_documents[..., None, :]

    def interval(self, query: Any) -> Interval:
        return Everything().interval(query)


@node
class And(Mask):
    """Visible to both."""

    left: Mask
    right: Mask

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return self.left.visible(query, key, layout) & self.right.visible(query, key, layout)

    @property
    def reach(self) -> int | None:
        known = [r for r in (self.left.reach, self.right.reach) if r is not None]
        return min(known, default=None)

    @property
    def streaming(self) -> Streaming | None:
        return self.left.streaming or self.right.streaming

    def interval(self, query: Any) -> Interval | None:
        left, right = self.left.interval(query), self.right.interval(query)
        if left is None or right is None:
            return None
        return np.maximum(left[0], right[0]), np.minimum(left[1], right[1])


@node
class Or(Mask):
    """Visible to either."""

    left: Mask
    right: Mask

    def visible(self, query: Any, key: Any, layout: Any = None) -> Any:
        return self.left.visible(query, key, layout) | self.right.visible(query, key, layout)

    @property
    def reach(self) -> int | None:
        reaches = self.left.reach, self.right.reach
        if None in reaches or self.left.streaming or self.right.streaming:  # first keys are never behind
            return None
        return max(n for n in reaches if n is not None)
