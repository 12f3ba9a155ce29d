"""Decoders of random weights that the runtime is measured with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qkv.checkpoints import StoredTensor
from qkv.checkpoints.quantisers import quantise
from qkv.spec import Attention, Gated, Language, Model, RMSNorm, Rotary, Stack, Tokens, pre_norm


@dataclass(frozen=True)
class Shape:
    """A decoder of so many layers alike."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    head_dim: int = 64

    @property
    def model(self) -> Model:
        attention = Attention(self.heads, self.kv_heads, self.head_dim, position=Rotary())
        layer = pre_norm(attention, Gated("silu", self.hidden), norm=RMSNorm())
        return Model(
            decoder=Stack(Tokens(64, self.width), (layer,) * self.layers, RMSNorm()), head=Language(64)
        )


NARROW, WIDE = Shape(24, 768, 12, 4, 2048), Shape(4, 2048, 16, 4, 5632, 128)
SMALL, SMALL_FORMAT = Shape(16, 128, 2, 1, 256), "Q8_0"  # its weights fit the caches of the cores themselves


class Random(Mapping[str, StoredTensor]):
    """Random weights of a description in one format; layers share theirs until they are packed."""

    def __init__(self, model: Model, format: str):
        self.shapes = {name: tensor.shape for name, tensor in model.weights().items()}
        self.format, self.made = format, dict[tuple[int, ...], StoredTensor]()

    def __getitem__(self, name: str) -> StoredTensor:
        shape = self.shapes[name]
        if shape not in self.made:
            values = np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32)
            plain = len(shape) < 2
            self.made[shape] = (
                StoredTensor.from_array(name, 1 + values) if plain else quantise(name, values, self.format)
            )
        return self.made[shape]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
