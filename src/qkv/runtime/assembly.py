"""A lowered program built from the native runtime's parts: matrices packed, operations added one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatchmethod
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from qkv.checkpoints import StoredTensor, release
from qkv.errors import CheckpointError, UnsupportedError
from qkv.runtime import program as op
from qkv.runtime.interpreter import bucket
from qkv.spec.feed_forward import Activation, ClampedSwish

# what the native runtime keeps as a file has it; values of other formats become F32
FORMATS_KEPT = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
Place = tuple[int, int, int]
ENDLESS = 2**31 - 1  # more than any position


@dataclass
class Packed:
    """The matrices of a model in the native layout; those that several operations read, once."""

    native: ModuleType
    weights: Mapping[str, StoredTensor]
    matrices: dict[Any, Any] = field(default_factory=dict)
    arena: Any = None  # the memory that they share
    recent: dict[str, StoredTensor] = field(default_factory=dict)  # of the operation that is being added

    def __post_init__(self) -> None:
        self.arena = self.native.Arena()

    def kept(self, name: str) -> StoredTensor:
        """A parameter in a format that the native runtime has. Made once an operation: it may be work."""
        if name not in self.recent:
            stored = self.weights[name]
            if stored.format not in FORMATS_KEPT:
                stored = StoredTensor.from_array(name, stored.decode().astype(np.float32))
            self.recent[name] = stored
        return self.recent[name]

    def values(self, name: str | None) -> np.ndarray | None:
        """A vector, or a small table, in fp32."""
        if name is None:
            return None
        return np.ascontiguousarray(self.kept(name).decode(), np.float32).reshape(-1)

    def matrix(self, *names: str, expert: int | None = None, paired: bool = False) -> Any:
        """The rows of these below each other, or paired as a gate is; of a stack, one expert's."""
        key = (names, expert, paired)
        if key not in self.matrices:
            parts = [_rows(self.kept(name), expert) for name in names]
            formats, columns = {part[0] for part in parts}, {part[1] for part in parts}
            if len(formats) != 1 or len(columns) != 1:
                raise CheckpointError(f"{names[0]} and {names[-1]} are stored in different formats.")
            given = [(data, rows) for _, _, data, rows in parts]
            self.matrices[key] = self.native.matrix(self.arena, *formats, *columns, given, paired)
            for data, _ in given:
                release(data)  # the file's pages are not needed beside what was made of them
        return self.matrices[key]

    @property
    def bytes(self) -> int:
        return sum(matrix.bytes for matrix in self.matrices.values())


def _rows(stored: StoredTensor, expert: int | None) -> tuple[str, int, np.ndarray, int]:
    """A matrix's format, columns, bytes and rows."""
    *_, rows, columns = stored.shape
    data = stored.data
    if expert is not None:
        size = len(data) // stored.shape[0]
        data = data[expert * size : (expert + 1) * size]
    if not data.flags.c_contiguous:
        data = np.ascontiguousarray(data)
    return stored.format, columns, data, rows


class Assembly:
    """Builds one native program. `slots` are those of the cache, in its order."""

    def __init__(
        self, native: ModuleType, program: op.Program, packed: Packed, slots: Sequence[str], set_: str
    ):
        self.packed = packed
        self.slots = {name: number for number, name in enumerate(slots)}
        self.buffers = {name: number for number, name in enumerate(program.buffers)}
        widths = list(program.buffers.values())
        # a router's logits have a buffer of their own
        routers = [o for o in program.operations if isinstance(o, op.Route)]
        experts = max((packed.kept(o.matrix).shape[0] for o in routers), default=0)
        self.logits = len(widths)
        self.built = native.Program([*widths, experts], self.buffers[program.output.buffer], set_)
        self.picks = {name: i for i, name in enumerate(dict.fromkeys(o.picks for o in routers))}
        self.top_k = {o.picks: o.top_k for o in routers}
        self.angles: dict[Any, int] = {}
        for operation in program.operations:
            if isinstance(operation, op.Rotate):
                key = operation.frequencies, operation.factor, operation.most
                if key not in self.angles:
                    self.angles[key] = len(self.angles)
                    most = ENDLESS if operation.most is None else operation.most
                    self.built.angles(self.angles[key], list(operation.frequencies), operation.factor, most)
        for operation in program.operations:
            packed.recent.clear()
            self.add(operation)
        packed.recent.clear()

    def at(self, span: op.Span) -> Place:
        return self.buffers[span.buffer], span.start, span.width

    @singledispatchmethod
    def add(self, operation: op.Operation) -> None:
        raise UnsupportedError(f"The native runtime has no {type(operation).__name__}.")

    @add.register
    def _(self, o: op.TakeRows) -> None:
        by = ("token", "position", "type").index(o.by)
        self.built.take_rows(self.at(o.out), self.packed.matrix(o.table), by, o.scale, o.offset, o.add)

    @add.register
    def _(self, o: op.Sinusoids) -> None:
        self.built.sinusoids(self.at(o.out), o.base, o.layout == "halves")

    @add.register
    def _(self, o: op.Pick) -> None:
        self.built.pick([(self.at(out), self.at(x)) for out, x in zip(o.out, o.x, strict=True)])

    @add.register
    def _(self, o: op.Norm) -> None:
        scale, bias = self.packed.values(o.scale), self.packed.values(o.bias)
        if scale is not None:
            scale = scale + np.float32(o.offset)
        out, x = self.at(o.out), self.at(o.x)
        self.built.norm(out, x, o.kind == "layer", o.eps, scale, bias, o.groups)

    @add.register
    def _(self, o: op.Linear) -> None:
        gate = None if o.gate is None else _how(o.gate)
        biases = o.biases or (None,) * len(o.matrices)
        out, x = self.at(o.out), self.at(o.x)
        if o.gate is not None and self._alike(o.matrices):
            matrix = self.packed.matrix(*o.matrices, paired=True)
            pieces = [(matrix, 0, self._paired(o.matrices, biases))]
            self.built.linear(x, out, pieces, o.add, o.scale, gate)
        elif o.gate is not None:
            raise UnsupportedError(f"{o.matrices[0]} and its partner are stored in different formats.")
        else:
            self.built.linear(x, out, self._pieces(o.matrices, biases), o.add, o.scale, None)

    def _alike(self, names: Sequence[str]) -> bool:
        return len({self.packed.kept(name).format for name in names}) == 1

    def _pieces(self, names: Sequence[str], biases: Sequence[str | None]) -> list[Any]:
        """Matrices side by side; neighbours of one format in one piece."""
        formats = [self.packed.kept(name).format for name in names]
        cuts = [0, *(i for i in range(1, len(names)) if formats[i] != formats[i - 1]), len(names)]
        pieces, column = [], 0
        for start, end in pairwise(cuts):
            matrix = self.packed.matrix(*names[start:end])
            each = [
                self._bias(bias, self.packed.kept(name).shape[0])
                for name, bias in zip(names[start:end], biases[start:end], strict=True)
            ]
            pieces.append((matrix, column, np.concatenate(each) if any(biases[start:end]) else None))
            column += matrix.rows
        return pieces

    def _bias(self, name: str | None, rows: int, expert: int | None = None) -> np.ndarray:
        values = self.packed.values(name)
        if values is None:
            return np.zeros(rows, np.float32)
        return values if expert is None else values.reshape(-1, rows)[expert]

    def _paired(
        self, names: Sequence[str], biases: Sequence[str | None], expert: int | None = None
    ) -> np.ndarray | None:
        """The biases of a gate and its partner, 16 of each in turn."""
        if not any(biases):
            return None
        rows = self.packed.kept(names[0]).shape[-2]
        each = np.zeros((2, -(-rows // 16) * 16), np.float32)
        for which, bias in enumerate(biases):
            each[which, :rows] = self._bias(bias, rows, expert)
        return np.ascontiguousarray(each.reshape(2, -1, 16).transpose(1, 0, 2)).reshape(-1)

    @add.register
    def _(self, o: op.Clamp) -> None:
        self.built.clamp(self.at(o.out), o.bound)

    @add.register
    def _(self, o: op.Rotate) -> None:
        angles = self.angles[o.frequencies, o.factor, o.most]
        pairs, interleaved = len(o.frequencies), o.pairs == "interleaved"
        self.built.rotate(self.at(o.out), self.at(o.x or o.out), o.heads, angles, pairs, interleaved)

    @add.register
    def _(self, o: op.Store) -> None:
        self.built.store(self.slots[o.slot], self.at(o.key), self.at(o.value))

    @add.register
    def _(self, o: op.Attend) -> None:
        slopes = None if o.slopes is None else np.array(o.slopes, np.float32)
        reach, bias = 0, None
        if o.buckets is not None:
            reach = o.starts[-1] if o.starts else 0  # further than this nothing changes
            table = self.packed.kept(o.buckets).decode().astype(np.float32)
            bias = np.ascontiguousarray(table[bucket(o, np.arange(-reach, reach + 1))].T).reshape(-1)
        sight = (o.sight.before, o.sight.after, o.sight.chunk, o.sight.first)
        heads, sinks = (o.heads, o.kv_heads), self.packed.values(o.sink)
        query, far, out = self.at(o.query), self.at(o.far or o.query), self.at(o.out)
        slot = self.slots[o.slot]
        self.built.attend(
            query, far, out, slot, heads, o.scale, sight, o.cap or 0.0, sinks, slopes, bias, reach
        )

    @add.register
    def _(self, o: op.Activate) -> None:
        self.built.activate(self.at(o.out), _how(o.activation))

    @add.register
    def _(self, o: op.Multiply) -> None:
        self.built.multiply(self.at(o.out), self.at(o.x))

    @add.register
    def _(self, o: op.Add) -> None:
        self.built.add(self.at(o.out), self.at(o.x), o.scale, o.skip)

    @add.register
    def _(self, o: op.ScaleCap) -> None:
        self.built.scale_cap(self.at(o.out), o.scale, o.cap or 0.0)

    @add.register
    def _(self, o: op.Route) -> None:
        rows = self.packed.kept(o.matrix).shape[0]
        logits = (self.logits, 0, rows)
        bias = None if o.bias is None else self._bias(o.bias, rows)
        self.built.linear(self.at(o.x), logits, [(self.packed.matrix(o.matrix), 0, bias)], False, 1.0, None)
        r = o.router
        groups, softmax = (r.groups, r.top_groups, r.group_best), r.score == "softmax"
        balance, picks = self.packed.values(o.balance), self.picks[o.picks]
        self.built.route(picks, logits, softmax, r.normalise, r.scale, groups, o.top_k, balance)

    @add.register
    def _(self, o: op.ExpertLinear) -> None:
        biases = o.biases or (None,) * len(o.matrices)
        if o.gate is not None and not self._alike(o.matrices):
            raise UnsupportedError(f"{o.matrices[0]} and its partner are stored in different formats.")
        experts = []
        for expert in range(self.packed.kept(o.matrices[0]).shape[0]):
            matrix = self.packed.matrix(*o.matrices, expert=expert, paired=o.gate is not None)
            if o.gate is not None:
                bias = self._paired(o.matrices, biases, expert)
            else:
                bias = self._bias(biases[0], matrix.rows, expert) if biases[0] else None
            experts.append((matrix, 0, bias))
        gate = None if o.gate is None else _how(o.gate)
        picks, top_k = self.picks[o.picks], self.top_k[o.picks]
        self.built.expert_linear(self.at(o.x), self.at(o.out), picks, top_k, experts, gate, o.from_picks)

    @add.register
    def _(self, o: op.Combine) -> None:
        self.built.combine(self.at(o.out), self.at(o.x), self.picks[o.picks], o.add, o.scale)


def _how(activation: Activation) -> tuple[str, float, float, float]:
    if isinstance(activation, ClampedSwish):
        return "clamped_swish", activation.alpha, activation.limit, activation.offset
    return str(activation), 1.0, 0.0, 0.0


def exact(weights: Mapping[str, StoredTensor], names: Sequence[str]) -> bool:
    """Whether every matrix holds fp32 numbers, so that nothing is rounded on the way."""
    matrices = (weights[name] for name in names if len(weights[name].shape) > 1)
    return all(each.format not in FORMATS_KEPT or each.format == "F32" for each in matrices)
