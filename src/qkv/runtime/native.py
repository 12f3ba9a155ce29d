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
from qkv.runtime.blocks import BLOCK, Blocks, blocks
from qkv.runtime.built import missing
from qkv.runtime.interpreter import Floats, Rows
from qkv.runtime.lower import Lowered
from qkv.runtime.threads import default_threads

_Given = tuple[NDArray[np.int32] | None, ...]  # tokens, sequences, positions, types, wanted
CacheType = Literal["f32", "bf16", "int8"]
CACHE_TYPES: tuple[CacheType, ...] = ("f32", "bf16", "int8")
SET = "QKV_ISA"  # of the environment: the instruction set to run on
OWN, CROSS, SOURCE = range(3)  # groups of slots: those of the main program, what it reads, the encoder's


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

    def __init__(
        self,
        lowered: Lowered,
        weights: Mapping[str, StoredTensor],
        threads: int | None = None,
        cache_type: CacheType | None = None,
        instruction_set: str | None = None,
    ):
        native = _module()
        set_ = instruction_set or os.environ.get(SET, "")
        if set_ and set_ not in native.instruction_sets():
            known = ", ".join(native.instruction_sets())
            raise RequestError(f"The instruction set {set_!r} cannot be had here ({known}).")
        programs = [p for p in (lowered.main, lowered.source) if p is not None]
        names = list(dict.fromkeys(name for program in programs for name in program.weights))
        self.cache_type: CacheType = cache_type or ("f32" if exact(weights, names) else "bf16")
        if self.cache_type not in CACHE_TYPES:
            raise RequestError(f"A cache holds f32, bf16 or int8, not {self.cache_type!r}.")
        slots = {name: slot for program in reversed(programs) for name, slot in program.slots.items()}
        stored = lowered.source.slots if lowered.source is not None else {}
        read = lowered.main.slots
        group = {name: SOURCE if name not in read else CROSS if name in stored else OWN for name in slots}
        sizes = [(group[name], s.kv_heads, s.head_dim, s.value_dim) for name, s in slots.items()]
        if any(max(size[2:]) > 512 for size in sizes):
            raise UnsupportedError("The native runtime has no heads of more than 512 dimensions.")
        count = 3 if lowered.source is not None else 1
        self.cache = native.Cache(sizes, count, CACHE_TYPES.index(self.cache_type))
        self.groups = [Blocks(self.cache, number) for number in range(count)]
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
            for number in (CROSS, SOURCE):
                self.groups[number].extend(sequence, start, end)
        self._run(self.source, given, None)
        for sequence, _, _ in _runs(rows):
            self.groups[SOURCE].forget(sequence)

    def step(self, rows: Rows) -> Floats:
        if not len(rows.tokens):
            raise RequestError("A step needs at least one row.")
        given = _checked(self.main, rows)
        for sequence, start, end in _runs(rows):
            self.groups[OWN].extend(sequence, start, end)
            for other in self.groups[CROSS:]:
                other.reach(sequence, 0)
        answers = np.empty((len(rows.wanted), self.columns), np.float32)
        self._run(self.main, given, answers)
        return answers[:, : self.width] if self.columns != self.width else answers

    def _run(self, program: Any, given: _Given, answers: Floats | None) -> None:
        tables = [(group.table, group.lengths) for group in self.groups]
        program.run(*given, tables, self.cache, self.workers, answers)

    def fork(self, parent: int, child: int) -> None:
        for number in (OWN, CROSS)[: len(self.groups)]:
            self.groups[number].fork(parent, child)

    def forget(self, sequence: int, length: int = 0) -> None:
        self.groups[OWN].forget(sequence, length)
        if not length:
            for other in self.groups[CROSS:]:
                other.forget(sequence)

    def bytes_for(self, tokens: int, source: int = 0) -> int:
        per = [self.cache.block_bytes(group.group) for group in self.groups]
        held = [blocks(tokens), blocks(source), blocks(source)][: len(per)]
        return int(sum(count * size for count, size in zip(held, per, strict=True)))


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
