"""Weight files: whole, in shards, damaged, or of another kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qkv.errors import (
    CheckpointError,
    SourceError,
)
from tests.families.models import saved
from tests.loading.support import expected, logits, refused, write_gguf
from tests.support import assert_close


def test_a_sharded_folder_equals_a_single_file(
    tmp_path: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    saved(tmp_path, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path), logits(pristine[0]))
    assert torch.equal(logits(tmp_path / "model.safetensors.index.json"), logits(pristine[0]))


def test_k3_an_absent_shard_and_a_stray_tensor_are_named(tmp_path: Path) -> None:
    saved(tmp_path, shard="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.unlink()
    refused(tmp_path, CheckpointError, f"names {shard.name}, which is not in", "may be incomplete")
    shard.write_bytes(whole)
    save_file({**load_file(shard), "stray": torch.ones(1)}, shard)
    refused(tmp_path, CheckpointError, f"{shard.name} holds tensor stray, which")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(folder: Path, tmp_path: Path, keep: int) -> None:
    for path in (folder / "model.safetensors", write_gguf(tmp_path / "model.gguf")):
        path.write_bytes(path.read_bytes()[:keep])
        refused(path, CheckpointError, path.name)


def test_pickles_are_refused(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for source in (folder, folder / "pytorch_model.bin"):
        refused(
            source, CheckpointError, "pytorch_model.bin is a pickle, and loading one runs any code it carries"
        )


def test_a_weight_file_of_another_name_can_be_pointed_at(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    (folder / "model.safetensors").rename(folder / "ema.safetensors")
    refused(folder, SourceError, "pass the path of ema.safetensors if that is the model")
    assert_close(logits(folder / "ema.safetensors"), expected(pristine[1]))
