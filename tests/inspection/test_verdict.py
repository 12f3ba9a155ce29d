"""The context a model really supports: every known trap gets the right verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qkv.inspection.read import Files, inspect_files
from qkv.inspection.verdict import Verdict, last_bucket_start
from qkv.spec import Buckets

LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def verdict_of(config: dict[str, Any], tokenizer: dict[str, Any] | None = None) -> Verdict:
    found = inspect_files(Files("model", config, tokenizer or {}))
    assert found.model is not None, found.unknown
    return found.verdict


def positions(length: Any) -> int | None:
    return None if length is None else length.positions


def read(shared_folder: Path, name: str) -> dict[str, Any]:
    return json.loads((shared_folder / "configs" / f"{name}_config.json").read_text())


@pytest.mark.parametrize(
    ("name", "trained", "configured"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", 8192, 131_072),
        ("openai--gpt-oss-20b", 4096, 131_072),
        ("deepseek-ai--DeepSeek-V3", 4096, 163_840),
        ("moonshotai--Kimi-K2-Instruct", 4096, 131_072),
    ],
)
def test_a_length_that_is_extended_already(
    shared_folder: Path, name: str, trained: int, configured: int
) -> None:
    """max_position_embeddings holds the extension; no factor is multiplied onto it."""
    found = verdict_of(read(shared_folder, name))
    assert (positions(found.trained), positions(found.configured)) == (trained, configured)
    assert found.hard is None and not found.contradictions


def test_a_length_that_is_the_original_one() -> None:
    """Qwen2.5 Instruct: 32,768 as shipped; 131,072 only after adding a scaling by hand."""
    qwen = {
        **LLAMA,
        "model_type": "qwen2",
        "max_position_embeddings": 32_768,
        "rope_theta": 1e6,
        "sliding_window": 131_072,
        "use_sliding_window": False,
        "max_window_layers": 4,
    }
    found = verdict_of(qwen, {"model_max_length": 131_072})
    assert (positions(found.trained), found.configured) == (32_768, None)
    assert positions(found.opt_in) == 131_072
    assert found.opt_in is not None and "x4 added by hand" in found.opt_in.evidence
    assert found.windows == ()
    assert any("use_sliding_window is false" in note for note in found.notes)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_names_of_the_kind(key: str) -> None:
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    found = verdict_of({**LLAMA, "max_position_embeddings": 32_768, "rope_scaling": scaling})
    assert (positions(found.trained), positions(found.configured)) == (8192, 32_768)


def test_yarn_is_original_times_factor_and_a_different_promise_is_a_contradiction() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    found = verdict_of({**LLAMA, "max_position_embeddings": 65_536, "rope_scaling": scaling})
    assert positions(found.configured) == 32_768
    assert found.contradictions == ("max_position_embeddings says 65,536, YaRN x4 of 8,192 gives 32,768",)


def test_a_window_over_the_maximum_is_none() -> None:
    """Phi-3-mini-128k: window 262,144 of 131,072; LongRoPE's factors change at 4,097."""
    phi = {
        "model_type": "phi3",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "original_max_position_embeddings": 4096,
        "sliding_window": 262_144,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.0 + i for i in range(8)],
        },
    }
    found = verdict_of(phi)
    assert found.windows == ()
    assert any("262,144 has no effect" in note for note in found.notes)
    assert (positions(found.trained), positions(found.configured)) == (4096, 131_072)
    assert positions(found.regime_change) == 4097
    assert any(line.startswith("regime change at 4,097") for line in found.lines())


def test_a_window_in_every_layer_lets_influence_travel() -> None:
    """Mistral v0.1: 32,768 promised, 4,096 seen in each of 32 layers: 32 * 4095 + 1 positions."""
    mistral = {
        **LLAMA,
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
    }
    found = verdict_of(mistral)
    assert positions(found.trained) == 32_768
    assert found.windows == (("window", 4096, tuple(range(32))),)
    assert found.reach == 131_041
    assert "window of 4,096 keys in every layer" in list(found.lines())


def test_mixtral_has_no_window(shared_folder: Path) -> None:
    found = verdict_of(read(shared_folder, "mistralai--Mixtral-8x7B-v0.1"))
    assert found.windows == () and positions(found.trained) == 32_768


def test_gemma_2_alternates() -> None:
    """Even layers see 4,096, odd ones everything."""
    gemma = {
        "model_type": "gemma2",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 16,
    }
    assert verdict_of(gemma).windows == (("window", 4096, (0, 2, 4)),)


def test_gemma_3_has_ten_global_layers_of_62_though_the_file_holds_no_pattern() -> None:
    gemma = {
        "model_type": "gemma3_text",
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 62,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 1024,
        "max_position_embeddings": 131_072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    found = verdict_of(gemma)
    ((kind, window, layers),) = found.windows
    assert (kind, window, len(layers)) == ("window", 1024, 52)
    assert not {5, 11, 17, 23, 29, 35, 41, 47, 53, 59} & set(layers)
    assert positions(found.configured) == 131_072 and found.reach is None
    assert "52 of 62 attention layers rotate without the scaling" in found.notes


def test_a_tokenizer_limit_of_1e30_is_not_set() -> None:
    found = verdict_of({**LLAMA, "max_position_embeddings": 4096}, {"model_max_length": 1e30})
    assert found.tokenizer is None and not found.contradictions


def test_a_tokenizer_that_says_less_is_a_contradiction() -> None:
    found = verdict_of({**LLAMA, "max_position_embeddings": 4096}, {"model_max_length": 1024})
    assert found.tokenizer == 1024
    assert found.contradictions == ("the tokenizer's model_max_length says 1,024, the configuration 4,096",)


def test_the_context_of_a_gguf_is_the_trained_one_combined_with_its_scaling() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.vocab_size": 1000,
        "llama.context_length": 8192,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    plain = inspect_files(Files("m.gguf", {}, gguf=metadata))
    assert (plain.context, positions(plain.verdict.trained)) == (8192, 8192)
    scaled = {
        **metadata,
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 8192,
    }
    found = inspect_files(Files("m.gguf", {}, gguf=scaled))
    assert (positions(found.verdict.trained), positions(found.verdict.configured)) == (8192, 32_768)
    assert found.context == 32_768


def test_t5_has_no_table_and_no_limit() -> None:
    t5 = {
        "model_type": "t5",
        "vocab_size": 1000,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "n_positions": 512,
        "is_encoder_decoder": True,
        "architectures": ["T5ForConditionalGeneration"],
    }
    found = verdict_of(t5)
    assert found.hard is None and positions(found.trained) == 512
    assert found.notes == (
        "encoder: distances from 91 on share the last of 16 buckets on either side",
        "decoder: distances from 113 on share the last of 32 buckets",
    )


def test_the_last_bucket_starts_where_t5_puts_it() -> None:
    """D13: 91 in both directions, 113 for the past."""
    assert last_bucket_start(Buckets(32, 128, bidirectional=True)) == 91
    assert last_bucket_start(Buckets(32, 128, bidirectional=False)) == 113


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ({"model_type": "gpt2"}, 1024),
        ({"model_type": "bert", "vocab_size": 30522}, 512),
        ({"model_type": "roberta", "vocab_size": 50265, "max_position_embeddings": 514}, 512),
        ({"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048}, 2048),
    ],
)
def test_a_position_table_is_a_hard_limit(config: dict[str, Any], rows: int) -> None:
    """Its rows, less the offset."""
    import transformers

    kind = config["model_type"]
    full = {**transformers.AutoConfig.for_model(kind).to_dict(), **config}
    found = inspect_files(Files(kind, {k: v for k, v in full.items() if v is not None}))
    assert found.model is not None, found.unknown
    assert positions(found.verdict.hard) == rows and found.context == rows


@pytest.mark.parametrize("kind", ["bloom", "mpt"])
def test_alibi_has_a_training_length_and_no_limit(kind: str) -> None:
    import transformers

    full = transformers.AutoConfig.for_model(kind).to_dict()
    length = {"bloom": "seq_length", "mpt": "max_seq_len"}[kind]
    found = verdict_of({**full, length: 2048})
    assert found.hard is None and positions(found.trained) == 2048
    assert found.trained is not None and "no limit of its own" in found.trained.evidence


def test_the_key_value_heads_of_a_latent_mean_nothing_for_its_cache(shared_folder: Path) -> None:
    """DeepSeek-V3 names 128 key/value heads; it keeps 576 values a layer: 70,272 bytes a token."""
    config = read(shared_folder, "deepseek-ai--DeepSeek-V3")
    assert config["num_key_value_heads"] == 128
    found = inspect_files(Files("model", config))
    assert found.model is not None and found.model.cache_bytes(1) == 70_272
    other = inspect_files(Files("model", {**config, "num_key_value_heads": 64}))
    assert other.model is not None and other.model.cache_bytes(1) == 70_272
