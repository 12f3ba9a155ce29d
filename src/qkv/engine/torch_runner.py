"""The reference model as a runner: padded rows, one contiguous cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from qkv.engine import runner
from qkv.engine.answers import Move
from qkv.engine.runner import Progress, Watch
from qkv.nn import ContiguousCache, Layout, NoTap, Transformer


class TorchRunner:
    """See `Runner`. `features` are read with the prompts, all at once; the tap is asked for at every pass."""

    def __init__(
        self,
        model: Transformer,
        batch: int,
        capacity: int,
        watch: Watch,
        features: torch.Tensor | None = None,
    ):
        self.model, self.watch, self.features = model, watch, features
        parameter = next(model.parameters())
        self.device = parameter.device
        self.cache = ContiguousCache(model.spec.trunk, batch, capacity, parameter.dtype, self.device)

    def read(
        self, prompts: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "batch vocab"]:
        """Padded on the left: in chunks, or all at once with what is beside."""
        tokens, present = padded(prompts, self.device)
        longest = tokens.shape[1]
        size = max(runner.CHUNK // len(prompts), 1) if self.features is None else longest
        for at in range(0, longest, size):
            piece = slice(at, at + size)
            layout = Layout.padded(present[:, piece], present.sum(-1))
            logits = self.run(tokens[:, piece], layout, features=self.features)
            if progress is not None:
                progress(min(at + size, longest), longest)
        return logits

    def begin(
        self, start: int, sources: Sequence[Sequence[int]], progress: Progress | None = None
    ) -> Float[np.ndarray, "batch vocab"]:
        """The sources in one pass, as each place sees all others."""
        source, present = padded(sources, self.device)
        first = torch.full((len(sources), 1), start, device=self.device)
        logits = self.run(
            first, Layout.unpadded(len(sources), 1, self.device), source, Layout.padded(present)
        )
        if progress is not None:
            progress(source.shape[1], source.shape[1])
        return logits

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(torch.tensor(rows, device=self.device))

    def step(self, moves: Sequence[Move | None]) -> Float[np.ndarray, "rows vocab"]:
        """No move is a token that is not there."""
        rows = [row if move is None else move[0] for row, move in enumerate(moves)]
        if rows != list(range(len(rows))):
            self.select(rows)
        tokens = torch.tensor([[0 if move is None else move[1]] for move in moves])
        present = torch.tensor([[move is not None] for move in moves], device=self.device)
        return self.run(tokens.to(self.device), Layout.padded(present))

    def close(self) -> None:
        del self.cache

    @torch.no_grad()
    def run(
        self,
        tokens: torch.Tensor,
        layout: Layout,
        source: torch.Tensor | None = None,
        source_layout: Layout | None = None,
        features: torch.Tensor | None = None,
    ) -> Float[np.ndarray, "batch vocab"]:
        tap = self.watch()
        logits = self.model(
            tokens,
            source=source,
            features=features,
            layout=layout,
            source_layout=source_layout,
            cache=self.cache,
            tap=NoTap() if tap is None else tap,
            last_only=True,
        )
        return logits[:, -1].float().cpu().numpy()


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as one batch, padded on the left, and where a token is."""
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    return torch.tensor(rows, device=device), torch.arange(longest, device=device) >= longest - lengths
