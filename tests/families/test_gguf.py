"""GGUF files: small random ones equal transformers with the same weights, the packaged one its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from qkv import loading
from qkv.errors import CheckpointError, ConfigError
from qkv.families import describe_gguf
from qkv.spec import Causal, Interpolation, Rotary, Window, Yarn
from tests.families.models import oracle, tokens
from tests.support import assert_close

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Weights = dict[str, np.ndarray]


def weights_of(model: transformers.PreTrainedModel) -> Weights:
    """The parameters under their GGUF names, Q and K with the rows of each head interleaved."""
    found = {}
    for name, parameter in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            number, part = stem.removeprefix("model.layers.").split(".", 1)
            theirs = f"blk.{number}.{NAMES[part]}.{kind}"
        else:
            theirs = f"{NAMES[stem]}.{kind}"
        values = parameter.detach().numpy()
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(stem.split(".")[-1])
        if heads:
            values = interleaved(values, getattr(model.config, heads))
        found[theirs] = values
    return found


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i and row i + half of each head side by side."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def metadata_of(model: transformers.PreTrainedModel) -> dict[str, Any]:
    config = model.config
    return {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.rope.dimension_count": config.head_dim,
    }


def write(path: Path, metadata: dict[str, Any], weights: Weights, matrices: str = "F32") -> Path:
    """Matrices in a format, vectors in F32, as converters write them."""
    writer = gguf.GGUFWriter(path, "llama")
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in metadata.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, values in weights.items():
        kind = gguf.GGMLQuantizationType[matrices if values.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_equal_logits(path: Path, theirs: transformers.PreTrainedModel, dtype: str = "float32") -> None:
    model = loading.load(path, dtype=dtype).model
    with torch.no_grad():
        assert_close(model(tokens()), theirs(tokens()).logits)


# name: what differs from the small llama
SHAPES: dict[str, dict[str, Any]] = {
    "four heads over two": {},
    "no groups": {"num_key_value_heads": 4},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(tmp_path: Path, name: str) -> None:
    theirs = oracle(**SHAPES[name])
    assert_equal_logits(write(tmp_path / "m.gguf", metadata_of(theirs), weights_of(theirs)), theirs)


def test_heads_wider_than_the_stream_divided(tmp_path: Path) -> None:
    theirs = oracle(head_dim=12)
    metadata = metadata_of(theirs) | {"llama.attention.key_length": 12, "llama.attention.value_length": 12}
    assert_equal_logits(write(tmp_path / "m.gguf", metadata, weights_of(theirs)), theirs)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_formats(tmp_path: Path, kind: str) -> None:
    """The oracle carries what `gguf` itself makes of the file's bytes."""
    theirs = oracle()
    stored, format = weights_of(theirs), gguf.GGMLQuantizationType[kind]
    path = write(tmp_path / "m.gguf", metadata_of(theirs), stored, kind)
    rounded = {
        name: gguf.quants.dequantize(gguf.quants.quantize(v, format), format) if v.ndim > 1 else v
        for name, v in stored.items()
    }
    assert any((rounded[name] != stored[name]).any() for name in stored)
    fill_back(theirs, rounded)
    assert_equal_logits(path, theirs)


def fill_back(model: transformers.PreTrainedModel, weights: Weights) -> None:
    """The inverse of `weights_of`."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for parameter, (name, values) in zip(model.parameters(), weights.items(), strict=True):
        part = name.split(".")[-2]
        if part in heads:  # pairs side by side -> one half and the other
            values = values.reshape(heads[part], -1, 2, *values.shape[1:]).swapaxes(1, 2)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameter.shape))


def test_the_type_follows_the_file(tmp_path: Path) -> None:
    theirs = oracle()
    for kind, wanted in (("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)):
        path = write(tmp_path / f"{kind}.gguf", metadata_of(theirs), weights_of(theirs), kind)
        assert loading.load(path).model.head.weight.dtype == wanted


# positions

LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
YARN = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 16,
    "llama.rope.scaling.finetuned": True,
}
THEIRS = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (LINEAR, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}),
    "linear without a type": (
        {"llama.rope.scaling.factor": 2.5},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    ),
    "linear of older files": (
        {"llama.rope.scale_linear": 2.5},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    ),
    "none": ({"llama.rope.scaling.type": "none"}, {"rope_type": "default", "rope_theta": 10_000.0}),
    "yarn": (YARN, THEIRS),
    "yarn with betas": (
        YARN | {"llama.rope.scaling.yarn_beta_fast": 4.0, "llama.rope.scaling.yarn_beta_slow": 0.5},
        THEIRS | {"beta_fast": 4.0, "beta_slow": 0.5},
    ),
    # llama.cpp multiplies the temperature that follows from the factor
    "yarn with a factor on its temperature": (
        YARN | {"llama.rope.scaling.attn_factor": 0.75},
        THEIRS | {"attention_factor": 0.75 * (0.1 * math.log(4) + 1)},
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings(tmp_path: Path, name: str) -> None:
    metadata, parameters = SCALINGS[name]
    theirs = oracle(rope_parameters=parameters)
    path = write(tmp_path / "m.gguf", metadata_of(theirs) | metadata, weights_of(theirs))
    assert_equal_logits(path, theirs)


def test_divisors_of_the_frequencies(tmp_path: Path) -> None:
    """Llama 3.1 as converted: the three bands are a tensor, and the metadata has no scaling."""
    parameters = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 128}  # fmt: skip
    theirs = oracle(rope_parameters=parameters, max_position_embeddings=256)
    plain = 10_000.0 ** (-np.arange(0, 8, 2) / 8)
    divisors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.tolist() == pytest.approx([1.0, 2.339, 8.0, 8.0], abs=1e-3)
    weights = weights_of(theirs) | {"rope_freqs.weight": divisors}
    path = write(tmp_path / "m.gguf", metadata_of(theirs), weights)
    assert_equal_logits(path, theirs)

    short = write(tmp_path / "s.gguf", metadata_of(theirs), weights | {"rope_freqs.weight": divisors[:3]})
    with pytest.raises(ConfigError, match=r"rope_freqs.weight has 3 factors; it must have 4"):
        loading.load(short)
    zero = write(tmp_path / "z.gguf", metadata_of(theirs), weights | {"rope_freqs.weight": divisors * 0})
    with pytest.raises(ConfigError, match=r"rope_freqs.weight: 0 is 0.0; it must be above 0"):
        loading.load(zero)
    both = write(tmp_path / "b.gguf", metadata_of(theirs) | LINEAR, weights)
    with pytest.raises(ConfigError, match=r"has both rope_freqs.weight and llama.rope.scaling.type 'linear'"):
        loading.load(both)


def test_a_part_of_each_head_rotates(tmp_path: Path) -> None:
    theirs = oracle(head_dim=88, num_attention_heads=2, num_key_value_heads=2)
    metadata = metadata_of(theirs) | {"llama.attention.key_length": 88, "llama.rope.dimension_count": 60}
    loaded = loading.load(write(tmp_path / "m.gguf", metadata, weights_of(theirs)))
    position = loaded.model.spec.trunk.layers[0].sublayers[0].branches[0].mixer.position  # type: ignore[union-attr]
    assert position == Rotary(dims=60, pairs="interleaved")  # and not int(88 * (60 / 88)), which is 59


def test_a_window(tmp_path: Path) -> None:
    """Mistral is a llama with a window, which its metadata names."""
    theirs = oracle("mistral", sliding_window=5, head_dim=8)
    metadata = metadata_of(theirs) | {"llama.attention.sliding_window": 5}
    assert_equal_logits(write(tmp_path / "m.gguf", metadata, weights_of(theirs)), theirs)


# what is read from where


def described(metadata: dict[str, Any], without: str = "", tensors: dict[str, Any] | None = None) -> Any:
    base = {key: value for key, value in metadata_of(oracle()).items() if key != without}
    everything = {"general.architecture": "llama", "llama.vocab_size": 61, **base, **metadata}
    return describe_gguf(everything, tensors or {}, "m.gguf")


def attention(metadata: dict[str, Any]) -> Any:
    return described(metadata).model.decoder.layers[0].sublayers[0].branches[0].mixer


def test_the_vocabulary_is_as_large_as_the_metadata_or_the_table_says(tmp_path: Path) -> None:
    theirs = oracle()
    path = write(tmp_path / "m.gguf", metadata_of(theirs), weights_of(theirs))
    assert loading.load(path).vocab == 61
    path = write(tmp_path / "n.gguf", metadata_of(theirs) | {"llama.vocab_size": 60}, weights_of(theirs))
    with pytest.raises(
        CheckpointError, match=r"token_embd.weight has shape \(61, 32\); .* makes it \(60, 32\)"
    ):
        loading.load(path)


def test_scaling_is_described_under_its_own_name() -> None:
    assert attention(LINEAR).position.scaling == Interpolation(2.5)
    yarn = attention(YARN | {"llama.rope.scaling.yarn_beta_fast": 16.0}).position.scaling
    assert yarn == Yarn(4.0, original=16, beta_fast=16.0)
    assert attention({"llama.attention.sliding_window": 9}).mask == Causal() & Window(9)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.expert_count": 0, "llama.expert_used_count": 0},
        {"llama.attention.causal": True},
        {"llama.attention.sliding_window": 0},
        {"llama.rope.scaling.attn_factor": 1.0},
        {"llama.attention.value_length": 8},
        {"general.name": "x", "tokenizer.ggml.model": "gpt2", "quantize.imatrix.file": "y"},
    ],
)
def test_keys_that_say_nothing(metadata: dict[str, Any]) -> None:
    assert described(metadata) == described({})


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.flux": 3}, "llama.flux = 3 is not known for this kind of model. Pass ignore="),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not known"),
        ({"llama.attention.causal": False}, "llama.attention.causal = False is not known"),
        ({"llama.rope.scaling.attn_factor": 1.19}, "llama.rope.scaling.attn_factor = 1.19 is"),
        (LINEAR | {"llama.rope.scaling.yarn_beta_fast": 4.0}, "llama.rope.scaling.yarn_beta_fast = 4.0"),
        (YARN | {"llama.rope.scaling.yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier"),
        ({"clip.thing": 1}, "clip.thing = 1 is not known"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length is 4 and keys have 8"),
        ({"llama.attention.head_count": np.array([4, 4])}, "llama.attention.head_count is array([4, 4]);"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0; it must be from 1 to"),
        ({"llama.embedding_length": "x"}, "llama.embedding_length is 'x'; it must be a whole number"),
        ({"llama.block_count": 1 << 31}, "llama.block_count is 2147483648; it must be from 1 to 4,096"),
        ({"llama.rope.dimension_count": 7}, "7 of the 8 dimensions of a head would rotate"),
        ({"llama.rope.dimension_count": "7"}, "llama.rope.dimension_count is '7'; it must be"),
        ({"llama.rope.freq_base": 0.0}, "llama.rope.freq_base is 0.0; it must be above 0"),
        ({"llama.rope.freq_base": math.nan}, "llama.rope.freq_base is nan; it must be a finite number"),
        (
            {"llama.rope.scaling.type": "yarn2"},
            'llama.rope.scaling.type "yarn2" is not known (linear, dynamic, yarn, llama3, longrope). '
            'Pass ignore=("rope_scaling",) to load without it.',
        ),
        ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling: factor is missing"),
        ({"general.architecture": "qwen9"}, "models of type 'qwen9' are not known yet"),
        ({"general.architecture": 3}, "general.architecture is missing"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_named(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        described(metadata)
    assert f"m.gguf: {said}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_key_has_the_files_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^m.gguf: llama.feed_forward_length is missing.$"):
        described({}, without="llama.feed_forward_length")


def test_a_key_may_be_ignored(tmp_path: Path) -> None:
    theirs = oracle()
    metadata = metadata_of(theirs) | {"llama.flux": 3, "llama.rope.scaling.type": "yarn2"}
    path = write(tmp_path / "m.gguf", metadata, weights_of(theirs))
    model = loading.load(path, ignore=("llama.flux", "rope_scaling")).model
    with torch.no_grad():
        assert_close(model(tokens()), theirs(tokens()).logits)


def test_smollm3_leaves_every_fourth_layer_without_positions() -> None:
    """Its files do not say so: llama.cpp knows it by the name."""
    renamed = {key.replace("llama.", "smollm3."): value for key, value in metadata_of(oracle()).items()}
    metadata = renamed | {
        "general.architecture": "smollm3",
        "smollm3.vocab_size": 61,
        "smollm3.block_count": 8,
    }
    layers = describe_gguf(metadata, {}, "m.gguf").model.decoder.layers  # type: ignore[union-attr]
    rotates = [layer.sublayers[0].branches[0].mixer.position is not None for layer in layers]
    assert rotates == [True, True, True, False] * 2


# the packaged model


@pytest.fixture(scope="module")
def packaged(smollm2_file: Path) -> Iterator[loading.Loaded]:
    yield loading.load(smollm2_file)


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
]


def test_greedy_continuations_equal_transformers_reading_of_the_file(
    packaged: loading.Loaded, smollm2_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qkv.nn import ContiguousCache

    assert packaged.tokenizer is not None
    # needed for placing parts of a model on several devices only, and this is one
    monkeypatch.setattr(transformers.modeling_utils, "is_accelerate_available", lambda: True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_file.parent, gguf_file=smollm2_file.name, dtype=torch.float32
    ).eval()
    for prompt in PROMPTS:
        ids = packaged.tokenizer.encode(prompt)
        wanted = theirs.generate(
            torch.tensor([ids]), max_new_tokens=64, do_sample=False, use_cache=True, eos_token_id=None
        )[0, len(ids) :].tolist()
        cache = ContiguousCache(packaged.model.spec.trunk, 1, len(ids) + 63)
        found, step = [], ids
        with torch.no_grad():
            while len(found) < 64:
                logits = packaged.model(torch.tensor([step]), cache=cache, last_only=True)
                step = [int(logits[0, -1].argmax())]
                found += step
        assert found == wanted, prompt


def test_log_probabilities_after_the_capital_of_france(packaged: loading.Loaded) -> None:
    assert packaged.tokenizer is not None
    with torch.no_grad():
        ids = torch.tensor([packaged.tokenizer.encode("The capital of France is")])
        found = packaged.model(ids)[0, -1].log_softmax(-1)
    for text, wanted in ((" Paris", -0.2581), (" the", -2.7407), (" London", -4.3844)):
        (id,) = packaged.tokenizer.encode(text)
        assert float(found[id]) == pytest.approx(wanted, abs=1e-3)


def perplexity(loaded: loading.Loaded, ids: list[int]) -> float:
    with torch.no_grad():
        logits = loaded.model(torch.tensor([ids]))[0, :-1]
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).exp())


def test_perplexity_of_wikitext(packaged: loading.Loaded, shared_folder: Path) -> None:
    assert packaged.tokenizer is not None
    text = (shared_folder / "data" / "wiki.test.raw").read_text(encoding="utf-8")[:20_000]
    assert perplexity(packaged, packaged.tokenizer.encode(text)[:2048]) == pytest.approx(15.10, abs=0.02)


@pytest.mark.slow
def test_perplexity_of_wikitext_after_a_bos(packaged: loading.Loaded, shared_folder: Path) -> None:
    assert packaged.tokenizer is not None
    text = (shared_folder / "data" / "wiki.test.raw").read_text(encoding="utf-8")[:20_000]
    ids = packaged.tokenizer.encode(text, bos=True)[:2048]
    assert ids[0] == packaged.tokenizer.bos_id
    assert perplexity(packaged, ids) == pytest.approx(15.01, abs=0.02)


def test_the_packaged_model_is_the_published_one(packaged: loading.Loaded) -> None:
    assert packaged.model.spec.parameters() == 134_515_008
    assert packaged.context == 8192
    assert packaged.model.head.weight is packaged.model.decoder.embedding.weight
