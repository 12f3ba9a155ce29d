"""What runs the programs of a model: the protocol, the one in numpy, and how several texts share one."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush
from threading import Lock
from typing import Protocol

import numpy as np

from qkv.checkpoints import StoredTensor
from qkv.runtime.interpreter import Floats, Interpreter, Kept, Rows
from qkv.runtime.lower import Lowered


class Machine(Protocol):
    """Runs the programs of one model and holds the cache of its sequences.

    A sequence is a small whole number of the caller's choice: it begins with the first rows that
    name it, and is gone when it is forgotten. Calls come one at a time.
    """

    @property
    def width(self) -> int:
        """How many numbers an answer has: the vocabulary, where there is a language head."""
        ...

    def read(self, rows: Rows) -> None:
        """Runs the source program of an encoder-decoder: the whole source of each sequence in `rows`."""
        ...

    def step(self, rows: Rows) -> Floats:
        """Runs the main program: the answers of the wanted rows, (wanted, width), the caller's to keep."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """Makes `child`, a sequence that holds nothing, go on from all that `parent` holds now."""
        ...

    def forget(self, sequence: int, length: int = 0) -> None:
        """Takes a sequence back to its first `length` tokens; at 0 its source is forgotten as well."""
        ...

    def bytes_for(self, tokens: int, source: int = 0) -> int:
        """The bytes that the cache of one sequence takes, of so many tokens and rows of a source."""
        ...


class Interpreted:
    """The machine in numpy: every parameter in fp32, every operation by itself."""

    def __init__(self, lowered: Lowered, weights: Mapping[str, StoredTensor]):
        read = lowered.source.weights if lowered.source is not None else ()
        values = {
            name: weights[name].decode().astype(np.float32, copy=False)
            for name in dict.fromkeys((*lowered.main.weights, *read))
        }
        self.lowered, self.kept = lowered, Kept()
        self.main = Interpreter(lowered.main, values, self.kept)
        self.source = Interpreter(lowered.source, values, self.kept) if lowered.source is not None else None
        self.of_source = lowered.source.slots.keys() if lowered.source is not None else frozenset[str]()

    @property
    def width(self) -> int:
        return self.lowered.main.output.width

    def read(self, rows: Rows) -> None:
        if self.source is not None:
            self.source.step(rows)

    def step(self, rows: Rows) -> Floats:
        return self.main.step(rows)

    def fork(self, parent: int, child: int) -> None:
        held = self.kept.slots
        # nothing that is kept is written to again, so both may hold it
        held |= {(slot, child): values for (slot, owner), values in held.items() if owner == parent}

    def forget(self, sequence: int, length: int = 0) -> None:
        for slot, owner in [key for key in self.kept.slots if key[1] == sequence]:
            if not length:
                del self.kept.slots[slot, owner]
            elif slot not in self.of_source:
                key, value = self.kept.slots[slot, owner]
                self.kept.slots[slot, owner] = key[:length], value[:length]

    def bytes_for(self, tokens: int, source: int = 0) -> int:
        return cache_values(self.lowered, tokens, source) * np.dtype(np.float32).itemsize


def cache_values(lowered: Lowered, tokens: int, source: int = 0) -> int:
    """How many numbers the slots of one sequence hold, of so many tokens and rows of a source."""
    of_source = lowered.source.slots if lowered.source is not None else {}
    return sum(
        size.kv_heads * (size.head_dim + size.value_dim) * (source if slot in of_source else tokens)
        for slot, size in lowered.main.slots.items()
    )


class Sequences:
    """A machine as the texts of several requests use it, from any threads: each gets numbers of its own."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self._lock = Lock()
        self._ended: list[int] = []  # to be forgotten
        self._free: list[int] = []  # forgotten; the lowest comes first, as a machine may keep tables of them
        self._count = 0

    def begin(self) -> int:
        """The number of a sequence that holds nothing."""
        with self._lock:
            return self._number()

    def fork(self, parent: int) -> int:
        """The number of a sequence that goes on from what another holds now."""
        with self._lock:
            child = self._number()
            self.machine.fork(parent, child)
            return child

    def end(self, sequence: int) -> None:
        """Forgets a sequence; its number is free again."""
        self._ended.append(sequence)
        # the garbage collector may call this in the middle of a step: then the next call forgets it
        if self._lock.acquire(blocking=False):
            try:
                self._clear()
            finally:
                self._lock.release()

    def read(self, rows: Rows) -> None:
        with self._lock:
            self._clear()
            self.machine.read(rows)

    def step(self, rows: Rows) -> Floats:
        with self._lock:
            self._clear()
            return self.machine.step(rows)

    def _number(self) -> int:
        self._clear()
        if self._free:
            return heappop(self._free)
        self._count += 1
        return self._count - 1

    def _clear(self) -> None:
        while self._ended:
            sequence = self._ended.pop()
            self.machine.forget(sequence)
            heappush(self._free, sequence)
