"""Which blocks of the cache hold which tokens of which sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 16  # tokens


def blocks(tokens: int) -> int:
    """How many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


@dataclass
class Blocks:
    """The tables of one group of slots in a native cache. Sequences share blocks until one writes."""

    cache: Any
    group: int
    table: NDArray[np.int32] = field(default_factory=lambda: np.zeros((4, 8), np.int32))
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.zeros(4, np.int32))
    holders: list[int] = field(default_factory=list)  # of each block there is: how many sequences
    free: list[int] = field(default_factory=list)

    def extend(self, sequence: int, start: int, end: int) -> None:
        """Makes room for a sequence's tokens from `start` to before `end`, in blocks of its own."""
        self.reach(sequence, blocks(end))
        row = self.table[sequence]
        held = blocks(int(self.lengths[sequence]))
        for place in range(start // BLOCK, min(held, blocks(end))):
            if self.holders[row[place]] > 1:  # another sequence reads what would be written over
                copy = self._take()
                self.cache.copy(self.group, int(row[place]), copy)
                self._drop(int(row[place]))
                row[place] = copy
        for place in range(held, blocks(end)):
            row[place] = self._take()
        self.lengths[sequence] = max(end, int(self.lengths[sequence]))

    def fork(self, parent: int, child: int) -> None:
        self.reach(max(parent, child), 0)
        count = blocks(int(self.lengths[parent]))
        self.table[child, :count] = self.table[parent, :count]
        self.lengths[child] = self.lengths[parent]
        for block in self.table[parent, :count].tolist():
            self.holders[block] += 1

    def forget(self, sequence: int, length: int = 0) -> None:
        if sequence >= len(self.lengths):
            return
        for block in self.table[sequence, blocks(length) : blocks(int(self.lengths[sequence]))].tolist():
            self._drop(block)
        self.lengths[sequence] = min(length, int(self.lengths[sequence]))

    def _take(self) -> int:
        if self.free:
            block = self.free.pop()
            # what is hidden has no weight, but no number times nothing is still no number
            self.cache.clear(self.group, block)
            self.holders[block] = 1
            return block
        self.holders.append(1)
        self.cache.reserve(self.group, len(self.holders))
        return len(self.holders) - 1

    def _drop(self, block: int) -> None:
        self.holders[block] -= 1
        if not self.holders[block]:
            self.free.append(block)

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
