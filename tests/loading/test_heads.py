"""The architecture decides which head a model has, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from qkv import loading
from qkv.errors import (
    CheckpointError,
    ConfigError,
)
from qkv.spec import Language
from tests.families.models import tokens
from tests.loading.support import edit_config, expected, logits, refused
from tests.support import assert_close


def test_a_bare_model_gives_the_hidden_states_of_transformers(
    tmp_path: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    theirs = pristine[1].model
    theirs.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    loaded = loading.load(tmp_path)
    assert loaded.model.spec.head is None
    with torch.no_grad():
        assert_close(loaded.model(tokens()), theirs(tokens()).last_hidden_state)


def test_the_architecture_decides_about_the_head(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    assert isinstance(loading.load(folder).model.spec.head, Language)
    edit_config(folder, architectures=["LlamaModel"])
    refused(folder, CheckpointError, "holds lm_head.weight")
    with torch.no_grad():
        hidden = pristine[1].model(tokens()).last_hidden_state
    assert_close(logits(folder, ignore=("lm_head.weight",)), hidden)
    for absent in ("absent", None, []):
        edit_config(folder, architectures=absent)
        assert_close(logits(folder), expected(pristine[1]))


@pytest.mark.parametrize("name", ["LlamaForSequenceClassification", "T5ForConditionalGeneration", 7])
def test_another_head_is_named(folder: Path, name: Any) -> None:
    edit_config(folder, architectures=[name])
    refused(folder, ConfigError, f"architectures names {name!r}, whose head is not known")
