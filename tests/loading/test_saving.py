"""What is saved is what was loaded: in shards, with what holds no parameter, under the names of today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import qkv
from qkv import loading
from qkv.checkpoints import StoredTensor, read_safetensors, write_shards
from qkv.errors import CheckpointError, RequestError
from qkv.loading.network import stored_tensors
from tests.families.parity import pair_of
from tests.families.parity_models import VOCAB
from tests.loading.support import edit_config, edit_weights, refused
from tests.support import assert_close


def copied(name: str, folder: Path) -> Path:
    """The files of a pair, to change."""
    folder.mkdir()
    for path in pair_of(name).folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize(("size", "shards"), [(10**9, 1), (9000, 18), (1, 40)])
def test_in_shards_it_is_the_same_model(tmp_path: Path, size: int, shards: int) -> None:
    """No shard is larger than asked for, but for one tensor that is."""
    pair = pair_of("gpt2")
    write_shards(tmp_path, stored_tensors(pair.model.loaded), size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == shards and len(list(tmp_path.glob("*.index.json"))) == (shards > 1)
    assert not list(tmp_path.glob(".*"))
    for file in files:
        held = read_safetensors(file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= size
    (tmp_path / "config.json").write_bytes((pair.folder / "config.json").read_bytes())
    for name, values in qkv.load(tmp_path).network.named_parameters():
        assert torch.equal(values, pair.ours.get_parameter(name)), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(values, theirs[name]) for name, values in pair.theirs.state_dict().items())


def test_shards_that_cannot_be_finished_leave_nothing(tmp_path: Path) -> None:
    def tensors():  # type: ignore[no-untyped-def]
        yield from list(stored_tensors(pair_of("gpt2").model.loaded))[:5]
        raise CheckpointError("no more")

    with pytest.raises(CheckpointError, match="no more"):
        write_shards(tmp_path, tensors(), 1)
    assert not list(tmp_path.iterdir())


def test_each_tensor_is_saved_in_the_type_it_has(tmp_path: Path) -> None:
    """Also where a part of the model was made another, and lies in one tensor with the rest."""
    model = qkv.load(copied("gpt2", tmp_path / "first"))
    layer = model.network.decoder.layers[1]
    layer.feed_forward.double()
    layer.attention.key.bfloat16()
    model.save(tmp_path / "second")
    saved = load_file(tmp_path / "second" / "model.safetensors")
    assert saved["transformer.h.1.mlp.c_fc.weight"].dtype == torch.float64
    key = saved["transformer.h.1.attn.c_attn.weight"].T[24:48]
    assert key.dtype == torch.float32 and torch.equal(key, layer.attention.key.weight.float())


def test_layers_that_guess_ahead_are_left_out_and_saved_again(tmp_path: Path) -> None:
    folder, further = copied("deepseek-experts", tmp_path / "first"), torch.arange(6.0)
    name = "model.layers.3.eh_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: further}))
    edit_config(folder, num_nextn_predict_layers=0)
    refused(folder, CheckpointError, f"holds {name}, which its configuration has no place for")
    edit_config(folder, num_nextn_predict_layers=1)
    model = qkv.load(folder)
    assert model.loaded.carried.keys() == {name}
    model.save(tmp_path / "second")
    assert torch.equal(load_file(tmp_path / "second" / "model.safetensors")[name], further)
    qkv.load(folder, ignore="model.layers.3.*").save(tmp_path / "third")
    assert name not in load_file(tmp_path / "third" / "model.safetensors")


def test_a_pooler_that_nothing_reads_is_saved_again(tmp_path: Path) -> None:
    pair = pair_of("bert-bare")
    assert pair.model.loaded.carried.keys() == {"pooler.dense.weight", "pooler.dense.bias"}
    assert not pair_of("bert-sequence").model.loaded.carried


def test_the_first_bert_calls_scale_and_bias_gamma_and_beta(tmp_path: Path) -> None:
    pair, folder = pair_of("bert-masked"), copied("bert-masked", tmp_path / "first")

    def older(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".LayerNorm." in name]:
            again = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")
            tensors[again] = tensors.pop(name)

    edit_weights(folder, older)
    model = qkv.load(folder)
    ids = torch.arange(10)[None] + 3
    assert_close(model(ids), pair.ours(ids))
    model.save(tmp_path / "second")
    assert read_safetensors(tmp_path / "second").keys() == read_safetensors(pair.folder).keys()


@pytest.mark.parametrize(
    ("name", "copy", "first"),
    [
        ("bert-masked", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("bert-masked", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("t5", "encoder.embed_tokens.weight", "shared.weight"),
        ("t5", "decoder.embed_tokens.weight", "shared.weight"),
        ("t5", "lm_head.weight", "shared.weight"),
        ("bart", "model.encoder.embed_tokens.weight", "model.shared.weight"),
    ],
)
def test_a_tensor_may_be_stored_again_if_it_is_the_same(
    tmp_path: Path, name: str, copy: str, first: str
) -> None:
    folder = copied(name, tmp_path / "model")
    edit_weights(folder, lambda tensors: tensors.update({copy: tensors[first].clone()}))
    assert copy not in {tensor.name for tensor in stored_tensors(loading.load(folder))}
    edit_weights(folder, lambda tensors: tensors[copy].view(-1)[3].add_(1))
    refused(folder, CheckpointError, f"holds {copy}, which differs from {first}")


def test_a_fused_tensor_of_another_size_is_named_as_it_is_in_the_file(tmp_path: Path) -> None:
    folder = copied("bloom", tmp_path / "model")
    name = "transformer.h.1.self_attention.query_key_value.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    refused(folder, CheckpointError, f"{name} has shape (95, 32); the configuration makes it (96, 32).")


def test_an_expert_that_is_not_there_is_named_before_memory_is_asked_for(tmp_path: Path) -> None:
    folder = copied("mixtral-experts", tmp_path / "model")
    edit_config(folder, num_local_experts=1 << 24)
    refused(
        folder, CheckpointError, "lacks model.layers.0.block_sparse_moe.experts.5.w1.weight (and 999 more)"
    )


def test_experts_of_several_types_become_one_tensor(tmp_path: Path) -> None:
    """bfloat16 and float32 side by side: exact values, not bits taken for numbers."""
    folder = copied("mixtral-experts", tmp_path / "model")
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    up = loading.load(folder, dtype="float32").model.decoder.layers[0].feed_forward.expert.gate.weight
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(up[2], stored[name].float())
    assert torch.equal(up[1], stored[name.replace("experts.2", "experts.1")])


def test_config_and_vocabulary_are_those_that_were_read(tmp_path: Path) -> None:
    pair = pair_of("gpt2")
    pair.model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == VOCAB
    assert all(isinstance(tensor, StoredTensor) for tensor in read_safetensors(tmp_path).values())


@pytest.mark.parametrize("place", ["", "below"])
def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(RequestError, match=r"file.* cannot be made a folder to save in: "):
        pair_of("gpt2").model.save(tmp_path / "file" / place)
    assert (tmp_path / "file").read_text() == "here"
