"""A text through the torch modules, or through a machine; weights in other formats than the file's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from qkv.checkpoints import StoredTensor, quantise
from qkv.conversion import fitting
from qkv.loading import Parameters
from qkv.runtime import Rows
from qkv.runtime.interpreter import Floats
from qkv.runtime.lower import Lowered
from qkv.runtime.machine import Machine
from qkv.runtime.program import ExpertLinear, Linear, TakeRows
from qkv.verification.report import PIECE
from qkv.verification.text import Text

if TYPE_CHECKING:
    from qkv.nn import Transformer

BUDGET = 1 << 28  # bytes of logits that are made at once


def piece_size(width: int) -> int:
    """How many answers of so many numbers are made at once."""
    return max(1, min(PIECE, BUDGET // (4 * width)))


def in_pieces(machine: Machine, text: Text, sequence: int = 0) -> Iterator[Floats]:
    """The answers of all places in order. Where places see later ones, all is read again for each piece."""
    begin(machine, text, sequence)
    count, budget = len(text.tokens), max(1, BUDGET // (4 * machine.width))
    size = piece_size(machine.width) if text.causal else budget
    for start in range(0, count, size):
        piece = range(start, min(start + size, count))
        if text.causal:
            yield machine.step(Rows.of(text.tokens[start : piece.stop], start, sequence))
        else:
            machine.forget(sequence)
            yield machine.step(Rows.of(text.tokens, 0, sequence, list(piece)))
    machine.forget(sequence)


def begin(machine: Machine, text: Text, sequence: int) -> None:
    """A sequence that holds nothing but what it reads of an encoder."""
    machine.forget(sequence)
    if text.source is not None:
        machine.read(Rows.of(text.source, sequence=sequence, wanted=[]))


class Changed(Mapping[str, StoredTensor]):
    """Weights in another form, made when they are asked for. Packing asks several times: `kept` are held."""

    def __init__(
        self,
        weights: Mapping[str, StoredTensor],
        change: Callable[[str, StoredTensor], StoredTensor],
        kept: int | None,
    ):
        self.weights = weights
        self.made = lru_cache(kept)(lambda name: change(name, weights[name]))

    def __getitem__(self, name: str) -> StoredTensor:
        return self.made(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


def decoded(name: str, stored: StoredTensor) -> StoredTensor:
    """The same values as fp32."""
    return StoredTensor.from_array(name, stored.decode().astype(np.float32, copy=False))


def quantised(lowered: Lowered, weights: Parameters, format: str) -> tuple[Changed, tuple[str, ...]]:
    """The weights with the matrices that rows are multiplied by, and the token tables, in a format.

    And the formats that came of it, as blocks do not fit every row: that of most weights first.
    """
    chosen, sizes = _matrices(lowered), dict[str, int]()
    for name in chosen:
        kind = fitting(format, weights.shapes[name][-1])
        sizes[kind] = sizes.get(kind, 0) + prod(weights.shapes[name])

    def change(name: str, stored: StoredTensor) -> StoredTensor:
        if name not in chosen:
            return stored
        return quantise(name, decoded(name, stored).decode(), fitting(format, stored.shape[-1]))

    return Changed(weights, change, None), tuple(sorted(sizes, key=lambda kind: -sizes[kind]))


def _matrices(lowered: Lowered) -> set[str]:
    """Not routers, positions or biases: these are few, and every one counts."""
    programs = [program for program in (lowered.main, lowered.source) if program is not None]
    found = set[str]()
    for operation in (operation for program in programs for operation in program.operations):
        if isinstance(operation, Linear | ExpertLinear):
            found |= set(operation.matrices)
        elif isinstance(operation, TakeRows) and operation.by == "token":
            found.add(operation.table)
    return found


def through_torch(network: Transformer, text: Text) -> Iterator[Floats]:
    """The answers of the modules: in pieces through a cache, where places see no later ones."""
    import torch

    from qkv.nn import ContiguousCache, Layout

    tokens = torch.tensor([text.tokens])
    source = None if text.source is None else torch.tensor([text.source])
    with torch.no_grad():
        if not text.causal:
            answers = network(tokens, source)
            yield answers.reshape(-1, answers.shape[-1]).numpy()
            return
        count = len(text.tokens)
        cache, total = ContiguousCache(network.spec.trunk, 1, count), torch.tensor([count])
        for start in range(0, count, PIECE):
            piece = tokens[:, start : start + PIECE]
            layout = Layout.padded(torch.ones_like(piece), total)
            yield network(piece, None if start else source, layout=layout, cache=cache)[0].numpy()


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many of the processor's for a while; None leaves them as they are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
