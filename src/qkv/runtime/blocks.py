"""Which blocks of the cache hold which tokens of which sequence."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.errors import CapacityError
from qkv.runtime.compression import Weighing

BLOCK = 16  # tokens
NONE = range(0)


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


class Reach(NamedTuple):
    """What queries need of a sequence: so many of their last tokens (None: all), and of its first ones."""

    window: int | None = None
    first: int = 0

    def places(self, position: int) -> range:
        """The places of blocks that no query from `position` on sees."""
        kept = blocks(self.first)
        return range(kept, 0 if self.window is None else max(0, position - self.window + 1) // BLOCK)

    def wider(self, other: Reach) -> Reach:
        """What is needed where both are."""
        all_ = self.window is None or other.window is None
        window = None if all_ else max(self.window or 0, other.window or 0)
        return Reach(window, 0 if all_ else max(self.first, other.first))


def ordered(reaches: Iterable[Reach]) -> list[Reach]:
    """Each once, what sees all first; one that does, where there are none."""
    return sorted(set(reaches), key=lambda r: (r.window is not None, r.window or 0, r.first)) or [Reach()]


@dataclass
class Pool:
    """The blocks of one group of attentions that are kept alike, and the table of each sequence.

    Sequences share blocks until one writes. `reach` is what queries see of a sequence: blocks that
    are out of sight can be handed back. A block that `publish` was told of
    keeps its tokens when nobody holds it any more, until it is needed: then `forgotten` is told.
    `limit` is how many blocks there can be (None: as many as are asked for). A `policy` gives tokens of
    a sequence up and moves the others together, so that those from `start` on stand `evicted` earlier.
    """

    memory: Memory
    group: int
    reach: Reach = Reach()
    limit: int | None = None
    keep: int | None = None  # how many there are before the oldest that is cached is used again
    table: NDArray[np.int32] = field(default_factory=lambda: np.zeros((4, 8), np.int32))
    lengths: NDArray[np.int32] = field(default_factory=lambda: np.zeros(4, np.int32))
    gaps: list[range] = field(default_factory=lambda: [NONE] * 4)  # of each: places handed back
    policy: Weighing | None = None
    prompts: dict[int, int] = field(default_factory=dict)  # of sequences under a policy: prompts' lengths
    evicted: list[int] = field(default_factory=lambda: [0] * 4)  # of each: how many tokens were given up
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

    def most(self, tokens: int, step: int, prompt: int | None = None) -> int:
        """How many blocks a sequence of so many tokens holds at most, of which `step` come at once.

        A `prompt` of so many of them comes whole; what follows it comes one by one.
        """
        window, first = self.reach
        if self.policy is not None and prompt is not None and tokens > prompt:
            return blocks(max(prompt, self.policy.held(prompt, tokens - 1) + 1))
        if window is None:
            return blocks(tokens)
        # its window and the step may both begin within a block
        return min(blocks(tokens), blocks(first) + blocks(window + step) + 1)

    def wanted(self, sequence: int, start: int, end: int) -> int:
        """How many blocks `extend` would take."""
        if sequence >= len(self.lengths):
            return blocks(end)
        start, end = self._places_of(sequence, start, end)
        held = blocks(int(self.lengths[sequence]))
        writes = self.table[sequence, start // BLOCK : min(held, blocks(end))]
        return max(0, blocks(end) - held) + sum(self.holders[block] > 1 for block in writes.tolist())

    def extend(self, sequence: int, start: int, end: int) -> None:
        """Makes room for a sequence's tokens from `start` to before `end`, in blocks of its own.

        Raises CapacityError where there is no block left, and may then have taken some.
        """
        self.widen(sequence, blocks(end))
        start, end = self._places_of(sequence, start, end)
        row = self.table[sequence]
        held = blocks(int(self.lengths[sequence]))
        for place in range(start // BLOCK, min(held, blocks(end))):  # never out of sight
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
        self.widen(sequence, len(held))
        absent = [place for place, block in enumerate(held) if block is None]
        self.gaps[sequence] = range(absent[0], absent[-1] + 1) if absent else NONE
        for place, block in enumerate(held):
            if block is not None:
                self.table[sequence, place] = block
                self.holders[block] += 1
                self.cached.pop(block, None)
        self.lengths[sequence] = len(held) * BLOCK

    def fork(self, parent: int, child: int) -> None:
        """Lets a sequence that holds nothing go on from all that another holds."""
        self.widen(max(parent, child), 0)
        self.table[child] = self.table[parent]
        self.lengths[child], self.gaps[child] = self.lengths[parent], self.gaps[parent]
        self.evicted[child] = self.evicted[parent]
        if parent in self.prompts:
            self.prompts[child] = self.prompts[parent]
        for block in self.held(parent):
            self.holders[block] += 1

    def forget(self, sequence: int, length: int = 0) -> None:
        """Takes a sequence back to its first tokens, of which all that are in sight must still be held."""
        if sequence >= len(self.lengths):
            return
        # the last first: of what is cached, beginnings stay longest
        for place in reversed(self.places(sequence)):
            if place >= blocks(length):
                self._drop(int(self.table[sequence, place]))
        self.lengths[sequence] = min(length, int(self.lengths[sequence]))
        if not length:
            self.gaps[sequence], self.evicted[sequence] = NONE, 0

    def shrink(self, sequence: int, count: int) -> None:
        """Takes note that so many tokens were given up, and the others moved together."""
        self.forget(sequence, int(self.lengths[sequence]) - count)
        self.evicted[sequence] += count

    def _places_of(self, sequence: int, start: int, end: int) -> tuple[int, int]:
        """Where tokens stand; from 0, where a policy moves all once they have come."""
        gone, prompt = self.evicted[sequence], self.prompts.get(sequence)
        if self.policy is not None and prompt is not None and self.policy.held(prompt, end) < end - gone:
            start = gone
        return start - gone, end - gone

    def hand_back(self, sequence: int, position: int) -> None:
        """Gives up the blocks that no query from `position` on sees."""
        gap = self.reach.places(position)
        if not gap or sequence >= len(self.lengths):
            return
        held = max(gap.start, self.gaps[sequence].stop)  # what is before was handed back before
        for block in self.table[sequence, held : gap.stop].tolist()[::-1]:
            self._drop(block)
        if held < gap.stop:
            self.table[sequence, held : gap.stop] = 0
            self.gaps[sequence] = gap

    def publish(self, sequence: int, place: int) -> int | None:
        """The block at a place, now kept for others; None where it was handed back or is already."""
        block = int(self.table[sequence, place])
        if place in self.gaps[sequence] or block in self.published:
            return None
        self.published.add(block)
        return block

    def held(self, sequence: int) -> list[int]:
        """The blocks of a sequence that were not handed back."""
        return self.table[sequence, self.places(sequence)].tolist() if sequence < len(self.lengths) else []

    def places(self, sequence: int) -> list[int]:
        """Where they stand."""
        gap = self.gaps[sequence]
        return [place for place in range(blocks(int(self.lengths[sequence]))) if place not in gap]

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

    def widen(self, sequence: int, count: int) -> None:
        """Makes the table large enough for a sequence and so many blocks of it."""
        rows, columns = self.table.shape
        if sequence >= rows or count > columns:
            rows = rows if sequence < rows else max(2 * rows, sequence + 1)
            columns = columns if count <= columns else max(2 * columns, count)
            table, lengths = np.zeros((rows, columns), np.int32), np.zeros(rows, np.int32)
            table[: self.table.shape[0], : self.table.shape[1]] = self.table
            lengths[: len(self.lengths)] = self.lengths
            self.table, self.lengths = table, lengths
            self.gaps += [NONE] * (rows - len(self.gaps))
            self.evicted += [0] * (rows - len(self.evicted))
