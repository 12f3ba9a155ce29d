"""What passes a batch's tokens through a model, and the cache between the passes: the protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from qkv.engine.answers import Move
from qkv.errors import CapacityError
from qkv.loading import Loaded
from qkv.memory import free_memory
from qkv.spec import Model

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float

    from qkv.nn import Tap

CHUNK = 512  # prompt tokens a pass, of all rows together: bounds memory and lets progress be shown
Progress = Callable[[int, int], None]
Watch = Callable[[], "Tap | None"]  # the tap that reads and replaces what flows now, if there is one


class Runner(Protocol):
    """A batch's tokens in, the logits of each row's last place out: (rows, vocab) fp32."""

    def read(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "rows vocab"]:
        """Prompts of any lengths, a row each."""
        ...

    def begin(
        self, start: int, sources: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "rows vocab"]:
        """What an encoder-decoder reads, a row each, and the token that every answer starts with."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Row i goes on as row rows[i] would have."""
        ...

    def step(self, moves: Sequence[Move | None]) -> Float[np.ndarray, "rows vocab"]:
        """One token in each row, after the row it goes on from. A row that none goes on from is not used
        again; the logits of a row without a move mean nothing."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


def runner(
    loaded: Loaded,
    batch: int,
    rows: int,
    sizes: tuple[int, int],
    watch: Watch,
    features: torch.Tensor | None = None,
) -> Runner:
    """The runner for a batch that has so many rows in the end.

    `sizes` are the tokens and the rows of a source that a row may hold. Where there are features, or
    something is tapped, torch runs. Raises CapacityError where the cache does not fit.
    """
    if loaded.choice.runtime == "torch" or features is not None or watch() is not None:
        from qkv.engine.torch_runner import TorchRunner

        parameter = next(loaded.model.parameters())
        need = row_bytes(loaded.spec, *sizes, parameter.dtype.itemsize)
        check_memory(rows, sizes[0], need, parameter.device)
        return TorchRunner(loaded.model, batch, sizes[0], watch, features)
    from qkv.engine.program_runner import ProgramRunner

    check_memory(rows, sizes[0], loaded.sequences.machine.bytes_for(*sizes))
    return ProgramRunner(loaded.sequences, watch)


def check_memory(rows: int, capacity: int, each: int, device: torch.device | str = "cpu") -> None:
    """Before anything is allocated: a process that takes too much is killed without a word."""
    need, free = rows * each, free_memory(device)
    if free is not None and need > free:
        every = f" in each of {rows:,} rows" if rows > 1 else ""
        raise CapacityError(
            f"A cache of {capacity:,} tokens{every} needs {need / 1e6:,.0f} MB of memory, and "
            f"{free / 1e6:,.0f} MB is free: ask for fewer new tokens, or shorten the prompt."
        )


def row_bytes(spec: Model, capacity: int, source: int, itemsize: int) -> int:
    """What one row keeps: tokens, also those a window layer has left behind; states; the source's keys."""
    fixed = spec.cache_bytes(0, bytes_per_value=itemsize, source=source)
    token = spec.cache_bytes(1, bytes_per_value=itemsize, source=source) - fixed
    return token * capacity + fixed
