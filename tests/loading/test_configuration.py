"""config.json and generation_config.json: what is read, ignored and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import transformers

from qkv import QkvError, loading
from qkv.errors import (
    ConfigError,
    RequestError,
)
from tests.families.models import SMALL, tokens
from tests.loading.support import edit_config, edit_weights, expected, logits, refused, write_gguf
from tests.support import assert_close


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
        ('{"typical_p": 0.5}', "typical_p is 0.5, which cannot be honoured yet"),
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
