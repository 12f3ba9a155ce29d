"""Every tensor is used or known not to matter, and has the shape its configuration makes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from qkv import loading
from qkv.errors import (
    CheckpointError,
)
from tests.families.models import saved
from tests.loading.support import edit_config, edit_weights, expected, logits, refused
from tests.support import assert_close


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = refused(folder, CheckpointError)
    assert message == "model lacks model.layers.1.mlp.up_proj.weight, which its configuration calls for."


def test_an_untied_model_without_an_output_matrix_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, CheckpointError, "lacks lm_head.weight")


def test_an_extra_tensor_is_named_and_may_be_ignored(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    edit_weights(folder, lambda t: t.update({"extra.a": torch.ones(2), "extra.b[0]": torch.ones(2)}))
    refused(folder, CheckpointError, "holds extra.a, which", 'Pass ignore=("extra.a",) to load without it.')
    refused(folder, CheckpointError, "holds extra.b[0]", ignore=("extra.a",))
    for ignore in (("extra.a", "extra.b[0]"), ("extra.*",), ["*a", "extra.b*"]):
        assert_close(logits(folder, ignore=ignore), expected(pristine[1]))


def test_stored_rotary_frequencies_are_no_parameters(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    names = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)] + [
        "model.rotary_emb.inv_freq"
    ]
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(4) for name in names}))
    assert_close(logits(folder), expected(pristine[1]))


def test_tied_heads_are_one_tensor_whether_saved_once_or_twice(tmp_path: Path) -> None:
    theirs = saved(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    once = loading.load(tmp_path).model
    assert once.head.weight is once.decoder.embedding.weight
    assert_close(logits(tmp_path), expected(theirs))

    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_close(logits(tmp_path), expected(theirs))

    edit_weights(tmp_path, lambda tensors: tensors["lm_head.weight"][3].mul_(2))
    refused(tmp_path, CheckpointError, "holds lm_head.weight, which differs from model.embed_tokens.weight")
    assert_close(logits(tmp_path, ignore=("lm_head.weight",)), expected(theirs))

    edit_weights(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:5].clone()}))
    refused(tmp_path, CheckpointError, "which differs from model.embed_tokens.weight")


def test_k1_a_tied_head_multiplies_by_the_table(tmp_path: Path) -> None:
    """cases.md K1: E = [[1,0],[0,1],[1,1],[2,-1]] and h = [1,2] give [1,2,3,0]."""
    saved(tmp_path, tie_word_embeddings=True, vocab_size=4, hidden_size=2, num_attention_heads=1,
          num_key_value_heads=1, num_hidden_layers=1)  # fmt: skip
    table = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, -1]])
    edit_weights(tmp_path, lambda tensors: tensors.update({"model.embed_tokens.weight": table}))
    assert loading.load(tmp_path).model.head(torch.tensor([1.0, 2])).tolist() == [1, 2, 3, 0]


def test_another_shape_is_named_with_both(folder: Path) -> None:
    edit_config(folder, intermediate_size=48)
    message = refused(folder, CheckpointError)
    assert message == (
        "model: model.layers.0.mlp.gate_proj.weight has shape (64, 32); the configuration makes it (48, 32)."
    )


def test_a_tensor_without_values_is_another_shape(folder: Path) -> None:
    edit_weights(folder, lambda t: t.update({"model.norm.weight": torch.ones(0)}))
    refused(folder, CheckpointError, "model.norm.weight has shape (0,); the configuration makes it (32,)")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
def test_weights_that_are_no_floats_are_refused(folder: Path, dtype: torch.dtype) -> None:
    edit_weights(folder, lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(dtype)}))
    refused(folder, CheckpointError, "model.norm.weight is stored as", "must be a floating-point number")


def test_a_configuration_alone_asks_for_no_memory(folder: Path) -> None:
    edit_config(folder, hidden_size=1 << 24, num_attention_heads=1 << 20, num_hidden_layers=4096)
    refused(folder, CheckpointError, "lacks model.layers.2.")
