"""The native runtime: lowered programs run in one call a step, by persistent threads, without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from qkv.checkpoints import StoredTensor
from qkv.errors import RequestError, UnsupportedError
from qkv.runtime.assembly import Assembly, Packed, exact
from qkv.runtime.blocks import BLOCK, Pool, Reach, blocks, ordered
from qkv.runtime.built import missing
from qkv.runtime.interpreter import Floats, Rows
from qkv.runtime.lower import Lowered
from qkv.runtime.machine import Summaries
from qkv.runtime.program import Attend
from qkv.runtime.threads import default_threads

_Given = tuple[NDArray[np.int32] | None, ...]  # tokens, sequences, positions, types, wanted
CacheType = Literal["f32", "bf16", "int8"]
CACHE_TYPES: tuple[CacheType, ...] = ("f32", "bf16", "int8")
SET = "QKV_ISA"  # of the environment: the instruction set to run on


def _module() -> ModuleType:
    from qkv.runtime import _native

    found: ModuleType = _native
    return found


def available() -> bool:
    """Whether the runtime was built."""
    return reason() is None


def reason() -> str | None:
    """Why the runtime cannot be had; None where it can."""
    return missing()


class Native:
    """Runs the programs of one model; see `qkv.runtime.machine.Machine`.

    Weights stay in their format: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and Q6_K
    with their values unchanged, others as F32. Rows that meet quantised weights are rounded to 8 bits
    a group of 32, those that meet bfloat16 to bfloat16. The cache holds `cache_type`: "f32" for
    weights that are all F32, else "bf16", unless it is chosen. Results are bit-equal for any batch
    mates, chunks and number of threads.

    `threads` None is one for each core; `instruction_set` None is QKV_ISA, else the best there is.
    Raises RequestError for a cache type or an instruction set that cannot be had.
    """

    by_length = altered = False
    goes_back = True

    def __init__(
        self,
        lowered: Lowered,
        weights: Mapping[str, StoredTensor],
        threads: int | None = None,
        cache_type: str | None = None,
        instruction_set: str | None = None,
    ):
        native = _module()
        set_ = instruction_set or os.environ.get(SET, "")
        if set_ and set_ not in native.instruction_sets():
            known = ", ".join(native.instruction_sets())
            raise RequestError(f"The instruction set {set_!r} cannot be had here ({known}).")
        programs = [p for p in (lowered.main, lowered.source) if p is not None]
        names = list(dict.fromkeys(name for program in programs for name in program.weights))
        chosen = cache_type or ("f32" if exact(weights, names) else "bf16")
        if chosen not in CACHE_TYPES:
            raise RequestError(f"A cache holds f32, bf16 or int8, not {chosen!r}.")
        self.cache_type: CacheType = chosen
        slots = {name: slot for program in reversed(programs) for name, slot in program.slots.items()}
        group, reaches = _groups(lowered)
        sizes = [(group[name], s.kv_heads, s.head_dim, s.value_dim) for name, s in slots.items()]
        if any(max(size[2:]) > 512 for size in sizes):
            raise UnsupportedError("The native runtime has no heads of more than 512 dimensions.")
        beside = 2 if lowered.source is not None else 0
        count = len(reaches) + beside
        self.cache = native.Cache(sizes, count, CACHE_TYPES.index(self.cache_type))
        self.own = [Pool(self.cache, number, reach) for number, reach in enumerate(reaches)]
        self.beside = [Pool(self.cache, number) for number in range(len(reaches), count)]
        self.shares = not self.beside
        self.summaries: Summaries | None = None
        packed = Packed(native, weights)
        self.lowered = lowered
        self.main = Assembly(native, lowered.main, packed, list(slots), set_).built
        self.source = (
            Assembly(native, lowered.source, packed, list(slots), set_).built if lowered.source else None
        )
        self.weight_bytes = packed.bytes
        self.workers = native.Workers(threads or default_threads())
        self.columns = lowered.main.buffers[lowered.main.output.buffer]

    @property
    def instruction_set(self) -> str:
        found: str = self.main.instruction_set
        return found

    @property
    def threads(self) -> int:
        found: int = self.workers.count
        return found

    @property
    def width(self) -> int:
        return self.lowered.main.output.width

    def read(self, rows: Rows) -> None:
        if self.source is None:
            return
        given = _checked(self.source, rows)
        for sequence, start, end in _runs(rows):
            for pool in self.beside:
                pool.extend(sequence, start, end)
        self._run(self.source, given, None)
        for sequence, _, _ in _runs(rows):
            self.beside[1].forget(sequence)  # what the encoder's own attentions kept

    def step(self, rows: Rows) -> Floats:
        given = self._given(rows)
        for sequence, start, end in _runs(rows):
            for pool in self.own:
                pool.extend(sequence, start, end)
        return self._answered(given, len(rows.wanted))

    def run(self, rows: Rows) -> Floats:
        answers = self._answered(self._given(rows), len(rows.wanted))
        self.summaries = self.summarised(answers) if self.columns == self.width else None
        return answers

    def summarised(self, answers: Floats) -> Summaries:
        """What is chosen by of each row of logits: see `Summaries`."""
        count = len(answers)
        found = Summaries(np.empty(count, np.int32), np.empty(count, np.float32), np.empty(count, np.float32))
        self.main.summarise(answers, self.workers, *found)
        return found

    def _given(self, rows: Rows) -> _Given:
        if not len(rows.tokens):
            raise RequestError("A step needs at least one row.")
        return _checked(self.main, rows)

    def _answered(self, given: _Given, wanted: int) -> Floats:
        sequences = given[1]
        if self.beside and sequences is not None:
            for pool in self.beside:
                pool.widen(int(sequences.max()), 0)
        answers = np.empty((wanted, self.columns), np.float32)
        self._run(self.main, given, answers)
        return answers[:, : self.width] if self.columns != self.width else answers

    def _run(self, program: Any, given: _Given, answers: Floats | None) -> None:
        tables = [(pool.table, pool.lengths) for pool in (*self.own, *self.beside)]
        program.run(*given, tables, self.cache, self.workers, answers)

    def fork(self, parent: int, child: int) -> None:
        for pool in (*self.own, *self.beside[:1]):
            pool.fork(parent, child)

    def forget(self, sequence: int, length: int = 0) -> None:
        for pool in self.own:
            pool.forget(sequence, length)
        if not length:
            for pool in self.beside:
                pool.forget(sequence)

    def bytes_for(self, tokens: int, source: int = 0) -> int:
        own = sum(pool.most(tokens, tokens) * pool.bytes for pool in self.own)
        return own + sum(blocks(source) * pool.bytes for pool in self.beside)


def _groups(lowered: Lowered) -> tuple[dict[str, int], list[Reach]]:
    """Which group each slot is in: those of one reach together, then a source's, then the encoder's own.

    With them the reaches of the groups that the tokens themselves are kept in.
    """
    stored = lowered.source.slots if lowered.source is not None else {}
    own = [name for name in lowered.main.slots if name not in stored]
    seen: dict[str, Reach] = {}
    for operation in lowered.main.operations:
        if isinstance(operation, Attend) and operation.slot not in stored:
            sight = operation.sight
            window = min((n for n in (sight.before, sight.chunk) if n is not None), default=None)
            reach = Reach(window, sight.first)
            # several may read it: what any of them sees
            seen[operation.slot] = reach.wider(seen.get(operation.slot, reach))
    reaches = ordered(seen.get(name, Reach()) for name in own)
    group = {name: reaches.index(seen.get(name, Reach())) for name in own}
    group |= {name: len(reaches) + (name not in lowered.main.slots) for name in stored}
    return group, reaches


def _checked(program: Any, rows: Rows) -> _Given:
    """The rows as the module takes them; RequestError, before anything is changed, for what cannot be."""
    given = tuple(map(_whole, (rows.tokens, rows.sequences, rows.positions, rows.types, rows.wanted)))
    try:
        program.check(*given)
    except IndexError as problem:
        raise RequestError(f"Token, position or type {problem} has no row in its table.") from None
    except ValueError as problem:
        raise RequestError(f"This step cannot be run: {problem}.") from None
    return given


def _whole(values: Any) -> NDArray[np.int32] | None:
    """Whole numbers in 32 bits; what they do not hold is refused, and not cut off."""
    if values is None:
        return None
    found = np.ascontiguousarray(values, np.int32)
    if found is not values and not np.array_equal(found, values):
        raise RequestError("Tokens and positions are whole numbers below 2 to the power of 31.")
    return found


def _runs(rows: Rows) -> Iterator[tuple[int, int, int]]:
    """Sequences in turn, and the tokens of each from where to before where."""
    sequences = rows.sequences
    if len(sequences) == 1:
        position = int(rows.positions[0])
        yield int(sequences[0]), position, position + 1
        return
    ends = [*np.flatnonzero(np.diff(sequences)).tolist(), len(sequences) - 1]
    start = 0
    for end in ends:
        yield int(sequences[start]), int(rows.positions[start]), int(rows.positions[end]) + 1
        start = end + 1


__all__ = ["BLOCK", "CACHE_TYPES", "CacheType", "Native", "available", "reason"]
