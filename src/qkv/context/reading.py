"""A machine that reads long texts: losses of every token, and what it would say next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from qkv.loading import Loaded
from qkv.runtime import Rows
from qkv.runtime.choice import choose
from qkv.runtime.machine import Machine
from qkv.spec import Model

PIECE = 512
SEQUENCE = 0


@dataclass
class Reader:
    """Reads one text at a time, from its beginning."""

    machine: Machine

    def losses(self, tokens: Sequence[int]) -> NDArray[np.float64]:
        """-ln p of each token but the first, given all before it: (tokens - 1,), nats."""
        self.machine.forget(SEQUENCE)
        found = []
        for start in range(0, len(tokens) - 1, PIECE):
            end = min(start + PIECE, len(tokens) - 1)
            logits = self._run(tokens[start:end], start, list(range(end - start)))
            told = self.machine.summaries
            total = np.asarray(told.log_sum if told is not None else _log_sum(logits), np.float64)
            right = logits[np.arange(end - start), list(tokens[start + 1 : end + 1])]
            found.append(total - right.astype(np.float64))
        self.machine.forget(SEQUENCE)
        return np.concatenate(found)

    def said(self, tokens: Sequence[int], count: int) -> list[int]:
        """The likeliest `count` tokens after these, one by one."""
        self.machine.forget(SEQUENCE)
        logits = None
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            last = start + len(piece) == len(tokens)
            logits = self._run(piece, start, [len(piece) - 1] if last else [])
        found: list[int] = []
        while logits is not None and len(found) < count:
            found.append(int(logits[0].argmax()))
            logits = self._run(found[-1:], len(tokens) + len(found) - 1, [0])
        self.machine.forget(SEQUENCE)
        return found

    def _run(self, tokens: Sequence[int], start: int, wanted: list[int]) -> NDArray[np.float32]:
        for pool in self.machine.own:
            pool.extend(SEQUENCE, start, start + len(tokens))
        answers = self.machine.run(Rows.of(list(tokens), start=start, sequence=SEQUENCE, wanted=wanted))
        for pool in self.machine.own:
            pool.hand_back(SEQUENCE, start + len(tokens))
        return answers


def _log_sum(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    top = wide.max(-1)
    found: NDArray[np.float64] = top + np.log(np.exp(wide - top[:, None]).sum(-1))
    return found


def machine_of(loaded: Loaded) -> Machine:
    """What runs a loaded model: its runtime's own machine, or torch's."""
    if loaded.choice.runtime != "torch":
        return loaded.machine
    module = import_module("qkv.runtime.torch_machine")
    machine: Machine = module.TorchMachine(loaded.model)
    return machine


def reader_of(loaded: Loaded, model: Model) -> Reader:
    """Reads with a loaded model's weights, described in another way."""
    files = replace(loaded.files, description=replace(loaded.description, model=model))
    return Reader(machine_of(Loaded(files, choose(None, model), loaded.dtype, threads=loaded.threads)))
