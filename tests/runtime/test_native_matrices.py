"""Matrices keep the file's values bit by bit; products round their rows as stated, and nothing else."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from qkv.checkpoints import StoredTensor, quantise
from qkv.errors import UnsupportedError
from qkv.runtime import program as op
from qkv.runtime.assembly import FORMATS_KEPT
from qkv.runtime.built import NAME
from qkv.runtime.interpreter import Rows
from qkv.runtime.lower import Lowered
from qkv.runtime.native import Native
from tests.runtime.native_models import (
    KEPT,
    SETS,
    bf16,
    farthest,
    in_bytes,
    needs_native,
    random_bytes,
)

pytestmark = needs_native
SHAPES = [(1, 256), (31, 512), (33, 256), (70, 768)]
ODD = [(5, 1), (33, 7), (40, 45)]  # columns of plain formats are any


def module() -> ModuleType:
    return import_module(NAME)


def packed(format: str, columns: int, parts: list[tuple[np.ndarray, int]], paired: bool = False) -> Any:
    return module().matrix(module().Arena(), format, columns, parts, paired)


def dequantised(stored: StoredTensor) -> np.ndarray:
    """What the gguf package makes of the same bytes."""
    kind = gguf.GGMLQuantizationType[stored.format]
    return gguf.quants.dequantize(stored.data.reshape(stored.shape[0], -1), kind).astype(np.float32)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def test_these_are_all_formats() -> None:
    assert FORMATS_KEPT == KEPT


@pytest.mark.parametrize("format", KEPT)
def test_rows_are_those_of_the_file_bit_by_bit(format: str) -> None:
    for seed, shape in enumerate(SHAPES + (ODD if format in ("F32", "F16", "BF16") else [])):
        gaussian = quantise("x", np.random.default_rng(seed).standard_normal(shape, np.float32), format)
        for stored in (random_bytes(format, shape, seed), gaussian):
            matrix = packed(format, shape[1], [(stored.data, shape[0])])
            assert (matrix.rows, matrix.columns) == shape
            rows = np.stack([matrix.row(i) for i in range(shape[0])])
            assert np.array_equal(bits(rows), bits(dequantised(stored)))


@pytest.mark.parametrize("format", KEPT)
@pytest.mark.parametrize("rows", [1, 16, 41])
def test_a_gate_and_its_partner_stand_16_rows_in_turn(format: str, rows: int) -> None:
    parts = [random_bytes(format, (rows, 256), seed) for seed in (1, 2)]
    matrix = packed(format, 256, [(part.data, rows) for part in parts], True)
    assert matrix.rows == 2 * -(-rows // 16) * 16
    values = [bits(dequantised(part)) for part in parts]
    for row in range(matrix.rows):
        which, place = row // 16 % 2, row // 32 * 16 + row % 16
        if place < rows:
            assert np.array_equal(bits(matrix.row(row)), values[which][place])
        else:
            assert not matrix.row(row).any()


@pytest.mark.parametrize("format", KEPT)
def test_several_matrices_stand_below_each_other(format: str) -> None:
    parts = [random_bytes(format, (rows, 256), rows) for rows in (5, 40, 20)]
    matrix = packed(format, 256, [(part.data, part.shape[0]) for part in parts])
    rows = np.stack([matrix.row(i) for i in range(65)])
    assert np.array_equal(bits(rows), bits(np.concatenate([dequantised(part) for part in parts])))


def test_what_does_not_fit_is_refused() -> None:
    data = np.zeros(18 * 8, np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        packed("Q4_0", 64, [(data, 5)])
    with pytest.raises(ValueError, match="whole blocks"):
        packed("Q4_0", 40, [(data[:18], 1)])
    with pytest.raises(ValueError, match="no weight format Q2_K"):
        packed("Q2_K", 256, [(data, 1)])
    with pytest.raises(ValueError, match="of one size"):
        packed("Q4_0", 64, [(data[:36], 1), (data[:72], 2)], True)
    with pytest.raises(IndexError):
        packed("Q4_0", 64, [(data, 4)]).row(4)


COLUMNS, OUT, MOST = 512, 37, 40
COUNTS = (*range(1, 15), MOST)
SPANS = {
    name: op.Span("out", place * OUT, OUT) for place, name in enumerate(("plain", "other", "added", "gated"))
}


def products() -> Lowered:
    """Rows of a table times matrices: with biases, added to what was there, gated, of two formats at once."""
    x, picked = op.Span("x", 0, COLUMNS), op.Span("picked", 0, COLUMNS)
    both = op.Span("out", 0, 2 * OUT)
    operations = (
        op.TakeRows(x, "table"),
        op.Pick((picked,), (x,)),
        op.Linear(both, picked, ("first", "plain"), ("bias", None)),
        op.Linear(SPANS["added"], picked, ("second",)),
        op.Linear(SPANS["added"], picked, ("first",), ("bias",), add=True, scale=-0.75),
        op.Linear(SPANS["gated"], picked, ("first", "second"), (None, "bias"), gate="silu"),
    )
    buffers = {"x": COLUMNS, "picked": COLUMNS, "out": 4 * OUT}
    return Lowered(op.Program(operations, op.Span("out", 0, 4 * OUT), buffers, {}))


@cache
def matrices(format: str) -> dict[str, StoredTensor]:
    rng = np.random.default_rng(5)
    table = (
        rng.standard_normal((MOST, COLUMNS), np.float32)
        * np.geomspace(0.01, 100, MOST, dtype=np.float32)[:, None]
    )
    table[2, 64:128] = 0  # groups that are all 0 have no step
    given = {
        name: rng.standard_normal((OUT, COLUMNS), np.float32) / 16 for name in ("first", "second", "plain")
    }
    kept = {name: quantise(name, values, format) for name, values in given.items() if name != "plain"}
    plain = {"table": table, "bias": rng.standard_normal(OUT, np.float32), "plain": given["plain"]}
    return kept | {name: StoredTensor.from_array(name, values) for name, values in plain.items()}


def expected(format: str) -> dict[str, np.ndarray]:
    """In float64: rows in bytes by groups of 32 where weights are quantised, in bfloat16 where they are."""
    given = {name: stored.decode().astype(np.float64) for name, stored in matrices(format).items()}
    x = given["table"].astype(np.float32)
    exact = format in ("F32", "F16")
    rounded = (x if exact else bf16(x) if format == "BF16" else in_bytes(x, 32)).astype(np.float64)
    first, second = rounded @ given["first"].T, rounded @ given["second"].T
    return {
        "plain": first + given["bias"],
        "other": x.astype(np.float64) @ given["plain"].T,
        "added": second - 0.75 * (first + given["bias"]),
        "gated": first / (1 + np.exp(-first)) * (second + given["bias"]),
    }


@pytest.mark.parametrize("set_", SETS)
@pytest.mark.parametrize("format", KEPT)
def test_products_round_their_rows_as_stated_and_nothing_else(format: str, set_: str) -> None:
    machine = Native(products(), matrices(format), threads=2, instruction_set=set_)
    answers: dict[int, np.ndarray] = {}
    for count in COUNTS:
        answers[count] = machine.step(Rows.of(list(range(MOST)), wanted=list(range(count))))
        machine.forget(0)
    for name, values in expected(format).items():
        span = SPANS[name]
        found = answers[MOST][:, span.start : span.start + OUT]
        for row in range(MOST):  # each by itself: their sizes differ by four orders
            assert farthest(found[row], values[row]) < 2e-6, (name, row)
    for count in COUNTS:
        assert np.array_equal(answers[count], answers[MOST][:count]), count


def test_a_gate_of_two_formats_is_refused() -> None:
    mixed = matrices("Q8_0") | {"second": matrices("Q4_0")["second"]}
    with pytest.raises(UnsupportedError, match="first and its partner are stored in different formats"):
        Native(products(), mixed, threads=1)
