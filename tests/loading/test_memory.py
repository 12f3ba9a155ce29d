"""A model that does not fit is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from qkv import loading, memory
from qkv.errors import (
    CapacityError,
)
from qkv.loading import loaded, network, room
from tests.loading.support import refused


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = pristine[1].num_parameters()
    monkeypatch.setattr(room, "free_memory", lambda device: 4 * count)
    loading.load(folder, runtime="torch")
    monkeypatch.setattr(room, "free_memory", lambda device: 4 * count - 1)
    monkeypatch.setattr(network, "to_torch", lambda *given: pytest.fail("read before it was checked"))
    message = refused(folder, CapacityError, runtime="torch")
    assert message == (
        'model needs 0.1 MB of memory as float32, and 0.1 MB is free: load it with dtype="bfloat16", '
        "or choose a smaller model."
    )
    monkeypatch.undo()
    monkeypatch.setattr(room, "free_memory", lambda device: 4 * count - 1)
    loading.load(folder, dtype="bfloat16")


def test_memory_that_runs_out_on_the_way_is_the_same_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(network, "to_torch", full)
    said = "model needs 0.1 MB of memory as float32, and less is free"
    refused(folder, CapacityError, said, runtime="torch")


def test_programs_in_numpy_need_what_float32_takes(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = pristine[1].num_parameters()
    monkeypatch.setattr(room, "free_memory", lambda device: 4 * count)
    loading.load(folder, runtime="numpy")
    monkeypatch.setattr(room, "free_memory", lambda device: 4 * count - 1)
    message = refused(folder, CapacityError, runtime="numpy")
    assert message == (
        "model needs 0.1 MB of memory on the numpy runtime, and 0.1 MB is free: choose a smaller model."
    )

    def full(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(room, "free_memory", lambda device: None)
    monkeypatch.setattr(loaded, "machine", full)
    refused(folder, CapacityError, "0.1 MB of memory on the numpy runtime, and less is free", runtime="numpy")


def test_free_memory_is_a_plausible_figure() -> None:
    free = memory.free_memory()
    assert free is None or 1 << 20 < free < 1 << 50


def test_free_memory_respects_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 62, 1 << 62))
    assert memory._free_to_process() is not None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert memory.free_memory() == 0
