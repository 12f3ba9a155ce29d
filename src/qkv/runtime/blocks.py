"""Which blocks of the cache hold which tokens of which sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.errors import CapacityError

BLOCK = 16  # tokens


def blocks(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


class Memory(Protocol):
    """Where the blocks of several groups are."""

    def reserve(self, group: int, count: int) -> None:
        """Makes room for blocks 0 to before `count`; what is there stays."""
        ...

    def clear(self, group: int, block: int) -> None: ...

    def copy(self, group: int, source: int, target: int) -> None: ...

    def block_bytes(self, group: int) -> int: ...


@dataclass
class Pool:
    """The blocks of one group of attentions that are kept alike, and the table of each sequence.

    Sequences share blocks until one writes. `window` is how many of its last tokens a query sees
    (None: all): blocks that are out of sight can be handed back. A block that `publish` was told of
    keeps its tokens when nobody holds it any more, until it is needed: then `forgotten` is told.
    `limit` is how many blocks there can be (None: as many as are asked for).
    """

    memory: Memory
    group: int
    window: int | None = None
    limit: int | None = None
    keep: int | None = None  # how many there are before the oldest that is cached is used again
    table: NDArray[np.int32] = field(default_factory=lambda: np.zeros((4, 8), np.int32))
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.zeros(4, np.int32))
    first: list[int] = field(default_factory=lambda: [0] * 4)  # places before it were handed back
    holders: list[int] = field(default_factory=list)  # of each block there is: how many sequences
    free: list[int] = field(default_factory=list)  # hold nothing
    cached: OrderedDict[int, None] = field(
        default_factory=OrderedDict
    )  # published, held by none, oldest first
    published: set[int] = field(default_factory=set)
    forgotten: Callable[[int, int], None] = lambda group, block: None

    @property
    def available(self) -> int | None:
        """How many blocks can be taken; None: any number."""
        if self.limit is None:
            return None
        return len(self.free) + len(self.cached) + self.limit - len(self.holders)

    @property
    def bytes(self) -> int:
        """Of a block, in all attentions of the group."""
        return self.memory.block_bytes(self.group)

    def most(self, tokens: int, step: int) -> int:
        """How many blocks a sequence of so many tokens holds at most, of which `step` come at once."""
        if self.window is None:
            return blocks(tokens)
        # its window and the step may both begin within a block
        return min(blocks(tokens), blocks(self.window + step) + 1)

    def wanted(self, sequence: int, start: int, end: int) -> int:
        """How many blocks `extend` would take."""
        if sequence >= len(self.lengths):
            return blocks(end)
        held = blocks(int(self.lengths[sequence]))
        writes = self.table[sequence, max(start // BLOCK, self.first[sequence]) : min(held, blocks(end))]
        return max(0, blocks(end) - held) + sum(self.holders[block] > 1 for block in writes.tolist())

    def extend(self, sequence: int, start: int, end: int) -> None:
        """Makes room for a sequence's tokens from `start` to before `end`, in blocks of its own.

        Raises CapacityError where there is no block left, and may then have taken some.
        """
        self.reach(sequence, blocks(end))
        row = self.table[sequence]
        held = blocks(int(self.lengths[sequence]))
        for place in range(max(start // BLOCK, self.first[sequence]), min(held, blocks(end))):
            block = int(row[place])
            if self.holders[block] > 1:  # another sequence reads what would be written over
                row[place] = copy = self._take(clear=False)
                self.memory.copy(self.group, block, copy)
                self._drop(block)
            elif block in self.published:
                self._unpublish(block)
        for place in range(held, blocks(end)):
            row[place] = self._take()
            self.lengths[sequence] = min(end, (place + 1) * BLOCK)
        self.lengths[sequence] = max(end, int(self.lengths[sequence]))

    def adopt(self, sequence: int, held: Sequence[int | None]) -> None:
        """Lets a sequence that holds nothing begin with these published blocks; None: out of its sight."""
        self.reach(sequence, len(held))
        self.first[sequence] = next(
            (place for place, block in enumerate(held) if block is not None), len(held)
        )
        for place, block in enumerate(held):
            if block is not None:
                self.table[sequence, place] = block
                self.holders[block] += 1
                self.cached.pop(block, None)
        self.lengths[sequence] = len(held) * BLOCK

    def fork(self, parent: int, child: int) -> None:
        """Lets a sequence that holds nothing go on from all that another holds."""
        self.reach(max(parent, child), 0)
        first, count = self.first[parent], blocks(int(self.lengths[parent]))
        self.table[child, :count] = self.table[parent, :count]
        self.lengths[child], self.first[child] = self.lengths[parent], first
        for block in self.table[parent, first:count].tolist():
            self.holders[block] += 1

    def forget(self, sequence: int, length: int = 0) -> None:
        """Takes a sequence back to its first tokens, of which all that are in sight must still be held."""
        if sequence >= len(self.lengths):
            return
        first, end = self.first[sequence], blocks(int(self.lengths[sequence]))
        # the last first: of what is cached, beginnings stay longest
        for block in self.table[sequence, max(first, blocks(length)) : end].tolist()[::-1]:
            self._drop(block)
        self.lengths[sequence] = min(length, int(self.lengths[sequence]))
        if not length:
            self.first[sequence] = 0

    def hand_back(self, sequence: int, position: int) -> None:
        """Gives up the blocks that no query from `position` on sees."""
        if self.window is None or sequence >= len(self.lengths):
            return
        first, seen = self.first[sequence], max(0, position - self.window + 1) // BLOCK
        for block in self.table[sequence, first:seen].tolist()[::-1]:
            self._drop(block)
        self.table[sequence, first:seen] = 0
        self.first[sequence] = max(first, seen)

    def publish(self, sequence: int, place: int) -> int | None:
        """The block at a place, now kept for others; None where it was handed back or is already."""
        block = int(self.table[sequence, place])
        if place < self.first[sequence] or block in self.published:
            return None
        self.published.add(block)
        return block

    def held(self, sequence: int) -> list[int]:
        """The blocks of a sequence, from the first that was not handed back."""
        if sequence >= len(self.lengths):
            return []
        return self.table[sequence, self.first[sequence] : blocks(int(self.lengths[sequence]))].tolist()

    def _take(self, clear: bool = True) -> int:
        count = len(self.holders)
        if self.free:
            block = self.free.pop()
        elif (self.limit is None or count < self.limit) and (
            not self.cached or self.keep is None or count < self.keep
        ):
            self.memory.reserve(self.group, count + 1)
            self.holders.append(1)
            return count
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self._unpublish(block)
        else:
            raise CapacityError(f"All {self.limit:,} blocks of the cache are held.")
        if clear:  # what is hidden has no weight, but no number times nothing is still no number
            self.memory.clear(self.group, block)
        self.holders[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            if block in self.published:
                self.cached[block] = None
            else:
                self.free.append(block)

    def _unpublish(self, block: int) -> None:
        self.published.discard(block)
        self.forgotten(self.group, block)

    def reach(self, sequence: int, count: int) -> None:
        """Makes the table large enough for a sequence and so many blocks of it."""
        rows, columns = self.table.shape
        if sequence >= rows or count > columns:
            rows = rows if sequence < rows else max(2 * rows, sequence + 1)
            columns = columns if count <= columns else max(2 * columns, count)
            table, lengths = np.zeros((rows, columns), np.int32), np.zeros(rows, np.int32)
            table[: self.table.shape[0], : self.table.shape[1]] = self.table
            lengths[: len(self.lengths)] = self.lengths
            self.table, self.lengths = table, lengths
            self.first += [0] * (rows - len(self.first))
