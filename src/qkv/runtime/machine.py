"""What runs a model for the engine: the protocol, and the machine in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.checkpoints import StoredTensor
from qkv.runtime.blocks import Pool
from qkv.runtime.interpreter import Floats, Interpreter, Kept, Rows
from qkv.runtime.lower import Lowered


class Summaries(NamedTuple):
    """Of each of some answers: where the greatest number is, it, and ln of the sum of e^x.

    No numbers where one of the answer is none, or infinite.
    """

    best: NDArray[np.int32]
    top: Floats
    log_sum: Floats


class Machine(Protocol):
    """Runs one model and holds the cache of its sequences.

    A sequence is a small whole number of the caller's choice: it begins with the first rows that
    name it, and is gone when it is forgotten. Calls come one at a time.
    """

    shares: bool  # whether what a token keeps depends on nothing but the tokens before it
    goes_back: bool  # whether a sequence can be taken back to any of its tokens
    altered: bool  # whether something changed what passed through the model in the last `run`
    summaries: Summaries | None  # of what `run` gave last, where they are known
    by_length: bool  # whether what a token keeps depends on how long the text was that it came with

    @property
    def width(self) -> int:
        """How many numbers an answer has: the vocabulary, where there is a language head."""
        ...

    @property
    def own(self) -> Sequence[Pool]:
        """Where the tokens themselves are kept, if it is in blocks; one pool for each window."""
        ...

    @property
    def beside(self) -> Sequence[Pool]:
        """Where what an encoder made is kept, if it is in blocks: for the decoder, then for itself."""
        ...

    def read(self, rows: Rows) -> None:
        """Runs the source program of an encoder-decoder: the whole source of each sequence in `rows`."""
        ...

    def step(self, rows: Rows) -> Floats:
        """Runs the main program: the answers of the wanted rows, (wanted, width), the caller's to keep."""
        ...

    def run(self, rows: Rows) -> Floats:
        """The same where the pools have room for the rows already."""
        ...

    def fork(self, parent: int, child: int) -> None:
        """Makes `child`, a sequence that holds nothing, go on from all that `parent` holds now."""
        ...

    def forget(self, sequence: int, length: int = 0) -> None:
        """Takes a sequence back to its first `length` tokens; at 0 its source is forgotten as well."""
        ...

    def bytes_for(self, tokens: int, source: int = 0) -> int:
        """The bytes that the cache of one sequence takes at most, of so many tokens and rows of a source."""
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

    run = step
    shares, goes_back, by_length, altered = False, True, False, False
    summaries: Summaries | None = None
    own: Sequence[Pool] = ()
    beside: Sequence[Pool] = ()

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
