"""A cache in blocks: what many sequences keep, and a view of some of them for one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from qkv.errors import CapacityError, RequestError
from qkv.nn.layout import Layout
from qkv.spec import Attention, LatentAttention, Stack

Held = dict[tuple[str, int], tuple[Tensor, ...]]  # by layer or name, and sequence


class PagedCache:
    """Keys and values in blocks of `size` tokens, (blocks, heads, size, dim) in each layer.

    Which block holds which tokens of which sequence is the caller's business (Kwon et al. 2023,
    "PagedAttention"); layers of one group share the numbers. States, sources and places on several
    axes, which are not a token's each, are kept by sequence. `groups` names the layers of each group.
    """

    def __init__(
        self,
        stack: Stack,
        groups: Sequence[Iterable[str]],
        size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.size, self.device = size, device
        self.group = {name: number for number, names in enumerate(groups) for name in names}
        self.layers: dict[str, tuple[Tensor, ...]] = {
            name: tuple(
                torch.zeros(0, heads, size, dim, dtype=dtype, device=device) for heads, dim in mixer.cached()
            )
            for name, mixer in kept(stack)
        }
        self.states: Held = {}
        self.sources: Held = {}
        self.axes: dict[int, Tensor] = {}  # (axes, tokens)

    # as `qkv.runtime.blocks.Memory` has it

    def reserve(self, group: int, count: int) -> None:
        for name, held in self.of(group):
            there = len(held[0])
            if count > there:
                more = max(count, there + there // 2) - there
                try:
                    grown = (
                        torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])]) for tensor in held
                    )
                    self.layers[name] = tuple(grown)
                except RuntimeError:
                    raise CapacityError(
                        f"There is no memory for a cache of {count:,} blocks of {self.size} tokens."
                    ) from None

    def clear(self, group: int, block: int) -> None:
        for _, held in self.of(group):
            for tensor in held:
                tensor[block] = 0

    def copy(self, group: int, source: int, target: int) -> None:
        for _, held in self.of(group):
            for tensor in held:
                tensor[target] = tensor[source]

    def block_bytes(self, group: int) -> int:
        each = (tensor for _, held in self.of(group) for tensor in held)
        return sum(math.prod(tensor.shape[1:]) for tensor in each) * self.itemsize

    @property
    def itemsize(self) -> int:
        return next((held[0].element_size() for held in self.layers.values()), 4)

    def of(self, group: int) -> list[tuple[str, tuple[Tensor, ...]]]:
        return [(name, held) for name, held in self.layers.items() if self.group[name] == group]

    # what has no blocks

    def fork(self, parent: int, child: int) -> None:
        """The child has the parent's states and source: nothing that is kept is written to again."""
        for held in (self.states, self.sources):
            held |= {(name, child): made for (name, owner), made in held.items() if owner == parent}
        if parent in self.axes:
            self.axes[child] = self.axes[parent]

    def forget(self, sequence: int, length: int = 0) -> None:
        """Raises CapacityError where a state would have to go back: it kept none on the way."""
        if length:
            if any(owner == sequence for _, owner in self.states):
                raise CapacityError(f"A recurrent state cannot go back to {length:,} tokens.")
            if sequence in self.axes:
                self.axes[sequence] = self.axes[sequence][:, :length]
            return
        for held in (self.states, self.sources):
            for key in [key for key in held if key[1] == sequence]:
                del held[key]
        self.axes.pop(sequence, None)

    def call(
        self,
        sequences: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Int[Tensor, "rows places"]],
        evicted: Sequence[int] | None = None,
    ) -> PagedCall:
        """A view of these sequences, each of which has read `starts` tokens; a table for each group.

        It may have given up `evicted` of them: those it still holds, whichever they are, then stand
        together before the call's, and are visible to all queries of the call.
        """
        return PagedCall(self, sequences, starts, tables, evicted or [0] * len(sequences))


def kept(stack: Stack) -> list[tuple[str, Attention | LatentAttention]]:
    """The mixers that keep something of each token, by the names that the modules call them."""
    return [
        (f"{i}.{name}", mixer)
        for i, layer in enumerate(stack.layers)
        for name, mixer in layer.mixers()
        if isinstance(mixer, Attention | LatentAttention)
    ]


class PagedCall:
    """Rows of one call, as modules see a cache: see `qkv.nn.cache.Cache`. A row is a sequence."""

    def __init__(
        self,
        cache: PagedCache,
        sequences: Sequence[int],
        starts: Sequence[int],
        tables: Sequence[Tensor],
        evicted: Sequence[int],
    ):
        self.cache, self.sequences, self.tables = cache, list(sequences), tables
        self.starts = torch.tensor(list(starts), device=cache.device)
        self.evicted = torch.tensor(list(evicted), device=cache.device)
        self.length = max(starts, default=0)
        self._before: Held = {}  # the states of these sequences, should the call fail

    def extend(self, layout: Layout) -> Layout:
        """Rows go on from where their sequences stopped; keys are all of a sequence's, from its first."""
        if layout.shape[0] != len(self.sequences):
            raise RequestError(f"This call has {len(self.sequences)} sequences, and {layout.shape[0]} rows.")
        there = layout.positions >= 0
        positions = torch.where(there, layout.positions + self.starts[:, None], -1)
        held = self.starts - self.evicted
        self.ends = held + there.sum(-1)
        width = int(self.ends.max())
        keys = torch.arange(width, device=positions.device).expand(len(self.sequences), width)
        there_too = keys < self.ends[:, None]
        keys = torch.where(keys < held[:, None], keys, keys + self.evicted[:, None])
        keys = torch.where(there_too, keys, -1)
        # where the call's tokens stand: in which row, at which place of the call, at which of the sequence
        self.rows, self.places = there.nonzero(as_tuple=True)
        self.at = (positions - self.evicted[:, None])[self.rows, self.places]
        axes, key_axes = self._on_axes(layout, width)
        return replace(
            layout, positions=positions, key_positions=keys, axes=axes, key_axes=key_axes, _memo={}
        )

    def _on_axes(self, layout: Layout, width: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The call's and all tokens' places on several axes, where some call has brought them."""
        held = self.cache.axes
        if layout.axes is None and not any(sequence in held for sequence in self.sequences):
            return None, None
        count = len(layout.axes) if layout.axes is not None else len(next(iter(held.values())))
        batch, length = layout.shape
        axes = torch.zeros(count, batch, length, dtype=torch.long, device=layout.positions.device)
        keys = torch.zeros(count, batch, width, dtype=torch.long, device=layout.positions.device)
        for row, sequence in enumerate(self.sequences):
            start = int(self.starts[row])
            earlier = held.get(sequence, torch.arange(start, device=axes.device).expand(count, start))
            if len(earlier) != count:
                raise RequestError(f"This cache holds {len(earlier)} axes and the call has {count}.")
            before = int(earlier.max()) + 1 if start else 0
            axes[:, row] = before + (layout.positions[row] if layout.axes is None else layout.axes[:, row])
            all_ = torch.cat([earlier, axes[:, row, layout.positions[row] >= 0]], -1)
            held[sequence], keys[:, row, : all_.shape[-1]] = all_, all_
        return axes, keys

    def store(self, layer: str, *new: Tensor) -> tuple[Tensor, ...]:
        cache, table = self.cache, self.tables[self.cache.group[layer]]
        blocks = table[self.rows, self.at // cache.size]
        needed = -(-int(self.ends.max()) // cache.size)
        read: list[Tensor] = []
        for held, values in zip(cache.layers[layer], new, strict=True):
            held = held.detach()
            held[blocks, :, self.at % cache.size] = values.detach()[self.rows, :, self.places]
            found = held[table[:, :needed]].transpose(1, 2)  # (rows, heads, blocks, size, dim)
            read.append(found.flatten(2, 3)[:, :, : int(self.ends.max())])
        return tuple(read)

    def keep(self, name: str, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Sources of several sequences are padded to the longest. All of a call are new, or none is."""
        held = self.cache.sources
        if (name, self.sequences[0]) not in held:
            made = make()
            for row, sequence in enumerate(self.sequences):
                held[name, sequence] = tuple(tensor[row : row + 1].detach() for tensor in made)
            return made
        each = [held[name, sequence] for sequence in self.sequences]
        return tuple(_joined([found[i] for found in each]) for i in range(len(each[0])))

    def state(self, layer: str) -> tuple[Tensor, ...] | None:
        each = [self.cache.states.get((layer, sequence)) for sequence in self.sequences]
        there = next((held for held in each if held is not None), None)
        if there is None:
            return None
        # one that begins has a state of zeros, as the mixers begin with
        rows = [tuple(map(torch.zeros_like, there)) if held is None else held for held in each]
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def set_state(self, layer: str, *state: Tensor) -> None:
        for row, sequence in enumerate(self.sequences):
            held = tuple(tensor[row : row + 1].detach() for tensor in state)
            self._before.setdefault((layer, sequence), self.cache.states.get((layer, sequence), ()))
            self.cache.states[layer, sequence] = held

    def truncate(self, length: int) -> None:
        """After a failed call: blocks are the caller's business, states and places go back."""
        for key, before in self._before.items():
            if before:
                self.cache.states[key] = before
            else:
                self.cache.states.pop(key, None)
        for row, sequence in enumerate(self.sequences):
            if sequence in self.cache.axes:
                self.cache.axes[sequence] = self.cache.axes[sequence][:, : int(self.starts[row])]

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        raise RequestError("Rows of a cache in blocks are chosen by the call that is made of them.")


def _joined(each: list[Tensor]) -> Tensor:
    """Rows below each other; shorter ones are filled up: positions with -1, others with zeros."""
    longest = max(tensor.shape[-2] if tensor.ndim > 2 else tensor.shape[-1] for tensor in each)
    if each[0].ndim == 2:
        return torch.cat([torch.nn.functional.pad(x, (0, longest - x.shape[-1]), value=-1) for x in each])
    return torch.cat([torch.nn.functional.pad(x, (0, 0, 0, longest - x.shape[-2])) for x in each])
