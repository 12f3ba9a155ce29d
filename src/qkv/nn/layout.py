"""Where every token of a batch stands. Made once; no other code works out positions or padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qkv.errors import RequestError
from qkv.spec import Mask


@dataclass(frozen=True, eq=False)
class Layout:
    """Positions of the queries of this call and of all keys they may look at.

    Position -1 marks a token that is not there: padding, or a cache slot not filled. Documents
    number packed sequences; `prefix` is the length of each row's prefix (prefix-LM).
    """

    positions: Int[Tensor, "batch query"]
    key_positions: Int[Tensor, "batch key"]
    documents: Int[Tensor, "batch query"] | None = None
    key_documents: Int[Tensor, "batch key"] | None = None
    prefix: Int[Tensor, " batch"] | None = None
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @staticmethod
    def unpadded(batch: int, length: int, device: torch.device | str = "cpu") -> Layout:
        """`length` tokens in each row, from position 0."""
        positions = torch.arange(length, device=device).expand(batch, length)
        return Layout(positions, positions)

    @staticmethod
    def padded(present: Bool[Tensor, "batch length"] | Int[Tensor, "batch length"]) -> Layout:
        """From a mask that is true (or 1) where a token is, with padding on either side.

        Positions count the tokens that are there, from 0.
        """
        present = present.long()
        positions = present.cumsum(-1) * present - 1
        return Layout(positions, positions)

    @staticmethod
    def packed(lengths: Sequence[int], device: torch.device | str = "cpu") -> Layout:
        """One row of several documents, each from position 0 and seeing only itself."""
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        documents = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
        )[None]
        return Layout(positions, positions, documents, documents)

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
    def lengths(self) -> Int[Tensor, " batch"]:
        """Each row's total length, cache included: one past its last position."""
        return self.once("lengths", lambda: self.key_positions.amax(-1) + 1)
