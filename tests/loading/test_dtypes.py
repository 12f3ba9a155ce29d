"""The type parameters have: the file's, or the one asked for (cases.md K10)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv import loading
from qkv.checkpoints import Gguf, StoredTensor, read_gguf
from qkv.errors import (
    CheckpointError,
    RequestError,
    UnsupportedError,
)
from qkv.loading import files
from qkv.loading.loaded import dtype_of
from qkv.loading.network import to_torch
from tests.families.models import saved, tokens
from tests.loading.support import edit_weights, refused, write_gguf
from tests.support import assert_close


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_parameters_follow_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = saved(tmp_path, dtype=dtype)
    model = loading.load(tmp_path).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.decoder.embedding.weight, theirs.model.embed_tokens.weight)
    assert model(tokens()).dtype == dtype


def test_the_type_asked_for_wins(folder: Path) -> None:
    for dtype, wanted in (
        ("bfloat16", torch.bfloat16),
        (torch.float16, torch.float16),
        ("half", torch.float16),
    ):
        model = loading.load(folder, dtype=dtype).model
        assert {parameter.dtype for parameter in model.parameters()} == {wanted}


def test_quantised_weights_become_float32(smollm2_file: Path) -> None:
    tensors = read_gguf(smollm2_file).tensors
    assert dtype_of(None, tensors) == "float32"
    assert dtype_of("bfloat16", tensors) == dtype_of(torch.bfloat16, tensors) == "bfloat16"


@pytest.mark.parametrize(("short", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_short_names_of_types(folder: Path, short: str, dtype: torch.dtype) -> None:
    assert next(loading.load(folder, dtype=short).model.parameters()).dtype == dtype


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "fp8", "load", torch.int32, torch.complex64])
def test_other_types_are_refused(folder: Path, dtype: Any) -> None:
    refused(folder, RequestError, "is not known (float32, bfloat16, float16, float64)", dtype=dtype)


def test_a_device_that_is_not_there_is_refused(folder: Path) -> None:
    refused(folder, RequestError, "device 'abacus' cannot be used here", device="abacus")


def test_a_float32_module_inside_a_half_model_runs_and_returns_half(tmp_path: Path) -> None:
    saved(tmp_path, dtype=torch.float16)
    model = loading.load(tmp_path).model
    whole = model(tokens())
    model.decoder.layers[1].feed_forward.float()
    mixed = model(tokens())
    assert mixed.dtype == torch.float16
    assert_close(mixed, whole, 5e-3)


def test_values_that_float16_cannot_hold_are_not_made_infinite(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    refused(folder, CheckpointError, "model.norm.weight holds values that float16 cannot", dtype="float16")
    assert float(loading.load(folder, dtype="bfloat16").model.decoder.norm.weight[0]) == 99840.0


def test_a_block_format_that_cannot_be_decoded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(path: Path) -> Gguf:
        file = read_gguf(path)
        blocks = np.zeros(2 * 18, np.uint8)
        file.tensors["blk.0.ffn_up.weight"] = StoredTensor("blk.0.ffn_up.weight", (8, 8), "IQ4_NL", blocks)
        return file

    monkeypatch.setattr(files, "read_gguf", other)
    refused(write_gguf(tmp_path / "model.gguf"), UnsupportedError, "blk.0.ffn_up.weight is stored as IQ4_NL")


def test_a_tensor_shares_no_memory_that_others_have_or_that_it_does_not_need() -> None:
    whole = np.zeros((4, 3), np.float32)
    part, all_of_it = to_torch(whole[:2]), to_torch(whole)
    whole[0, 0] = 7
    assert part[0, 0] == 0 and part.shape == (2, 3)
    assert all_of_it[0, 0] == 7  # nothing was copied
    whole.flags.writeable = False  # as a file that is mapped
    assert to_torch(whole).untyped_storage().data_ptr() != whole.ctypes.data
    bits = np.array([[0x3F80, 0xBFC0]], np.uint16)
    assert to_torch(bits, bits=True).tolist() == [[1.0, -1.5]]
