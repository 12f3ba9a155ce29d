"""Passes of a batch through the model, and the cache between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float

from qkv.engine.answers import Move
from qkv.errors import CapacityError
from qkv.memory import free_memory
from qkv.nn import ContiguousCache, Layout, Tap, Transformer
from qkv.spec import Model

CHUNK = 512  # prompt tokens a pass, of all rows together: bounds memory and lets progress be shown
Progress = Callable[[int, int], None]


class Runner:
    """A batch's tokens in, the logits of each row's last place out: (rows, vocab) fp32."""

    def __init__(self, model: Transformer, batch: int, capacity: int, tap: Callable[[], Tap]):
        self.model, self.tap = model, tap
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = ContiguousCache(model.spec.trunk, batch, capacity, parameter.dtype, self.device)

    def read(
        self,
        prompts: Sequence[Sequence[int]],
        progress: Progress | None = None,
        features: torch.Tensor | None = None,
    ) -> Float[np.ndarray, "batch vocab"]:
        """Prompts of any lengths, padded on the left: in chunks, or all at once with what is beside."""
        tokens, present = padded(prompts, self.device)
        longest = tokens.shape[1]
        size = max(CHUNK // len(prompts), 1) if features is None else longest
        for at in range(0, longest, size):
            piece = slice(at, at + size)
            layout = Layout.padded(present[:, piece], present.sum(-1))
            logits = self.run(tokens[:, piece], layout, features=features)
            if progress is not None:
                progress(min(at + size, longest), longest)
        return logits

    def begin(
        self, start: int, sources: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "batch vocab"]:
        """An encoder-decoder's sources in one pass, as each place sees all others, and the start."""
        source, present = padded(sources, self.device)
        first = torch.full((len(sources), 1), start, device=self.device)
        logits = self.run(
            first, Layout.unpadded(len(sources), 1, self.device), source, Layout.padded(present)
        )
        if progress is not None:
            progress(source.shape[1], source.shape[1])
        return logits

    def select(self, rows: Sequence[int]) -> None:
        """Row i goes on as row rows[i] would have."""
        self.cache.select(torch.tensor(rows, device=self.device))

    def step(self, moves: Sequence[Move | None]) -> Float[np.ndarray, "rows vocab"]:
        """One token in each row, after the row it goes on from; no move is a token that is not there."""
        rows = [row if move is None else move[0] for row, move in enumerate(moves)]
        if rows != list(range(len(rows))):
            self.select(rows)
        tokens = torch.tensor([[0 if move is None else move[1]] for move in moves])
        present = torch.tensor([[move is not None] for move in moves], device=self.device)
        return self.run(tokens.to(self.device), Layout.padded(present))

    @torch.no_grad()
    def run(
        self,
        tokens: torch.Tensor,
        layout: Layout,
        source: torch.Tensor | None = None,
        source_layout: Layout | None = None,
        features: torch.Tensor | None = None,
    ) -> Float[np.ndarray, "batch vocab"]:
        logits = self.model(
            tokens,
            source=source,
            features=features,
            layout=layout,
            source_layout=source_layout,
            cache=self.cache,
            tap=self.tap(),
            last_only=True,
        )
        return logits[:, -1].float().cpu().numpy()


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as one batch, padded on the left, and where a token is."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    return torch.tensor(rows, device=device), torch.arange(longest, device=device) >= longest - lengths


def check_memory(model: Transformer, rows: int, capacity: int, source: int = 0) -> None:
    """Before anything is allocated: a process that takes too much is killed without a word."""
    parameter = next(model.parameters())
    need = rows * row_bytes(model.spec, capacity, source, parameter.dtype.itemsize)
    free = free_memory(parameter.device)
    if free is not None and need > free:
        each = f" in each of {rows:,} rows" if rows > 1 else ""
        raise CapacityError(
            f"A cache of {capacity:,} tokens{each} needs {need / 1e6:,.0f} MB of memory, and "
            f"{free / 1e6:,.0f} MB is free: ask for fewer new tokens, or shorten the prompt."
        )


def row_bytes(spec: Model, capacity: int, source: int, itemsize: int) -> int:
    """What one row keeps: tokens, also those a window layer has left behind; states; the source's keys."""
    fixed = spec.cache_bytes(0, bytes_per_value=itemsize, source=source)
    token = spec.cache_bytes(1, bytes_per_value=itemsize, source=source) - fixed
    return token * capacity + fixed
