"""Configurations: how keys are taken, both spellings of rotary scaling, and the published llamas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers

from qkv.errors import ConfigError, QkvError
from qkv.families import FILES, Config, Description, describe
from qkv.families.weights import pieces
from qkv.spec import (
    Attention,
    Causal,
    DynamicNTK,
    Gated,
    Interpolation,
    Llama3,
    LongRope,
    Rotary,
    Tokens,
    Window,
    Yarn,
)

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}


def attentions(**changes: Any) -> list[Attention]:
    stack = describe({**BASE, **changes}).model.decoder
    assert stack is not None
    return [layer.sublayers[0].branches[0].mixer for layer in stack.layers]  # type: ignore[misc]


def position(**changes: Any) -> Rotary:
    found = attentions(**changes)[0].position
    assert isinstance(found, Rotary)
    return found


def refused(*said: str, ignore: tuple[str, ...] = (), **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        describe({**BASE, **changes}, ignore=ignore)
    message = str(caught.value)
    assert "\n" not in message
    for text in said:
        assert text in message
    return message


# keys are taken


def test_take_knows_kinds_and_names_the_key() -> None:
    config = Config({"n": 3, "x": 0.5, "s": "a", "b": True, "l": [1], "o": {}, "null": None}, "c.json")
    assert config.take("n", int) == 3
    assert config.take("x", float) == 0.5
    assert config.take("s", (str, int)) == "a"
    assert config.take("b", bool) is True
    assert config.take("l", list) == [1]
    for key, kind, said in (
        ("x", int, "c.json: x is 0.5; it must be a whole number."),
        ("s", float, "c.json: s is 'a'; it must be a number."),
        ("n", bool, "c.json: n is 3; it must be true or false."),
        ("n", (str, list), "c.json: n is 3; it must be a text or a list."),
        ("l", dict, "c.json: l is [1]; it must be an object."),
    ):
        with pytest.raises(ConfigError) as caught:
            config.take(key, kind)  # type: ignore[arg-type]
        assert str(caught.value) == said


def test_a_whole_number_is_a_number_and_a_boolean_is_neither() -> None:
    config = Config({"n": 3, "b": True}, "c.json")
    value = config.take("n", float)
    assert value == 3.0 and isinstance(value, float)
    for kind in (int, float, (int, float)):
        with pytest.raises(ConfigError, match="b is True; it must be a "):
            config.take("b", kind)


def test_null_and_absent_are_the_default_or_missing() -> None:
    config = Config({"null": None}, "c.json")
    for key in ("null", "absent"):
        assert config.take(key, int, 7) == 7
        assert config.take(key, int, None) is None
        with pytest.raises(ConfigError, match=rf"^c.json: {key} is missing.$"):
            config.take(key, int)
    assert "null" not in config


@pytest.mark.parametrize("value", [math.inf, math.nan, 10**400])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match="it must be a finite number"):
        Config({"x": value}, "c.json").take("x", float)


def test_sizes_have_bounds() -> None:
    config = Config({"zero": 0, "large": 1 << 40, "n": 5}, "c.json")
    assert config.size("n") == 5
    with pytest.raises(ConfigError, match="zero is 0; it must be from 1 to 16,777,216"):
        config.size("zero")
    with pytest.raises(ConfigError, match="large is 1099511627776; it must be from 1 to 9"):
        config.size("large", most=9)
    with pytest.raises(ConfigError, match="zero is 0; it must be above 0"):
        config.positive("zero")


def test_finish_names_what_nobody_took() -> None:
    config = Config(
        {"b": 1, "a": [0] * 1000, "null": None, "use_cache": True, "c": 2}, "c.json", ignore=("c",)
    )
    with pytest.raises(ConfigError, match=r'c.json: a = \[0, 0, .*\.\.\. is not known.*ignore=\("a",\)'):
        config.finish()
    config.take("a", list)
    with pytest.raises(ConfigError, match="b = 1 is not known"):
        config.finish()
    config.discard("b")
    config.finish()


def test_an_object_inside_has_its_own_place_in_messages() -> None:
    outer = Config({"o": {"q": 1, "skipped": 2}}, "c.json", ("skipped",))
    inside = outer.inside("o")
    assert inside is not None and outer.inside("absent") is None
    with pytest.raises(ConfigError, match=r"^c.json: o: q = 1 is not known"):
        inside.finish()


# rotary positions

SCALINGS = [
    ({"type": "linear", "factor": 4}, Interpolation(4.0)),
    ({"rope_type": "linear", "factor": 4.0}, Interpolation(4.0)),
    ({"type": "dynamic", "factor": 2.0}, DynamicNTK(2.0, 4096)),
    ({"type": "yarn", "factor": 4.0}, Yarn(4.0, 4096)),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, Yarn(4.0, 1024)),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 512},
        Llama3(8.0, 1.0, 4.0, 512),
    ),
    ({"rope_type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 3, 4],
      "original_max_position_embeddings": 1024},
     LongRope((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 1024, 4.0)),
    ({"rope_type": "default"}, None),
    ({}, None),
]  # fmt: skip


@pytest.mark.parametrize(("data", "wanted"), SCALINGS)
def test_both_spellings_say_the_same(data: dict[str, Any], wanted: object) -> None:
    older = position(rope_scaling=data, rope_theta=500.0)
    newer = position(rope_parameters={**data, "rope_theta": 500.0})
    assert older == newer == Rotary(theta=500.0, scaling=wanted)  # type: ignore[arg-type]


def test_the_original_length_may_stand_outside() -> None:
    data = {"type": "yarn", "factor": 4.0}
    assert position(rope_scaling=data, original_max_position_embeddings=1024).scaling == Yarn(4.0, 1024)


def test_an_unknown_kind_is_refused_word_for_word() -> None:
    assert refused(rope_scaling={"type": "yarn2", "factor": 2}) == (
        'config.json: rope_scaling.type "yarn2" is not known (linear, dynamic, yarn, llama3, longrope). '
        'Pass ignore=("rope_scaling",) to load without it.'
    )
    assert refused(rope_parameters={"rope_type": "yarn2", "rope_theta": 5e5}) == (
        'config.json: rope_parameters.rope_type "yarn2" is not known '
        '(linear, dynamic, yarn, llama3, longrope). Pass ignore=("rope_type",) to load without it.'
    )


def test_ignoring_the_kind_keeps_the_base() -> None:
    older = {**BASE, "rope_theta": 5e5, "rope_scaling": {"type": "yarn2", "factor": 2}}
    newer = {**BASE, "rope_parameters": {"rope_type": "yarn2", "rope_theta": 5e5, "factor": 2}}
    plain = describe({**BASE, "rope_theta": 5e5})
    assert describe(older, ignore=("rope_scaling",)) == plain
    assert describe(newer, ignore=("rope_type",)) == plain


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "linear"}}, "config.json: rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0; it must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "warp": 9}}, "rope_scaling: warp = 9 is not known"),
        ({"rope_scaling": [1]}, "config.json: rope_scaling is [1]; it must be an object"),
        ({"rope_scaling": {"type": 3}}, "rope_scaling: type is 3; it must be a text"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 5.0}},
         "config.json gives both rope_scaling and rope_parameters"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [1.0] * 4}},
         "rope_scaling: short_factor has 3 factors; it must have 4"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 5}},
         "rope_scaling: long_factor has 5 factors; it must have 4"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, "x", 1, 1]}},
         "rope_scaling: long_factor: 1 is 'x'; it must be a number"),
        ({"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
         "rope_scaling: low_freq_factor 4.0 is above high_freq_factor 1.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 8}, "rope_theta": 1.0}, "no finite frequency"),
        ({"rope_theta": -1}, "config.json: rope_theta is -1; it must be above 0"),
        ({"head_dim": 7}, "7 of the 7 dimensions of a head would rotate"),
        ({"partial_rotary_factor": 1e300}, "partial_rotary_factor = 1e+300 is not known"),
    ],
)  # fmt: skip
def test_positions_that_make_no_sense(changes: dict[str, Any], said: str) -> None:
    refused(said, **changes)


@pytest.mark.parametrize(
    ("factor", "explicit", "wanted"),
    [(64, 1.0, 1.0), (64, None, 1.415888), (128, None, 1.485203), (128, 1.4852, 1.4852)],
)
def test_p8_an_explicit_attention_factor_is_final(factor: int, explicit: float | None, wanted: float) -> None:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    found = position(rope_scaling={**scaling, "attention_factor": explicit})
    assert found.frequencies(8, 1)[1] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_p12_the_three_bands_of_llama3(kind: str) -> None:
    scaling = {kind: "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}  # fmt: skip
    found = position(rope_scaling=scaling, rope_theta=500_000.0, head_dim=64, max_position_embeddings=131_072)
    frequencies, factor = found.frequencies(64, 1)
    wanted = {
        14: 0.003211446,
        15: 0.001290548,
        16: 0.000429557,
        17: 9.70829e-5,
        18: 1.94616e-5,
        31: 9.41831e-8,
    }
    assert factor == 1.0
    for pair, value in wanted.items():
        assert float(frequencies[pair]) == pytest.approx(value, rel=2e-6)
    plain = 500_000.0 ** (-np.arange(0, 64, 2) / 64)
    assert frequencies[:15].tolist() == pytest.approx(plain[:15].tolist(), rel=1e-6)


# windows, layers without positions, and other parts


def test_windows() -> None:
    window = Causal() & Window(9)
    mistral, smollm3 = ({"model_type": kind, "num_key_value_heads": 2} for kind in ("mistral", "smollm3"))
    full, sliding = "full_attention", "sliding_attention"
    assert [a.mask for a in attentions(**mistral, sliding_window=9)] == [window] * 3
    assert [a.mask for a in attentions(**mistral, sliding_window=None)] == [Causal()] * 3
    off = {**smollm3, "sliding_window": 9, "use_sliding_window": False}
    assert [a.mask for a in attentions(**off)] == [Causal()] * 3
    kinds = [full, sliding, full]
    on = {**smollm3, "sliding_window": 9, "use_sliding_window": True}
    assert [a.mask for a in attentions(**on, layer_types=kinds)] == [Causal(), window, Causal()]
    refused("layer_types has 2 entries for 3 layers", **on, layer_types=[full] * 2)
    refused("layer_types holds 'chunked', which is not known", **smollm3, layer_types=["chunked"] * 3)
    refused("layer_types holds ['x'], which is not known", **smollm3, layer_types=[["x"]] * 3)
    refused("sliding_window is missing, and layer_types calls for one", **smollm3, layer_types=kinds)
    refused("has sliding layers and use_sliding_window is false", **off, layer_types=kinds)
    refused("sliding_window is 0; it must be from 1", **mistral, sliding_window=0)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "sliding_window", 4),
        ("granite", "sliding_window", 4),
        ("granite", "layer_types", ["sliding_attention"] * 3),
        ("mistral", "use_sliding_window", False),
        ("mistral", "residual_multiplier", 0.5),
        ("llama", "embedding_multiplier", 3.0),
        ("smollm3", "logits_scaling", 2.0),
        ("llama", "no_rope_layer_interval", 2),
        ("mistral", "no_rope_layers", [1, 1, 0]),
        ("llama", "partial_rotary_factor", 0.5),
        ("granite", "rope_interleaved", True),
    ],
)
def test_a_key_of_another_type_is_refused_not_obeyed(kind: str, key: str, value: Any) -> None:
    message = refused(f"config.json: {key} = ", model_type=kind, num_key_value_heads=2, **{key: value})
    assert "is not known for this kind of model" in message


def test_smollm3_windows_where_a_layer_does_not_rotate() -> None:
    found = attentions(model_type="smollm3", num_hidden_layers=4, sliding_window=9, use_sliding_window=True)
    assert [a.position is not None for a in found] == [True, True, True, False]
    assert [a.mask for a in found] == [Causal(), Causal(), Causal(), Causal() & Window(9)]


def test_layers_without_positions() -> None:
    found = attentions(model_type="smollm3", no_rope_layers=[0, 1, 1])
    assert [a.position is not None for a in found] == [False, True, True]
    kind = {"model_type": "smollm3"}
    refused("no_rope_layers has 2 entries for 3 layers", **kind, no_rope_layers=[1, 1])
    refused("no_rope_layers holds 'x', which is not known (1, 0)", **kind, no_rope_layers=[1, 1, "x"])
    refused("no_rope_layer_interval is 0", **kind, no_rope_layer_interval=0)


def test_sizes_that_contradict_each_other() -> None:
    refused("hidden_size 32 is no multiple of num_attention_heads 5", num_attention_heads=5)
    refused("num_attention_heads 4 is no multiple of num_key_value_heads 3", num_key_value_heads=3)
    refused("hidden_act 'mish' is not known (gelu, gelu_python, gelu_new,", hidden_act="mish")
    refused("num_hidden_layers is 5000; it must be from 1 to 4,096", num_hidden_layers=5000)
    refused("logits_scaling is 0; it must be above 0", model_type="granite", logits_scaling=0)


SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8,
         "num_attention_heads": 8}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "mistral", "smollm3", "granite"])
def test_keys_left_out_have_the_values_of_the_class_that_wrote_them(kind: str) -> None:
    theirs = transformers.AutoConfig.for_model(kind, **SIZES)
    stack = describe({"model_type": kind, **SIZES})
    assert stack == describe(json.loads(theirs.to_json_string(use_diff=False)))
    assert stack.context == theirs.max_position_embeddings
    trunk = stack.model.trunk
    assert isinstance(trunk.input, Tokens)
    assert (trunk.input.shared is not None) == theirs.tie_word_embeddings
    attention = trunk.layers[0].sublayers[0].branches[0].mixer
    assert isinstance(attention, Attention) and isinstance(attention.position, Rotary)
    assert attention.kv_heads == theirs.num_key_value_heads
    assert attention.position.theta == theirs.rope_parameters["rope_theta"]
    window = getattr(theirs, "sliding_window", None)
    assert attention.mask == (Causal() & Window(window) if window else Causal())


# published configurations


def reference(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "configs" / "reference_models.json").read_text())[name]


def published(folder: Path, name: str) -> Description:
    path = folder / "configs" / f"meta-llama--Meta-Llama-3.1-{name}_config.json"
    return describe(json.loads(path.read_text()), path.name)


@pytest.mark.parametrize(
    ("name", "listed"), [("8B", "Llama-3-8B"), ("70B", "Llama-3-70B"), ("405B", "Llama-3.1-405B")]
)
def test_published_llamas(shared_folder: Path, name: str, listed: str) -> None:
    """Llama 3.1 changed the positions of Llama 3, not its sizes."""
    found, wanted = published(shared_folder, name), reference(shared_folder, listed)
    assert found.model.parameters() == wanted["params"]
    assert found.model.cache_bytes(1, bytes_per_value=1) == wanted["kv_elems"]
    assert found.context == 131_072
    layers = found.model.trunk.layers
    assert len(layers) == wanted["L"]
    attention = layers[-1].sublayers[0].branches[0].mixer
    assert attention == Attention(
        wanted["nh"], wanted["nkv"], wanted["hd"], position=Rotary(5e5, scaling=Llama3(8.0, 1.0, 4.0, 8192))
    )
    assert layers[-1].sublayers[1].branches[0].mixer == Gated("silu", wanted["ff"])


def test_a_published_configuration_of_another_kind_is_refused_by_name(shared_folder: Path) -> None:
    for path in sorted((shared_folder / "configs").glob("*_config.json")):
        data = json.loads(path.read_text())
        if data["model_type"] not in FILES:
            with pytest.raises(ConfigError, match=f"models of type '{data['model_type']}' are not known yet"):
                describe(data, path.name)


@pytest.mark.parametrize(
    ("listed", "more", "scaling"),
    [
        ("Llama-2-7B", {"model_type": "llama"}, None),
        ("Mistral-7B-v0.1", {"model_type": "mistral", "sliding_window": 4096}, None),
    ],
)
def test_listed_models(shared_folder: Path, listed: str, more: dict[str, Any], scaling: None) -> None:
    wanted = reference(shared_folder, listed)
    found = describe({
        "vocab_size": wanted["V"], "hidden_size": wanted["h"], "intermediate_size": wanted["ff"],
        "num_hidden_layers": wanted["L"], "num_attention_heads": wanted["nh"],
        "num_key_value_heads": wanted["nkv"], "max_position_embeddings": wanted["mpe"], **more,
    })  # fmt: skip
    assert found.model.parameters() == wanted["params"]
    assert found.model.cache_bytes(4096, bytes_per_value=1) == 4096 * wanted["kv_elems"]
    assert found.context == wanted["mpe"]


def test_the_keys_of_smollm2() -> None:
    """SmolLM2-135M-Instruct as published."""
    found = describe({
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    })  # fmt: skip
    assert found.model.parameters() == 134_515_008
    assert found.context == 8192
    attention = found.model.trunk.layers[0].sublayers[0].branches[0].mixer
    assert attention == Attention(9, 3, 64, position=Rotary(100_000.0))


# properties


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads, groups = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads, head_dim = kv_heads * groups, 2 * draw(st.integers(1, 8))
    wide = draw(st.booleans())  # heads that do not add up to the width, as in Mistral NeMo
    return {
        "model_type": draw(st.sampled_from(["llama", "mistral"])),
        "vocab_size": draw(st.integers(1, 99)),
        "hidden_size": heads * (draw(st.integers(1, 5)) if wide else head_dim),
        "head_dim": head_dim,
        "intermediate_size": draw(st.integers(1, 70)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw(st.integers(1, 9999)),
        "tie_word_embeddings": draw(st.booleans()),
        "sliding_window": draw(st.none() | st.integers(1, 50)),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
    }


@hypothesis.given(configs())
@hypothesis.settings(max_examples=40)
def test_names_and_shapes_are_those_of_transformers(data: dict[str, Any]) -> None:
    others = "_bias" if data["model_type"] == "mistral" else "sliding_window"
    data = {key: value for key, value in data.items() if not key.endswith(others)}
    settings = {key: value for key, value in data.items() if key != "model_type"}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(data["model_type"], **settings, pad_token_id=None)
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    description = describe(data)
    tensors = {tensor.name: tensor.shape for tensor in description.model.tensors()}
    ours = {piece.place.name: piece.shape for piece in pieces(tensors, description.weights)}
    assert ours == {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    assert description.model.parameters() == theirs.num_parameters()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 9)
    | st.just(10**400)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["yarn", "llama3", "longrope", "dynamic", "linear", "gelu", "full_attention"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": None,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": True}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0,
        "original_max_position_embeddings": 32}  # fmt: skip
KEYS = {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e4, "partial_rotary_factor": 1.0, "head_dim": 8,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_act": "silu", "sliding_window": 4,
        "layer_types": ["sliding_attention"] * 3, "no_rope_layers": [1, 1, 1], "no_rope_layer_interval": 4,
        "use_sliding_window": True, "attention_multiplier": 1.0, "residual_multiplier": 1.0,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "rope_interleaved": False,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "rotary_dim": 8,
        "quantization_config": None, "use_cache": True}  # fmt: skip


@hypothesis.given(st.data(), st.sampled_from([None, YARN, LLAMA3, LONG, {"type": "dynamic", "factor": 2.0}]))
@hypothesis.settings(max_examples=300)
def test_one_wrong_value_loads_or_is_a_sentence(data: st.DataObject, scaling: dict[str, Any] | None) -> None:
    config = {**BASE, **KEYS, "rope_scaling": scaling}
    inside = dict(scaling or {})
    key = data.draw(st.sampled_from([*config, *(f"rope_scaling.{key}" for key in inside)]))
    value = data.draw(VALUES)
    if key.startswith("rope_scaling."):
        config["rope_scaling"] = {**inside, key.removeprefix("rope_scaling."): value}
    else:
        config[key] = value
    try:
        found = describe(config)
    except QkvError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert found.model.parameters() > 0
        attention = found.model.trunk.layers[0].sublayers[0].branches[0].mixer
        assert isinstance(attention, Attention) and isinstance(attention.position, Rotary | None)
        if attention.position is not None:
            assert np.isfinite(attention.position.frequencies(attention.head_dim, 5)[0]).all()
