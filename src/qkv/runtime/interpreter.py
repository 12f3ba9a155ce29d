"""What each operation means, in numpy: what faster runners are held to, and a way to run anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod

import numpy as np
from numpy.typing import NDArray

from qkv.errors import CheckpointError, RequestError
from qkv.runtime import program as op
from qkv.runtime.activations import activated, gated
from qkv.runtime.routing import routed

Floats = NDArray[np.float32]
Ints = NDArray[np.integer]


@dataclass(frozen=True)
class Rows:
    """The tokens of one step: of which sequence they are, and where in it they stand.

    Rows of a sequence are in order and follow the tokens it already has. `wanted` are those whose
    answers come back. `totals` say how long each one's text is once all that comes with it is read,
    where that matters.
    """

    tokens: Ints
    sequences: Ints
    positions: Ints
    wanted: Ints
    types: Ints | None = None
    totals: Ints | None = None

    @staticmethod
    def of(tokens: list[int], start: int = 0, sequence: int = 0, wanted: list[int] | None = None) -> Rows:
        """The tokens of one sequence from position `start`; all answers, unless some are named."""
        count = len(tokens)
        return Rows(
            np.asarray(tokens),
            np.full(count, sequence),
            np.arange(start, start + count),
            np.arange(count) if wanted is None else np.asarray(wanted),
        )

    def picked(self) -> Rows:
        """Those that are wanted."""

        def of(values: Ints | None) -> Ints | None:
            return None if values is None else values[self.wanted]

        at = self.wanted
        tokens, sequences, positions = self.tokens[at], self.sequences[at], self.positions[at]
        return Rows(tokens, sequences, positions, np.arange(len(at)), of(self.types), of(self.totals))

    @staticmethod
    def together(*each: Rows) -> Rows:
        """Rows of several sequences as one step."""
        starts = np.cumsum([0, *(len(rows.tokens) for rows in each)])
        return Rows(
            np.concatenate([rows.tokens for rows in each]),
            np.concatenate([rows.sequences for rows in each]),
            np.concatenate([rows.positions for rows in each]),
            np.concatenate([rows.wanted + start for rows, start in zip(each, starts, strict=False)]),
        )


@dataclass
class Kept:
    """Keys and values of each sequence, by slot: (tokens, kv_heads, dim)."""

    slots: dict[tuple[str, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def store(self, slot: str, sequence: int, key: Floats, value: Floats) -> None:
        held = self.slots.get((slot, sequence))
        if held is not None:
            key, value = np.concatenate([held[0], key]), np.concatenate([held[1], value])
        self.slots[slot, sequence] = key, value

    def forget(self, sequence: int, length: int = 0) -> None:
        """All but the first `length` tokens of a sequence."""
        for (slot, owner), (key, value) in list(self.slots.items()):
            if owner == sequence:
                self.slots[slot, owner] = key[:length], value[:length]


class Interpreter:
    """Runs a program, one operation after another, over rows.

    `weights` are the parameters by the description's names, in fp32. Programs of one model share `kept`.
    """

    def __init__(self, program: op.Program, weights: Mapping[str, Floats], kept: Kept | None = None):
        missing = [name for name in program.weights if name not in weights]
        if missing:
            raise CheckpointError(f"The program reads {missing[0]}, which was not given.")
        self.program, self.weights = program, weights
        self.kept = kept if kept is not None else Kept()
        self.buffers: dict[str, Floats] = {}
        self.picks: dict[str, tuple[Ints, Floats]] = {}
        self.rows = Rows.of([])

    def step(self, rows: Rows) -> Floats:
        """The answers of the wanted rows, (wanted, width)."""
        if not len(rows.tokens):
            raise RequestError("A step needs at least one row.")
        self.rows = rows
        self.buffers = {
            name: np.zeros((len(rows.tokens), width), np.float32)
            for name, width in self.program.buffers.items()
        }
        for operation in self.program.operations:
            if isinstance(operation, op.Pick) and not len(rows.wanted):
                return np.empty((0, self.program.output.width), np.float32)
            self.run(operation)
        return self.at(self.program.output).copy()

    def at(self, span: op.Span) -> Floats:
        return self.buffers[span.buffer][:, span.start : span.start + span.width]

    def put(self, span: op.Span, values: Floats, add: bool = False, scale: float = 1.0) -> None:
        target = self.at(span)
        target[...] = target + np.float32(scale) * values if add else values

    @singledispatchmethod
    def run(self, operation: op.Operation) -> None:
        raise TypeError(f"{type(operation).__name__} is not an operation")

    @run.register
    def _(self, o: op.TakeRows) -> None:
        given = {"token": self.rows.tokens, "position": self.rows.positions, "type": self.rows.types}[o.by]
        index = (np.zeros_like(self.rows.tokens) if given is None else given) + o.offset
        table = self.weights[o.table]
        if index.min() < 0 or index.max() >= len(table):
            raise RequestError(f"{o.by} {index.max() - o.offset:,} has no row in a table of {len(table):,}.")
        self.put(o.out, np.float32(o.scale) * table[index], o.add)

    @run.register
    def _(self, o: op.Sinusoids) -> None:
        angles = self.rows.positions[:, None] * o.base ** (-np.arange(0, o.out.width, 2) / o.out.width)
        parts = np.sin(angles), np.cos(angles)
        joined = np.concatenate(parts, 1) if o.layout == "halves" else np.stack(parts, -1)
        self.put(o.out, joined.reshape(len(angles), -1).astype(np.float32), add=True)

    @run.register
    def _(self, o: op.Pick) -> None:
        wanted = self.rows.wanted
        picked = [self.at(x)[wanted] for x in o.x]
        self.buffers = {
            name: np.zeros((len(wanted), b.shape[1]), np.float32) for name, b in self.buffers.items()
        }
        self.rows = self.rows.picked()
        for out, rows in zip(o.out, picked, strict=True):
            self.put(out, rows)

    @run.register
    def _(self, o: op.Norm) -> None:
        x = self.at(o.x).reshape(len(self.at(o.x)), o.groups, -1)
        if o.kind == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(o.eps))
        if o.scale is not None:
            y = y * (np.float32(o.offset) + self._by_group(o.scale, o.groups))
        if o.bias is not None:
            y = y + self._by_group(o.bias, o.groups)
        self.put(o.out, y.reshape(len(y), -1))

    def _by_group(self, name: str, groups: int) -> Floats:
        """One vector for all groups, or one each."""
        values = self.weights[name]
        return values.reshape(groups, -1) if values.ndim > 1 or groups == 1 else values

    @run.register
    def _(self, o: op.Linear) -> None:
        x = self.at(o.x)
        biases = o.biases or (None,) * len(o.matrices)
        each = [self._affine(x, self.weights[m], b) for m, b in zip(o.matrices, biases, strict=True)]
        y = np.concatenate(each, 1) if o.gate is None else gated(o.gate, *each)
        self.put(o.out, y, o.add, o.scale)

    def _affine(self, x: Floats, matrix: Floats, bias: str | None) -> Floats:
        y = x @ matrix.T
        return y if bias is None else y + self.weights[bias]

    @run.register
    def _(self, o: op.Clamp) -> None:
        self.put(o.out, np.clip(self.at(o.out), -o.bound, o.bound))

    @run.register
    def _(self, o: op.Rotate) -> None:
        x = self.at(o.x or o.out).reshape(len(self.rows.tokens), o.heads, -1).copy()
        positions = self.rows.positions if o.most is None else np.minimum(self.rows.positions, o.most)
        angles = positions[:, None].astype(np.float32) * np.array(o.frequencies, np.float32)
        cosine, sine = (np.float32(o.factor) * f(angles)[:, None] for f in (np.cos, np.sin))
        pairs = len(o.frequencies)
        half = o.pairs == "half"
        first = slice(0, pairs) if half else slice(0, 2 * pairs, 2)
        second = slice(pairs, 2 * pairs) if half else slice(1, 2 * pairs, 2)
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first], x[..., second] = a * cosine - b * sine, b * cosine + a * sine
        self.put(o.out, x.reshape(len(x), -1))

    @run.register
    def _(self, o: op.Store) -> None:
        size = self.program.slots[o.slot]
        key = self.at(o.key).reshape(-1, size.kv_heads, size.head_dim)
        value = self.at(o.value).reshape(-1, size.kv_heads, size.value_dim)
        for sequence in np.unique(self.rows.sequences):
            rows = self.rows.sequences == sequence
            self.kept.store(o.slot, int(sequence), key[rows], value[rows])

    @run.register
    def _(self, o: op.Attend) -> None:
        query = self.at(o.query).reshape(len(self.rows.tokens), o.heads, -1)
        far = query if o.far is None else self.at(o.far).reshape(query.shape)
        out = np.zeros((len(query), o.out.width), np.float32)
        for sequence in np.unique(self.rows.sequences):
            rows = np.flatnonzero(self.rows.sequences == sequence)
            held = self.kept.slots.get((o.slot, int(sequence)))
            if held is not None and len(held[0]):
                out[rows] = self._attend(o, query[rows], far[rows], self.rows.positions[rows], *held)
        self.put(o.out, out)

    def _attend(
        self, o: op.Attend, query: Floats, far: Floats, places: Ints, key: Floats, value: Floats
    ) -> Floats:
        group = o.heads // o.kv_heads
        key, value = np.repeat(key, group, 1), np.repeat(value, group, 1)
        ahead = np.arange(len(key))[None, :] - places[:, None]
        seen = _seen(o.sight, ahead, places)
        scores = np.float32(o.scale) * np.einsum("qhd,khd->hqk", query, key)
        if o.sight.first and o.sight.before is not None:
            at, first = np.minimum(places, o.sight.first + o.sight.before - 1), slice(0, o.sight.first)
            scores[..., first] = np.float32(o.scale) * np.einsum("qhd,khd->hqk", far, key[first])
            ahead[:, first] = np.arange(len(key))[first] - at[:, None]
        if o.cap is not None:
            scores = np.float32(o.cap) * np.tanh(scores / np.float32(o.cap))
        if o.slopes is not None:
            scores = scores - np.array(o.slopes, np.float32)[:, None, None] * np.abs(ahead)
        if o.buckets is not None:
            scores = scores + self.weights[o.buckets][bucket(o, ahead)].transpose(2, 0, 1)
        scores = np.where(seen, scores, -np.inf)
        sink = None if o.sink is None else self.weights[o.sink][:, None, None]
        return np.einsum("hqk,khd->qhd", _softmax(scores, sink), value).reshape(len(query), -1)

    @run.register
    def _(self, o: op.Activate) -> None:
        self.put(o.out, activated(o.activation, self.at(o.out)))

    @run.register
    def _(self, o: op.Multiply) -> None:
        self.put(o.out, self.at(o.out) * self.at(o.x))

    @run.register
    def _(self, o: op.Add) -> None:
        self.put(o.out, np.float32(o.skip) * self.at(o.out) + np.float32(o.scale) * self.at(o.x))

    @run.register
    def _(self, o: op.ScaleCap) -> None:
        y = np.float32(o.scale) * self.at(o.out)
        self.put(o.out, y if o.cap is None else np.float32(o.cap) * np.tanh(y / np.float32(o.cap)))

    @run.register
    def _(self, o: op.Route) -> None:
        logits = self._affine(self.at(o.x), self.weights[o.matrix], o.bias)
        balance = None if o.balance is None else self.weights[o.balance]
        self.picks[o.picks] = routed(logits, o.router, o.top_k, balance)

    @run.register
    def _(self, o: op.ExpertLinear) -> None:
        chosen, _ = self.picks[o.picks]
        rows, top_k = chosen.shape
        x = self.at(o.x)
        x = x.reshape(rows * top_k, -1) if o.from_picks else np.repeat(x, top_k, 0)
        y = np.empty((rows * top_k, o.out.width // top_k), np.float32)
        biases = o.biases or (None,) * len(o.matrices)
        for expert in np.unique(chosen):
            here = chosen.reshape(-1) == expert
            each = [
                x[here] @ self.weights[m][expert].T + (0 if b is None else self.weights[b][expert])
                for m, b in zip(o.matrices, biases, strict=True)
            ]
            y[here] = each[0] if o.gate is None else gated(o.gate, *each)
        self.put(o.out, y.reshape(rows, -1))

    @run.register
    def _(self, o: op.Combine) -> None:
        chosen, weights = self.picks[o.picks]
        each = self.at(o.x).reshape(*chosen.shape, -1)
        self.put(o.out, (each * weights[..., None]).sum(1), o.add, o.scale)


def _seen(sight: op.Sight, ahead: Ints, places: Ints) -> NDArray[np.bool_]:
    """(queries, keys): whether a key, so far ahead of the query, is seen."""
    seen = np.ones(ahead.shape, bool)
    if sight.before is not None:
        seen &= (ahead > -sight.before) | (ahead + places[:, None] < sight.first)
    if sight.after is not None:
        seen &= ahead <= sight.after
    if sight.chunk is not None:
        seen &= (ahead + places[:, None]) // sight.chunk == places[:, None] // sight.chunk
    return seen


def bucket(o: op.Attend, ahead: Ints) -> Ints:
    distance = np.abs(ahead) if o.both else np.maximum(-ahead, 0)
    bucket = np.searchsorted(np.array(o.starts), distance, side="right")
    return bucket + (len(o.starts) + 1) * (ahead > 0) if o.both else bucket


def _softmax(scores: Floats, sink: Floats | None) -> Floats:
    """Over the last axis. -inf is hidden, a row of nothing else gives zeros; a sink takes weight alone."""
    top = scores.max(-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink)
    top = np.where(np.isinf(top), 0.0, top).astype(np.float32)
    shares = np.exp(scores - top)
    total = shares.sum(-1, keepdims=True) + (0 if sink is None else np.exp(sink - top))
    found: Floats = shares / np.where(total == 0, 1.0, total).astype(np.float32)
    return found
