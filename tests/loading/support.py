"""Files to spoil, and what loading makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qkv import QkvError, loading
from tests.families.models import tokens


def logits(source: Path | str, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return loading.load(source, **arguments).model(tokens())


def expected(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens()).logits


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value != "absent"}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def write_gguf(path: Path, dtype: type[np.generic] = np.float32) -> Path:
    """A llama of one layer, of width 8."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (11, 8), "output_norm": (8,), "blk.0.attn_norm": (8,), "blk.0.ffn_norm": (8,)}
    shapes |= {f"blk.0.{part}": (8, 8) for part in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {f"blk.0.{part}": (8, 8) for part in ("ffn_gate", "ffn_up", "ffn_down")}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def refused(source: Path | str, kind: type[QkvError], *said: str, **arguments: Any) -> str:
    """Loading fails with one sentence (and perhaps a way on) that says all of this."""
    with pytest.raises(kind) as caught:
        loading.load(source, **arguments)
    message = str(caught.value)
    assert type(caught.value) is kind
    assert "\n" not in message and message.endswith(".") and len(message) < 400, message
    for text in said:
        assert text in message
    return message
