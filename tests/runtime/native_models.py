"""Small models and programs for the native runtime's tests, with weights in any format it keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module

import numpy as np
import pytest

from qkv.checkpoints import FORMATS, StoredTensor, quantise
from qkv.nn import Transformer
from qkv.runtime.built import NAME, missing
from qkv.runtime.interpreter import Rows
from qkv.spec import Model
from tests.support import random_model

BUILT = missing() is None
# where the runtime has to be here, its tests run, and fail without it
needs_native = pytest.mark.skipif(
    not BUILT and os.environ.get("QKV_REQUIRE_NATIVE") != "1", reason="the native runtime is not built"
)
SETS: tuple[str, ...] = tuple(import_module(NAME).instruction_sets()) if BUILT else ("missing",)
KEPT = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

# the bytes of a block at which float16 scales and minima stand
SCALES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
PLAIN = {"F32": (np.uint32, 0x7F800000), "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80)}


def random_bytes(format: str, shape: tuple[int, int], seed: int = 0) -> StoredTensor:
    """A matrix of random bytes whose numbers, or scales, are finite."""
    kind = FORMATS[format]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (shape[0] * shape[1] // kind.block, kind.size), np.uint8)
    if format in PLAIN:
        data[:] = _finite(data, *PLAIN[format])
    for at in () if format in PLAIN else SCALES.get(format, (0,)):
        data[:, at : at + 2] = _finite(data[:, at : at + 2].copy(), *PLAIN["F16"])
    return StoredTensor(format, shape, format, data.reshape(-1))


def _finite(data: np.ndarray, word: type[np.unsignedinteger], exponent: int) -> np.ndarray:
    """Words whose exponent says infinity or no number lose its highest bit."""
    bits = data.view(word)
    highest = word(exponent & ~(exponent >> 1))
    return np.where(bits & word(exponent) == exponent, bits & ~highest, bits).view(np.uint8)


def stored(network: Transformer, format: str = "F32") -> dict[str, StoredTensor]:
    """The weights by name: matrices in a format, where its blocks fit their rows, the rest in fp32."""
    found = {}
    for name, parameter in network.named_parameters():
        values = parameter.detach().numpy()
        fits = values.ndim > 1 and values.shape[-1] % FORMATS[format].block == 0
        found[name] = quantise(name, values, format if fits else "F32")
    return found


@cache
def network(spec: Model, std: float = 0.3) -> Transformer:
    return random_model(spec, std=std)


@cache
def weights(spec: Model, format: str = "F32", std: float = 0.3) -> Mapping[str, StoredTensor]:
    return stored(network(spec, std), format)


def changed(given: Mapping[str, StoredTensor], name: str, row: int, value: float) -> dict[str, StoredTensor]:
    """Weights of which one row of one matrix, of every expert's where there are experts, is `value`."""
    values = given[name].decode().astype(np.float32).copy()
    values[..., row, :] = value
    return {**given, name: StoredTensor.from_array(name, values)}


def tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, vocab, count).tolist()
    return found


def typed(given: list[int], types: list[int]) -> Rows:
    rows = Rows.of(given)
    return Rows(rows.tokens, rows.sequences, rows.positions, rows.wanted, np.asarray(types))


def farthest(a: np.ndarray, b: np.ndarray) -> float:
    """max|a - b| / max|b|."""
    return float(np.abs(a.astype(np.float64) - b).max() / np.abs(b).max())


def bf16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, of two the even one, by the bits of finite fp32 numbers."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    near = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return near.astype(np.uint32).view(np.float32)


def in_bytes(x: np.ndarray, group: int) -> np.ndarray:
    """Each run of `group` numbers in steps of its largest magnitude over 127, as fp32 computes them."""
    runs = np.asarray(x, np.float32).reshape(-1, group)
    most = np.abs(runs).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    codes = np.rint(runs * inverse).astype(np.float64)
    return (codes * (most / np.float32(127))).reshape(x.shape)
