"""Six models that many people know by heart: what is said of each is what they know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.inspection import Inspection, diagram
from qkv.inspection.folding import folded
from qkv.inspection.read import Files, inspect_files

GEMMA_3_4B: dict[str, Any] = {  # as published
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
T5_SMALL: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-6,
    "model_type": "t5",
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "relative_attention_num_buckets": 32,
    "vocab_size": 32128,
}
WHISPER_TINY: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["WhisperForConditionalGeneration"],
    "d_model": 384,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "encoder_layers": 4,
    "is_encoder_decoder": True,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "model_type": "whisper",
    "num_mel_bins": 80,
    "torch_dtype": "float32",
    "vocab_size": 51865,
}


def read(config: dict[str, Any], name: str = "model") -> Inspection:
    found = inspect_files(Files(name, config))
    assert found.model is not None, found.unknown
    return found


def published(shared_folder: Path, name: str) -> Inspection:
    return read(json.loads((shared_folder / "configs" / f"{name}_config.json").read_text()))


def lines(found: Inspection, title: str) -> tuple[str, ...]:
    return next(step.lines for step in found.steps if step.title == title)


def test_llama_was_trained_to_8192_before_its_positions_were_scaled(shared_folder: Path) -> None:
    found = published(shared_folder, "meta-llama--Meta-Llama-3.1-8B")
    said = list(found.verdict.lines())
    assert "trained to 8,192 before its positions were scaled (original_max_position_embeddings)" in said
    assert "how far training went on after the positions were scaled" in found.unstated


def test_gemma_3_4b_reads_images_as_256_rows() -> None:
    found = read(GEMMA_3_4B)
    assert found.size == "4,300,079,472 parameters, 8.6 GB in bfloat16"
    assert lines(found, "Tokens")[:4] == (
        "262,208 entries, each a vector of 2,560",
        "embeddings times 50.6, the root of the width",
        "image tower: images of 896 x 896 in patches of 14: 4,096 rows",
        "image tower: 4 x 4 rows averaged, RMSNorm (1 + scale), eps 1e-6, projected to 2,560, "
        "256 rows in place of token 262,144",
    )
    assert lines(found, "Serving")[0] == (
        "139,264 bytes of cache a token in 16 bits, 20,480 once the windows are full: "
        "2.61 GiB at 131,072 tokens"
    )
    assert "all 128 pairs slowed by a factor of 8 (every 6th layer)" in lines(found, "Positions")[1]
    assert lines(found, "Visibility")[0].startswith("every text token sees itself and the 1,023 before it")
    assert lines(found, "Visibility")[-1] == "the rows of one image see one another both ways"


def test_a_length_that_the_file_does_not_hold_is_called_a_default() -> None:
    evidence = read(GEMMA_3_4B).verdict.configured
    assert evidence is not None
    assert evidence.evidence == "the architecture's default, with angles divided by 8"
    held = {**GEMMA_3_4B["text_config"], "max_position_embeddings": 131_072}
    evidence = read({**GEMMA_3_4B, "text_config": held}).verdict.configured
    assert evidence is not None and evidence.evidence.startswith("text_config.max_position_embeddings")


def test_gemma_3_1b_has_one_key_value_head_to_copy() -> None:
    found = read(GEMMA_3_1B)
    assert found.size == "999,885,952 parameters, 2.0 GB in bfloat16"
    assert lines(found, "Serving") == (
        "26,624 bytes of cache a token in 16 bits, 4,096 once the windows are full: "
        "139.00 MiB at 32,768 tokens",
        "splitting over devices copies the one key/value head to each",
    )


def test_gemma_3_runs_five_local_layers_then_a_global_one() -> None:
    found = read(GEMMA_3_4B)
    assert found.model is not None
    fold = folded(found.model.trunk)
    assert [(run.count, len(run.at)) for run in fold.runs] == [(5, 29), (1, 5)]
    assert fold.words() == "5 rounds of 6 layers, then the first 4 once more"


def test_deepseek_v3_is_stored_in_fp8_and_has_a_further_layer(shared_folder: Path) -> None:
    found = published(shared_folder, "deepseek-ai--DeepSeek-V3")
    assert found.size == "671,026,419,200 parameters, stored as fp8"
    size = lines(found, "Size")
    assert "the configuration names 1 more for guessing ahead (MTP), not counted here" in size
    assert (
        "671,026,419,200 parameters, 37,552,297,472 of them used by a token "
        "(36,625,618,432 without the input table)"
    ) in size
    assert "weights packed as fp8, e4m3, 128 x 128 blocks" in size
    assert found.unknown == ()


def test_deepseek_v3_scales_its_scores_for_yarn_and_its_chosen_experts(shared_folder: Path) -> None:
    """(0.1 ln 40 + 1)^2 / sqrt(192) = 0.1352; the cosines carry no factor of their own."""
    found = published(shared_folder, "deepseek-ai--DeepSeek-V3")
    assert lines(found, "Attention")[0].endswith("; scores times 0.1352")
    assert "cosines" not in lines(found, "Positions")[0]
    assert "11 of 32 pairs unchanged, 9 slowed by a factor of 40" in lines(found, "Positions")[0]
    experts = lines(found, "Block")[-1]
    assert "8 for each token from the best 4 of 8 groups, and a shared one of 2,048" in experts
    assert "a bias of its own for choosing alone, chosen weights made to sum to 1, then times 2.5" in experts


def test_deepseek_v3_has_three_dense_layers_then_58_of_experts(shared_folder: Path) -> None:
    model = published(shared_folder, "deepseek-ai--DeepSeek-V3").model
    assert model is not None
    fold = folded(model.trunk)
    assert [(run.count, run.at[0]) for run in fold.runs] == [(3, 0), (58, 3)] and fold.words() == ""


def test_gpt_oss_20b_is_what_its_card_says(shared_folder: Path) -> None:
    """3.6B active without the input table; YaRN x32 warms cosines and sines by 0.1 ln 32 + 1."""
    found = published(shared_folder, "openai--gpt-oss-20b")
    assert found.size == "20,914,757,184 parameters, stored as mxfp4"
    assert "(3,608,307,264 without the input table)" in lines(found, "Size")[1]
    assert lines(found, "Positions")[0].endswith("; cosines and sines times 1.347")
    assert lines(found, "Block")[-1].endswith(
        "each expert a gated clamped swish (x sigmoid(1.702 x), limit 7, up + 1) "
        "feed-forward of 2,880 with biases"
    )
    assert "a learned sink in every head" in lines(found, "Attention")[0]
    assert lines(found, "Serving")[0] == (
        "49,152 bytes of cache a token in 16 bits, 24,576 once the windows are full: "
        "3.00 GiB at 131,072 tokens"
    )
    assert found.model is not None and folded(found.model.trunk).words() == "12 rounds of 2 layers"


def test_t5_shares_its_tables_and_scales_no_scores() -> None:
    found = read(T5_SMALL)
    assert found.size == "60,506,624 parameters"
    assert lines(found, "Tokens")[:2] == (
        "encoder: 32,128 entries, each a vector of 512",
        "decoder: the same table",
    )
    assert all(line.endswith("scores not scaled") for line in lines(found, "Attention"))
    assert lines(found, "Positions")[:2] == (
        "encoder: a learned bias a head for each of 32 buckets of distance to either side (T5); "
        "one table for all these layers",
        "decoder: a learned bias a head for each of 32 buckets of distance into the past (T5); "
        "one table for all these layers",
    )
    assert "encoder: ReLU feed-forward of 2,048 without bias" in lines(found, "Block")
    assert "logits times 0.04419, 1 over the root of the width" in lines(found, "Head")
    assert lines(found, "Serving")[0] == "12,288 bytes of cache a token in 16 bits: 6.00 MiB at 512 tokens"


def test_whisper_tiny_hears_3000_frames() -> None:
    found = read(WHISPER_TINY)
    assert found.size == "37,760,640 parameters, 151.0 MB in float32"
    assert lines(found, "Tokens")[:2] == (
        "encoder: audio of 80 bins, one row every 2 frames",
        "encoder: 2 convolutions of 3 frames, strides 1 and 2, GELU after each",
    )
    assert lines(found, "Positions")[0] == "encoder: a stored table of 1,500 positions, added to the frames"
    assert "the encoder reads at most 1,500 rows, 3,000 frames (its position table)" in found.verdict.notes
    assert lines(found, "Attention")[0].endswith("; bias on queries, values, output")
    assert lines(found, "Serving")[1] == (
        "6,144 bytes more for each row the encoder gives, kept for the whole answer: 8.79 MiB for 1,500"
    )


@pytest.mark.parametrize("width", [60, 80, 110])
def test_text_fits_the_terminal(width: int, shared_folder: Path) -> None:
    every = [read(config) for config in (GEMMA_3_4B, GEMMA_3_1B, T5_SMALL, WHISPER_TINY)]
    every += [published(shared_folder, "deepseek-ai--DeepSeek-V3")]
    for found in every:
        assert max(map(len, found.lines(width))) <= width
    files = shared_folder / "configs"
    names = ("meta-llama--Meta-Llama-3.1-8B", "openai--gpt-oss-20b")
    compared = qkv.compare(*(files / f"{name}_config.json" for name in names))
    assert max(map(len, compared.lines(width))) <= width


def test_the_diagram_gives_what_flows_from_a_tower_and_to_cross_attention() -> None:
    gemma, whisper = read(GEMMA_3_4B).model, read(WHISPER_TINY).model
    assert gemma is not None and whisper is not None
    assert "4,096 x 1,152" in diagram(gemma) and "256 rows in place of" in diagram(gemma)
    assert diagram(gemma).index("image tower") < diagram(gemma).index("262,208 x 2,560")
    assert "(length / 2) x 384" in diagram(whisper)
    assert "from the encoder k 6 x 64; v 6 x 64" in diagram(whisper)
