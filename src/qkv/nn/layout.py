"""Where every token of a batch stands. Made once; no other code works out positions or padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qkv.errors import RequestError
from qkv.spec import Mask


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of the queries of this call and of all keys they may look at.

    Position -1 marks a token that is not there: padding, or a cache slot not filled. Documents
    number packed sequences; `prefix` is the length of each row's prefix (prefix-LM). `total` is how
    long each row will be once all its chunks are read, where a call reads only one of them.
    `source` is what cross-attention reads. `axes` are positions on several axes (time, height,
    width), which only rotary positions with axes read; None: the position, on every axis.
    """

    positions: Int[Tensor, "batch query"]
    key_positions: Int[Tensor, "batch key"]
    documents: Int[Tensor, "batch query"] | None = None
    key_documents: Int[Tensor, "batch key"] | None = None
    prefix: Int[Tensor, " batch"] | None = None
    total: Int[Tensor, " batch"] | None = None
    source: Source | None = None
    axes: Int[Tensor, "axes batch query"] | None = None
    key_axes: Int[Tensor, "axes batch key"] | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def unpadded(batch: int, length: int, device: torch.device | str = "cpu") -> Layout:
        """`length` tokens in each row, from position 0."""
        positions = torch.arange(length, device=device).expand(batch, length)
        return Layout(positions, positions)

    @staticmethod
    def padded(
        present: Bool[Tensor, "batch length"] | Int[Tensor, "batch length"],
        total: Int[Tensor, " batch"] | None = None,
    ) -> Layout:
        """From a mask that is true (or 1) where a token is, with padding on either side.

        Positions count the tokens that are there, from 0. Raises RequestError for other numbers: 0
        and 1 as floats, or -inf, would be an additive mask, which says something else.
        """
        if (
            not isinstance(present, Tensor)
            or present.is_floating_point()
            or ((present != 0) & (present != 1)).any()
        ):
            raise RequestError("A padding mask is true or 1 where a token is, false or 0 elsewhere.")
        there = present.long()
        positions = there.cumsum(-1) * there - 1
        return Layout(positions, positions, total=total)

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device | str = "cpu") -> Layout:
        """One row of several documents, each from position 0 and seeing only itself.

        Raises RequestError for what are no lengths.
        """
        if not lengths or not all(isinstance(n, Integral) and n >= 0 for n in lengths):
            raise RequestError(
                f"The lengths of packed documents are {lengths!r}; they must be whole numbers of at least 0."
            )
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        documents = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
        )[None]
        return Layout(positions, positions, documents, documents)

    def on_axes(self, axes: Int[Tensor, "axes batch query"]) -> Layout:
        """The same tokens, placed on several axes too.

        With a cache they count on from the furthest place of each row on any axis, as the text
        after an image does; a call that begins inside an image says so with negative places.
        """
        if axes.ndim != 3 or tuple(axes.shape[1:]) != self.shape:
            raise RequestError(f"The axes are {tuple(axes.shape)}; they must be (axes, *{self.shape}).")
        return replace(self, axes=axes, key_axes=axes, _memo={})

    @property
    def distances(self) -> Int[Tensor, "batch query key"]:
        """Key minus query: negative for a key before its query. Of no meaning where either is not there."""
        return self.once("distances", lambda: self.key_positions[:, None, :] - self.positions[:, :, None])

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.shape[0], self.positions.shape[1]

    def check(self, shape: tuple[int, ...]) -> None:
        if self.shape != shape:
            raise RequestError(f"The layout is for {self.shape} tokens and the call has {shape}.")

    def once(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, worked out once a call however many layers ask."""
        if key not in self._memo:
            self._memo[key] = compute()
        return self._memo[key]

    def visible(self, mask: Mask) -> Bool[Tensor, "batch query key"]:
        """What the mask shows of the tokens that are there, within their own document."""
        return self.once(("visible", mask), lambda: self._visible(mask))

    def _visible(self, mask: Mask) -> Bool[Tensor, "batch query key"]:
        query, key = self.positions[:, :, None], self.key_positions[:, None, :]
        seen = mask.visible(query, key, self) & (query >= 0) & (key >= 0)
        if self.documents is not None and self.key_documents is not None:
            seen = seen & (self.documents[:, :, None] == self.key_documents[:, None, :])
        return seen

    @property
    def lengths(self) -> Int[Tensor, "batch one_or_query"]:
        """The total length of the sequence each query stands in, cache included; 0 for padding alone.

        One for a row, or, where documents are packed, one for each token. It is what frequencies
        that depend on the length go by, so that no chunking, packing or batch mate changes them.
        """
        return self.once("lengths", self._lengths)

    def _lengths(self) -> Int[Tensor, "batch one_or_query"]:
        if self.documents is not None and self.key_documents is not None:
            same = self.documents[:, :, None] == self.key_documents[:, None, :]
            return torch.where(same, self.key_positions[:, None, :], -1).amax(-1) + 1
        held = self.key_positions.amax(-1) + 1
        return (held if self.total is None else torch.maximum(held, self.total))[:, None]


@dataclass(frozen=True, eq=False)
class Source:
    """The rows of another stack that cross-attention reads, and where they stand (-1: not there).

    `states` are None where a cache holds the keys and values made of them. Packed documents each
    read the document of their own number.
    """

    states: Float[Tensor, "batch rows source_width"] | None
    positions: Int[Tensor, "batch rows"]
    documents: Int[Tensor, "batch rows"] | None = None

    def visible(self, mask: Mask, layout: Layout) -> Bool[Tensor, "batch query rows"]:
        """What the mask shows of these rows to a stream's queries."""
        asked = Layout(layout.positions, self.positions, layout.documents, self.documents)
        return layout.once(("source", mask), lambda: asked.visible(mask))
