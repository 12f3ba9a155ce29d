"""What earlier steps leave for later ones: keys and values by layer, and where their tokens stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import CapacityError, RequestError
from qkv.nn.layout import Layout
from qkv.spec import Attention, Stack


class Cache(Protocol):
    """Keys and values of earlier tokens. A call first extends it once, then stores in each layer."""

    @property
    def length(self) -> int:
        """Tokens held in each row, padding included."""
        ...

    def extend(self, layout: Layout) -> Layout:
        """Makes room for the call's tokens; the layout with all earlier tokens among its keys.

        Raises CapacityError before anything is written if they do not fit, RequestError if the
        batch is another one. Positions of the call count from where each row stopped.
        """
        ...

    def store(
        self,
        layer: str,
        key: Float[Tensor, "batch kv_heads length head_dim"],
        value: Float[Tensor, "batch kv_heads length value_dim"],
    ) -> tuple[Float[Tensor, "batch kv_heads key head_dim"], Float[Tensor, "batch kv_heads key value_dim"]]:
        """Keeps the call's keys and values of a layer; returns those of all tokens so far."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` slots."""
        ...


class ContiguousCache:
    """One block of memory a layer, (batch, kv_heads, capacity, head_dim), filled from the left.

    A prompt of p tokens and n new ones need p + n - 1 slots: the last token is never looked back at.
    Slots not filled have position -1, so attention cannot see them.
    """

    def __init__(
        self,
        stack: Stack,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.batch, self.capacity = batch, capacity
        self._length = 0
        self._start = 0  # of the call in progress
        try:
            self.positions = torch.full((batch, capacity), -1, dtype=torch.long, device=device)

            def room(heads: int, dim: int) -> Tensor:
                return torch.zeros(batch, heads, capacity, dim, dtype=dtype, device=device)

            self.layers = {
                f"{i}.{name}": (room(m.kv_heads, m.head_dim), room(m.kv_heads, m.value_dim or m.head_dim))
                for i, layer in enumerate(stack.layers)
                for name, m in layer.mixers()
                if isinstance(m, Attention)
            }
        except RuntimeError:
            raise CapacityError(
                f"There is no memory for a cache of {capacity:,} tokens in {batch} rows; ask for fewer."
            ) from None

    @property
    def length(self) -> int:
        return self._length

    def extend(self, layout: Layout) -> Layout:
        batch, length = layout.shape
        if batch != self.batch:
            raise RequestError(f"This cache holds {self.batch} rows and the call has {batch}.")
        if layout.documents is not None:
            raise RequestError("Packed documents and a cache do not go together: give each document its row.")
        start, end = self._length, self._length + length
        if end > self.capacity:
            raise CapacityError(
                f"The cache has room for {self.capacity:,} tokens and the call needs {end:,}; make it larger."
            )
        # a row's new positions count on from its last one; -1 stays what it is
        before = self.positions[:, :start].amax(-1, keepdim=True) + 1 if start else 0
        positions = torch.where(layout.positions >= 0, layout.positions + before, -1)
        self.positions[:, start:end] = positions
        self._start, self._length = start, end
        return replace(layout, positions=positions, key_positions=self.positions[:, :end], _memo={})

    def store(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer]
        keys[:, :, self._start : self._length] = key
        values[:, :, self._start : self._length] = value
        return keys[:, :, : self._length], values[:, :, : self._length]

    def reset(self) -> None:
        """Forgets everything; the memory stays."""
        self.positions.fill_(-1)
        self._length = self._start = 0

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` slots: the way back after an error or a rejected guess."""
        self.positions[:, length:] = -1
        self._length = self._start = min(length, self._length)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)
