"""Mixtral, Qwen, Gemma, DeepSeek, gpt-oss and Llama 4: counted against transformers on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf

from tests.families.recent_decoders import (
    CASES,
    FAMILIES,
    GEMMA2_9B,
    GEMMA3_27B,
    PUBLISHED,
    QWEN25_7B,
    READ,
    older,
    published,
    read,
    refused,
    windows,
    written,
)

# every type, against transformers


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_transformers(name: str) -> None:
    kind, config = CASES[name]()
    with torch.device("meta"):
        theirs = kind(config)
    # routing biases are buffers there
    biases = (b.numel() for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias"))
    expected = sum(parameter.numel() for parameter in theirs.parameters()) + sum(biases)
    assert read(written((kind, config))).model.parameters() == expected


@pytest.mark.parametrize("name", CASES)
def test_both_spellings_say_the_same(name: str) -> None:
    data = written(CASES[name]())
    if data["model_type"] == "qwen3_next":
        assert data["rope_parameters"]["partial_rotary_factor"] == 0.25
        assert older(data)["rope_scaling"] is None
    assert read(older(data)) == read(data)


@pytest.mark.parametrize("name", [name for name in CASES if "," not in name])
def test_a_class_has_its_defaults(name: str) -> None:
    """A file may leave out what the class would write there, but for the sizes that every file states."""
    data = written(CASES[name]())
    sizes = ("model_type", "architectures", "vocab_size", "hidden_size", "num_hidden_layers",
             "num_attention_heads", "intermediate_size", "text_config", "vision_config",
             "num_experts_per_tok", "mm_tokens_per_image")  # fmt: skip
    short = {key: value for key, value in data.items() if key in sizes}
    if "text_config" in short:
        short["text_config"], short["vision_config"] = {}, {"model_type": "siglip_vision_model"}
    assert read(short) == read(data)


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_key_is_named(name: str) -> None:
    data = written(CASES[name]())
    assert "config.json: mystery = 3 is not known" in refused({**data, "mystery": 3})


# every published file


@pytest.mark.parametrize("name", READ)
def test_published_files_are_read(name: str, shared_folder: Path) -> None:
    found, (parameters, context) = published(shared_folder, name), READ[name]
    assert found.context == context
    assert parameters is None or found.model.parameters() == parameters
    if name in PUBLISHED:
        entry = json.loads((shared_folder / "configs" / "reference_models.json").read_text())[PUBLISHED[name]]
        assert found.model.parameters() == entry.get("params", entry.get("params_main"))
        assert found.model.cache_bytes(1) == 2 * entry.get("kv_elems", entry.get("kv_elems_mla", 0))
        if "active" in entry:
            assert found.model.parameters(active=True) == entry["active"]


def test_every_published_file_of_these_types_is_read(shared_folder: Path) -> None:
    files = (shared_folder / "configs").glob("*_config.json")
    kinds = {f.name.removesuffix("_config.json"): json.loads(f.read_text())["model_type"] for f in files}
    assert {name for name, kind in kinds.items() if kind in FAMILIES} == READ.keys()


def test_mimo_and_kimi_are_counted_as_their_kin(shared_folder: Path) -> None:
    """Both files come with code of their own: classes of Qwen 2 and of DeepSeek V3 with other sizes."""
    for name, kind, base in (
        ("XiaomiMiMo--MiMo-7B-Base", hf.Qwen2ForCausalLM, hf.Qwen2Config),
        ("moonshotai--Kimi-K2-Instruct", hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config),
    ):
        data = json.loads((shared_folder / "configs" / f"{name}_config.json").read_text())
        data.pop("quantization_config", None)
        with torch.device("meta"):
            theirs = kind(base(**{key: value for key, value in data.items() if key != "model_type"}))
        biases = (b.numel() for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias"))
        expected = sum(parameter.numel() for parameter in theirs.parameters()) + sum(biases)
        assert published(shared_folder, name).model.parameters() == expected
    kimi = published(shared_folder, "moonshotai--Kimi-K2-Instruct")
    assert round(kimi.model.parameters() / 1e12, 2) == 1.03
    assert round(kimi.model.parameters(active=True) / 1e9) == 33  # "32B", the token table not counted
    assert kimi.irrelevant == ()
    mimo = published(shared_folder, "XiaomiMiMo--MiMo-7B-Base")
    assert windows(mimo) == [] and "model.mtp_layers.*" in mimo.irrelevant


def test_counts_of_models_whose_files_are_not_at_hand(shared_folder: Path) -> None:
    entries = json.loads((shared_folder / "configs" / "reference_models.json").read_text())
    assert read(QWEN25_7B).model.parameters() == entries["Qwen2.5-7B"]["params"]
    assert read(GEMMA2_9B).model.parameters() == entries["Gemma-2-9B"]["params"]
    assert read(GEMMA2_9B).model.cache_bytes(8192) == entries["Gemma-2-9B"]["kv_bytes_at_8192_windowed_bf16"]
    seeing, entry = read(GEMMA3_27B), entries["Gemma-3-27B"]
    assert seeing.model.parameters() == entry["params_total_with_vision"]
    assert seeing.model.cache_bytes(131_072) == entry["kv_bytes_at_131072_windowed_bf16"]
    text = read({**GEMMA3_27B["text_config"], "architectures": ["Gemma3ForCausalLM"]})  # type: ignore[dict-item]
    assert text.model.parameters() == entry["params_text"]
