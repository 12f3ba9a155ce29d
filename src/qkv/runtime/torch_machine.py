"""The torch modules as a machine: sequences in a cache of blocks, some of them padded to a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from qkv.errors import CapacityError, RequestError
from qkv.nn import Layout, NoTap, Transformer
from qkv.nn.paged import PagedCache, kept
from qkv.runtime import Rows
from qkv.runtime.blocks import BLOCK, Pool, Reach, blocks, ordered
from qkv.runtime.compression import Weighing
from qkv.runtime.eviction import Evictions
from qkv.runtime.machine import Summaries
from qkv.spec import DynamicNTK, Language, LongRope, MultiToken, Rotary, Stack

if TYPE_CHECKING:
    from qkv.nn import Tap
    from qkv.runtime.interpreter import Floats

FEW = 8  # rows of a sequence that others may be padded to


@dataclass
class Part:
    """The rows of one sequence in a step: from where to before where, and which of them are wanted."""

    sequence: int
    start: int
    tokens: list[int]
    total: int
    wanted: list[int] = field(default_factory=list)  # rows of the part
    places: list[int] = field(default_factory=list)  # of each among the answers


class TorchMachine:
    """See `qkv.runtime.machine.Machine`. `watch` gives the tap that every pass goes through.

    A sequence's images or audio, or its source, are given by `bring` before its first rows, which then
    are its whole prompt.
    """

    def __init__(
        self,
        model: Transformer,
        watch: Callable[[], Tap | None] = lambda: None,
        policy: Weighing | None = None,
    ):
        self.model, self.watch = model, watch
        self.stamp = _stamp(model)
        parameter = next(model.parameters())
        self.device = parameter.device
        stack = model.spec.trunk
        reaches, layers = _groups(stack)
        self.cache = PagedCache(stack, layers, BLOCK, parameter.dtype, self.device)
        self.own = [Pool(self.cache, number, reach) for number, reach in enumerate(reaches)]
        self.beside: Sequence[Pool] = ()
        self.brought: dict[int, dict[str, torch.Tensor]] = {}
        positions = [mixer.position for _, mixer in kept(stack)]
        self.evictions = None if policy is None else self._evictions(stack, policy)
        self.by_length = policy is not None or any(
            isinstance(p, Rotary) and isinstance(p.scaling, DynamicNTK | LongRope) for p in positions
        )
        roles = {mixer.role for layer in stack.layers for _, mixer in layer.mixers()}
        self.goes_back = "mixer" not in roles and policy is None
        self.summaries: Summaries | None = None
        self.altered = False
        self.shares = self.goes_back and not self.by_length and "cross" not in roles

    def _evictions(self, stack: Stack, policy: Weighing) -> Evictions:
        (pool,) = self.own  # what is weighed sees everything
        pool.policy = policy
        layers = {f"layers.{name}.weights": name for name, _ in kept(stack)}
        return Evictions(policy, self.cache, pool, layers)

    @property
    def width(self) -> int:
        head = self.model.spec.head
        if isinstance(head, MultiToken):
            head = head.next
        return head.vocab if isinstance(head, Language) else self.model.spec.trunk.width

    def current(self, model: Transformer) -> bool:
        """Whether it is this model, unchanged, that wrote what is kept."""
        return self.model is model and self.stamp == _stamp(model)

    def bring(self, sequence: int, **given: torch.Tensor) -> None:
        """What a sequence reads beside its tokens, at its first pass: `source`, or `features`."""
        self.brought[sequence] = given

    def read(self, rows: Rows) -> None:
        for sequence in np.unique(rows.sequences).tolist():
            tokens = rows.tokens[rows.sequences == sequence]
            self.bring(sequence, source=torch.tensor([tokens.tolist()], device=self.device))

    def step(self, rows: Rows) -> Floats:
        for part in _parts(rows):
            for pool in self.own:
                pool.extend(part.sequence, part.start, part.start + len(part.tokens))
        return self.run(rows)

    def run(self, rows: Rows) -> Floats:
        if not len(rows.tokens):
            raise RequestError("A step needs at least one row.")
        answers = np.empty((len(rows.wanted), self.width), np.float32)
        self.altered = self.watch() is not None
        for parts in self._batches(_parts(rows)):
            self._pass(parts, answers)
        return answers

    def fork(self, parent: int, child: int) -> None:
        for pool in self.own:
            pool.fork(parent, child)
        self.cache.fork(parent, child)
        if self.evictions is not None:
            self.evictions.fork(parent, child)

    def forget(self, sequence: int, length: int = 0) -> None:
        if self.evictions is not None:
            if length:
                raise CapacityError(f"A cache that gives tokens up cannot go back to {length:,} tokens.")
            self.evictions.forget(sequence)
        self.cache.forget(sequence, length)
        for pool in self.own:
            pool.forget(sequence, length)
        if not length:
            self.brought.pop(sequence, None)

    def bytes_for(self, tokens: int, source: int = 0) -> int:
        spec, size = self.model.spec, self.cache.itemsize
        fixed = spec.cache_bytes(0, bytes_per_value=size, source=source)
        return fixed + sum(blocks(tokens) * pool.bytes for pool in self.own)

    def _batches(self, parts: list[Part]) -> Iterator[list[Part]]:
        """Those of a few rows together, and the long ones: what is padded is little.

        What begins with something beside its tokens goes by itself.
        """
        parts = sorted(parts, key=lambda part: part.sequence)
        alone = [part for part in parts if part.sequence in self.brought]
        others = [part for part in parts if part.sequence not in self.brought]
        yield from ([part] for part in alone)
        few = [part for part in others if len(part.tokens) <= FEW]
        for batch in (few, [part for part in others if len(part.tokens) > FEW]):
            if batch:
                yield batch

    @torch.no_grad()
    def _pass(self, parts: list[Part], answers: Floats) -> None:
        if self.evictions is not None:
            self.evictions.begin(parts)
        longest = max(len(part.tokens) for part in parts)
        tokens = torch.zeros(len(parts), longest, dtype=torch.long)
        present = torch.zeros(len(parts), longest, dtype=torch.bool)
        for row, part in enumerate(parts):  # on the left: the last rows of all stand together
            tokens[row, longest - len(part.tokens) :] = torch.tensor(part.tokens)
            present[row, longest - len(part.tokens) :] = True
        total = torch.tensor([part.total for part in parts], device=self.device)
        sequences, starts = [part.sequence for part in parts], [part.start for part in parts]
        tables = [self._table(pool, sequences) for pool in self.own]
        evicted = [self.own[0].evicted[sequence] for sequence in sequences]
        view = self.cache.call(sequences, starts, tables, evicted)
        last = all(part.wanted in ([], [len(part.tokens) - 1]) for part in parts)
        watched = self.watch()
        tap: Tap = NoTap() if watched is None else watched
        if self.evictions is not None:
            tap = self.evictions.tap(parts, tap)
        logits = self.model(
            tokens.to(self.device),
            layout=Layout.padded(present.to(self.device), total),
            cache=view,
            tap=tap,
            last_only=last,
            **(self.brought.pop(parts[0].sequence) if parts[0].sequence in self.brought else {}),
        )
        if self.evictions is not None:
            for part in parts:
                self.evictions.after(part)
        for row, part in enumerate(parts):
            ends = [at - len(part.tokens) for at in part.wanted]
            if ends:
                answers[part.places] = logits[row, ends].float().cpu().numpy()

    def _table(self, pool: Pool, sequences: list[int]) -> torch.Tensor:
        pool.widen(max(sequences), 0)
        most = max(blocks(int(pool.lengths[sequence])) for sequence in sequences)
        return torch.from_numpy(pool.table[sequences, :most].astype(np.int64)).to(self.device)


def _stamp(model: Transformer) -> tuple[object, ...]:
    """Differs once a parameter was written to, moved or made another type."""
    return tuple((id(p), p._version, p.dtype, p.device) for p in model.parameters())


def _parts(rows: Rows) -> list[Part]:
    ends = [*(np.flatnonzero(np.diff(rows.sequences)) + 1).tolist(), len(rows.tokens)]
    parts, start = [], 0
    wanted = rows.wanted.tolist()
    for end in ends:
        position = int(rows.positions[start])
        total = position + end - start if rows.totals is None else int(rows.totals[start:end].max())
        part = Part(int(rows.sequences[start]), position, rows.tokens[start:end].tolist(), total)
        for place, at in enumerate(wanted):
            if start <= at < end:
                part.wanted.append(at - start)
                part.places.append(place)
        parts.append(part)
        start = end
    return parts


def _groups(stack: Stack) -> tuple[list[Reach], list[list[str]]]:
    """The reaches there are, and the layers of each."""
    found: dict[Reach, list[str]] = {}
    for name, mixer in kept(stack):
        first = mixer.mask.streaming.first if mixer.mask.streaming is not None else 0
        found.setdefault(Reach(mixer.mask.reach, first), []).append(name)
    reaches = ordered(found)
    return reaches, [found.get(reach, []) for reach in reaches]
