"""What earlier steps leave for later ones: keys and values by layer, and where their tokens stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv.errors import CapacityError, RequestError
from qkv.nn.layout import Layout
from qkv.spec import Attention, LatentAttention, Stack


class Cache(Protocol):
    """Keys and values of earlier tokens. A call first extends it once, then stores in each layer.

    What earlier calls left is read as constants: gradients end at the call, as at a segment of
    Transformer-XL (Dai et al. 2019, section 3.2).
    """

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
        self, layer: str, *new: Float[Tensor, "batch heads length dim"]
    ) -> tuple[Float[Tensor, "batch heads key dim"], ...]:
        """Keeps what a layer makes of the call's tokens; returns the same of all tokens so far.

        How many tensors and of what sizes: the mixer's `cached()`.
        """
        ...

    def keep(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `make` gives at the first call, at every call: the keys and values of a source.

        Forgotten with the tokens: a cache that goes back to the beginning reads a source anew.
        """
        ...

    def state(self, layer: str) -> tuple[Tensor, ...] | None:
        """A recurrent layer's state after the tokens before this call; None at the beginning."""
        ...

    def set_state(self, layer: str, *state: Tensor) -> None:
        """The state after this call's tokens, as new tensors: the old ones are the way back."""
        ...

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` slots. States can go back one call, or to the beginning."""
        ...

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Makes row i what row rows[i] is: rows are reordered, copied and dropped, sources and states too."""
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
        self._axes: Tensor | None = None  # (axes, batch, capacity), once a call has brought some
        self._start = 0  # of the call in progress
        self._kept: dict[str, tuple[Tensor, ...]] = {}
        self._states: dict[str, tuple[Tensor, ...]] = {}
        self._before: dict[str, tuple[Tensor, ...]] = {}  # the states at _start
        try:
            self.positions = torch.full((batch, capacity), -1, dtype=torch.long, device=device)

            def room(heads: int, dim: int) -> Tensor:
                return torch.zeros(batch, heads, capacity, dim, dtype=dtype, device=device)

            self.layers = {
                f"{i}.{name}": tuple(room(*size) for size in mixer.cached())
                for i, layer in enumerate(stack.layers)
                for name, mixer in layer.mixers()
                if isinstance(mixer, Attention | LatentAttention)
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
        if layout.axes is not None and self._axes is not None and len(layout.axes) != len(self._axes):
            raise RequestError(
                f"This cache holds {len(self._axes)} axes and the call has {len(layout.axes)}."
            )
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
        self._before = dict(self._states)
        axes, key_axes = self._on_axes(layout)
        return replace(
            layout,
            positions=positions,
            key_positions=self.positions[:, :end],
            axes=axes,
            key_axes=key_axes,
            _memo={},
        )

    def _on_axes(self, layout: Layout) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The call's and all tokens' positions on several axes, where some call has brought them."""
        start, end = self._start, self._length
        if self._axes is None:
            if layout.axes is None:
                return None, None
            self._axes = self.positions.expand(len(layout.axes), -1, -1).clone()
        # counted from the furthest place on any axis of the tokens that are there
        there, earlier = self.positions[:, :start] >= 0, self._axes[:, :, :start]
        before = torch.where(there, earlier, -1).amax((0, 2), keepdim=True) + 1 if start else 0
        self._axes[:, :, start:end] = before + (layout.positions if layout.axes is None else layout.axes)
        return self._axes[:, :, start:end], self._axes[:, :, :end]

    def store(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        # detached: the graph of an earlier call ends here, and the new values' gradients go through
        held = tuple(tensor.detach() for tensor in self.layers[layer])
        for tensor, values in zip(held, new, strict=True):
            tensor[:, :, self._start : self._length] = values
        return tuple(tensor[:, :, : self._length] for tensor in held)

    def keep(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if name in self._kept:
            return self._kept[name]
        made = make()
        self._kept[name] = tuple(tensor.detach() for tensor in made)
        return made

    def state(self, layer: str) -> tuple[Tensor, ...] | None:
        return self._states.get(layer)

    def set_state(self, layer: str, *state: Tensor) -> None:
        self._states[layer] = tuple(tensor.detach() for tensor in state)

    def reset(self) -> None:
        """Forgets everything; the memory stays."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """The way back after an error or a rejected guess."""
        if self._states and 0 < length < self._length and length != self._start:
            raise CapacityError(
                f"A recurrent state cannot go back to {length:,} tokens: it kept none on the way."
            )
        if length < self._length:
            self._states = dict(self._before) if length and length == self._start else {}
        if length == 0:
            self._kept.clear()
        self.positions[:, length:] = -1
        self._axes = self._axes if length else None
        self._length = self._start = min(length, self._length)

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        self.batch, self.positions = len(rows), self.positions[rows]
        self._axes = None if self._axes is None else self._axes[:, rows]
        for held in (self.layers, self._kept, self._states, self._before):
            for name, tensors in held.items():
                held[name] = tuple(tensor[rows] for tensor in tensors)

    @property
    def bytes(self) -> int:
        """What layers keep, in bytes; where tokens stand (8 a token) is not counted.

        Window layers have room for every token here, so this is more than `Model.cache_bytes` for them.
        """
        held = [*self.layers.values(), *self._kept.values(), *self._states.values()]
        return sum(tensor.nbytes for tensors in held for tensor in tensors if tensor.is_floating_point())
