"""Nemotron-H, Qwen3.5, DeepSeek-V3.2, GLM-5, MiniMax-M2, MiMo-V2, Gemma 4 and their kin: counts and caches.

Whole models of published sizes are counted against transformers, built without memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from qkv.errors import ConfigError, UnsupportedError
from qkv.families import Record, describe
from qkv.inspection import diagram
from qkv.inspection.read import Files, inspect_files
from qkv.nn.build import build
from qkv.nn.model import Transformer
from qkv.spec import (
    Attention,
    Causal,
    Experts,
    GatedDelta,
    LatentAttention,
    LogScale,
    Model,
    Proportional,
    Replace,
    Rotary,
    StateSpace,
    Window,
)

NANO = {
    "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "vocab_size": 131_072,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
    "intermediate_size": 1856, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
    "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "max_position_embeddings": 262_144, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, 1e308],
}  # fmt: skip
_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
            "moe_shared_expert_intermediate_size", "routed_scaling_factor")  # fmt: skip
DENSE = {
    **{key: value for key, value in NANO.items() if key not in _EXPERTS}, "hidden_size": 8192,
    "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-",
    "num_hidden_layers": 118, "num_attention_heads": 64, "num_key_value_heads": 8, "mamba_num_heads": 256,
    "ssm_state_size": 256, "intermediate_size": 32_768,
    "max_position_embeddings": 8192,
}  # fmt: skip
DELTA_27B = {
    "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 248_320,
    "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "max_position_embeddings": 262_144,
    "attn_output_gate": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True},
}  # fmt: skip
DELTA_35B = {
    "model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 248_320,
    "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 256,
    "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262_144, "rope_parameters": DELTA_27B["rope_parameters"],
}  # fmt: skip
SPARSE = {
    "model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"], "vocab_size": 129_280,
    "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "max_position_embeddings": 163_840, "index_topk": 2048,
    "index_head_dim": 128, "index_n_heads": 64,
}  # fmt: skip
GLM = {
    "model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "vocab_size": 154_880,
    "hidden_size": 6144, "intermediate_size": 12_288, "num_hidden_layers": 78, "num_attention_heads": 64,
    "num_key_value_heads": 64, "max_position_embeddings": 202_752,
}  # fmt: skip
SHARING = {**GLM, "index_topk_freq": 4, "index_skip_topk_offset": 3, "max_position_embeddings": 1_048_576}
MINIMAX = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "vocab_size": 200_064,
    "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48,
    "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64, "num_local_experts": 256,
    "num_experts_per_tok": 8, "max_position_embeddings": 204_800,
}  # fmt: skip
MIMO = {
    "model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"], "vocab_size": 152_576,
    "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 4, "swa_num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128,
    "sliding_window": 128, "sliding_window_size": 128, "layernorm_epsilon": 1e-5, "rope_theta": 5_000_000,
    "swa_rope_theta": 10_000, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 2048, "n_shared_experts": None, "routed_scaling_factor": None,
    "max_position_embeddings": 262_144,
}  # fmt: skip
GEMMA_26B = {
    "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144,
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512,
    "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704, "sliding_window": 1024, "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262_144, "final_logit_softcapping": 30.0, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}},
}  # fmt: skip
GEMMA_31B = {
    **GEMMA_26B, "hidden_size": 5376, "intermediate_size": 21_504, "num_hidden_layers": 60,
    "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
}  # fmt: skip
MINISTRAL = {
    "model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "vocab_size": 131_072,
    "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 262_144,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                        "original_max_position_embeddings": 16_384},
}  # fmt: skip
BIGCODE = {
    "model_type": "gpt_bigcode", "architectures": ["GPTBigCodeForCausalLM"], "vocab_size": 49_280,
    "n_embd": 2048, "n_head": 16, "n_inner": 8192, "n_layer": 24, "n_positions": 2048,
}  # fmt: skip
XLM = {
    "model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"], "vocab_size": 250_002,
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip

# name: the file, its parameters, and bytes of cache for a further token once windows are full
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "nemotron-3-nano": (NANO, 31_577_940_288, 6144),
    "nemotron-h-56b": (DENSE, 56_324_350_464, 40_960),
    "qwen3.5-27b": (DELTA_27B, 26_895_998_464, 65_536),
    "qwen3.5-35b": (DELTA_35B, 34_660_610_688, 20_480),
    "deepseek-v3.2": (SPARSE, 671_877_944_064, 85_888),
    "glm-5": (GLM, 743_911_218_432, 109_824),
    "glm-5.2": (SHARING, 743_377_019_904, 95_232),
    "minimax-m2": (MINIMAX, 228_689_764_864, 253_952),
    "minimax-m2-small": ({**MINIMAX, "num_hidden_layers": 3, "head_dim": 64}, 12_169_281_792, 6144),
    "mimo-v2-flash": (MIMO, 308_778_780_864, 23_040),
    "mimo-v2-flash-small": (
        {**MIMO, "num_hidden_layers": 7, "attention_value_scale": None}, 40_762_406_720, 5120),
    "gemma-4-26b": (GEMMA_26B, 25_233_141_790, 20_480),
    "gemma-4-31b": (GEMMA_31B, 30_697_345_340, 81_920),
    "ministral-3b": (MINISTRAL, 3_429_006_336, 106_496),
    "ministral-untied": ({**MINISTRAL, "tie_word_embeddings": False}, 3_831_659_520, 106_496),
    "gpt-bigcode": (BIGCODE, 1_124_886_528, 12_288),
    "gpt-bigcode-many": ({**BIGCODE, "multi_query": False}, 1_313_722_368, 196_608),
    "xlm-roberta": (XLM, 278_295_186, 0),
    "camembert": ({**XLM, "model_type": "camembert", "architectures": ["CamembertForMaskedLM"],
                   "vocab_size": 32_005}, 110_655_493, 0),
}  # fmt: skip
BUFFERS = ("e_score_correction_bias", "layer_scalar")  # learned, or kept, though no parameters there


def model(data: dict[str, Any]) -> Model:
    return describe(data).model


def mixers(data: dict[str, Any]) -> list[Any]:
    """The first mixer of each layer."""
    decoder = model(data).decoder
    assert decoder is not None
    return [layer.sublayers[0].branches[0].mixer for layer in decoder.layers]


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_cache(name: str) -> None:
    data, parameters, last = PUBLISHED[name]
    found = model(data)
    assert found.parameters() == parameters
    assert found.cache_bytes(2001) - found.cache_bytes(2000) == last


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_counts_the_same(name: str) -> None:
    data, parameters, _ = PUBLISHED[name]
    settings = {key: value for key, value in data.items() if key not in ("model_type", "time_step_limit")}
    config = hf.AutoConfig.for_model(data["model_type"], **settings)
    with torch.device("meta"):
        theirs = getattr(hf, data["architectures"][0])(config)
    kept = sum(values.numel() for key, values in theirs.named_buffers() if key.endswith(BUFFERS))
    assert sum(values.numel() for values in theirs.parameters()) + kept == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_all_of_it_is_inspected(name: str) -> None:
    """In words and in a picture, and no key is left over."""
    data, _, _ = PUBLISHED[name]
    found = inspect_files(Files(name, data))
    assert found.model is not None and found.unknown == ()
    assert "parameters" in str(found) and found.data()["name"] == name
    assert diagram(found.model).startswith("<svg")


@pytest.mark.parametrize("name", ["nemotron-3-nano", "glm-5.2", "gemma-4-26b", "qwen3.5-27b"])
def test_the_context_is_what_the_file_says(name: str) -> None:
    data, _, _ = PUBLISHED[name]
    found = inspect_files(Files(name, data)).verdict
    assert found.hard is None and found.configured is None and found.trained is not None
    assert found.trained.positions == data["max_position_embeddings"]


def test_nemotron_h_is_a_branch_a_layer() -> None:
    kinds = [type(mixer) for mixer in mixers(NANO)]
    assert (kinds.count(StateSpace), kinds.count(Attention), kinds.count(Experts)) == (23, 6, 23)
    assert all(mixer.position is None for mixer in mixers(NANO) if isinstance(mixer, Attention))
    words = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    older = NANO["hybrid_override_pattern"]
    assert isinstance(older, str)
    newer = {key: value for key, value in NANO.items() if key != "hybrid_override_pattern"}
    assert model({**newer, "layers_block_type": [words[letter] for letter in older]}) == model(NANO)
    # 23 states of 64 x 64 x 128 in fp32, and three inputs of 6,144 channels
    assert model(NANO).cache_bytes(0) == 23 * (4 * 64 * 64 * 128 + 2 * 3 * 6144)


def test_a_latent_narrows_what_experts_read() -> None:
    wide, narrow = model(NANO), model({**NANO, "moe_latent_size": 1024})
    each = 23 * (2 * 128 * 1856 * (2688 - 1024) - 2 * 1024 * 2688)
    assert wide.parameters() - narrow.parameters() == each


@pytest.mark.parametrize("limit", [[0.001, 1e308], [0.0, 0.1], [0.0]])
def test_bounds_on_a_states_step_are_refused(limit: list[float]) -> None:
    with pytest.raises(ConfigError, match="time_step_limit"):
        describe({**NANO, "time_step_limit": limit})


def test_qwen3_5_takes_turns_between_three_axes() -> None:
    found = mixers(DELTA_27B)
    assert [isinstance(mixer, GatedDelta) for mixer in found[:4]] == [True, True, True, False]
    position = found[3].position
    assert isinstance(position, Rotary) and position.axes is not None and position.dims == 64
    assert position.axes.sections == (11, 11, 10) and found[3].projections.gate == "sigmoid"
    assert position.axes.of_pairs()[-5:] == (0, 1, 2, 0, 1)
    with pytest.raises(ConfigError, match="mrope_section"):
        rope = {**DELTA_27B["rope_parameters"], "mrope_section": [8, 12, 12]}  # type: ignore[dict-item]
        describe({**DELTA_27B, "rope_parameters": rope})


def test_an_indexer_chooses_2048_keys() -> None:
    found = mixers(SPARSE)[0]
    assert isinstance(found, LatentAttention) and found.indexer is not None
    assert (found.indexer.heads, found.indexer.top_k, found.indexer.pairs) == (64, 2048, "half")
    assert mixers(GLM)[0].indexer.pairs == "interleaved"
    # a query from the latent of 1,536, a key and 64 weights from the stream, a norm with its bias
    sizes = sum(t.size for t in found.indexer.tensors(7168, 1536))
    assert sizes == 64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168
    assert found.indexer.chosen(Causal(), 2048) == 2048 * 2049 // 2
    assert found.indexer.chosen(Causal(), 5000) == 2048 * 2049 // 2 + 2952 * 2048
    assert found.indexer.chosen(Causal() & Window(5), 5000) == (Causal() & Window(5)).pairs(5000)


def test_what_is_chosen_costs_less_than_all() -> None:
    dense, sparse = {**SPARSE, "model_type": "deepseek_v3"}, mixers(SPARSE)[0]
    dense = {key: value for key, value in dense.items() if not key.startswith("index")}
    whole = mixers(dense)[0]
    pairs, kept, each = 5000 * 5001 // 2, 2048 * 2049 // 2 + 2952 * 2048, 2 * 128 * (128 + 64 + 128)
    assert whole.mixing_flops(5000, 0) == each * pairs
    assert sparse.mixing_flops(5000, 0) == each * kept + 2 * 64 * 129 * pairs


def test_glm_5_2_shares_a_choice_among_four_layers() -> None:
    owns = [mixer.indexer.own for mixer in mixers(SHARING)]
    assert [i for i, own in enumerate(owns) if own] == [0, 1, 2, *range(6, 78, 4)]
    listed = {**GLM, "indexer_types": ["full" if own else "shared" for own in owns]}
    assert model(listed) == model({**SHARING, "max_position_embeddings": 202_752})
    pattern = "".join("F" if own else "S" for own in owns)
    assert model({**GLM, "index_topk_pattern": pattern}) == model(listed)
    with pytest.raises(ConfigError, match="no choice to share"):
        describe({**GLM, "index_topk_pattern": "S" * 78})


def test_an_indexer_is_described_and_not_run() -> None:
    with pytest.raises(UnsupportedError, match="indexer"):
        build(mixers({**SPARSE, "num_hidden_layers": 4, "hidden_size": 64})[0], 64)


def test_mimo_sees_the_token_and_128_before_it() -> None:
    full, local = mixers(MIMO)[:2]
    assert local.mask == Causal() & Window(129) and full.mask == Causal()
    assert (full.kv_heads, local.kv_heads, local.value_dim) == (4, 8, 128)
    assert (full.score.sink, local.score.sink) == (False, True)
    assert (full.position.theta, local.position.theta, local.position.dims) == (5e6, 1e4, 64)
    assert full.projections.value_scale == 0.707


def test_gemma_4_makes_values_of_keys_where_it_sees_all() -> None:
    local, full = mixers(GEMMA_26B)[4:6]
    assert (local.kv_heads, local.head_dim, full.kv_heads, full.head_dim) == (8, 256, 2, 512)
    assert full.projections.values_are_keys and not local.projections.values_are_keys
    assert full.position.scaling == Proportional(0.25) and local.position.scaling is None
    overrides = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    older = ("global_head_dim", "num_global_key_value_heads")
    newer = {key: value for key, value in GEMMA_26B.items() if key not in older}
    assert model({**newer, "per_layer_config": overrides}) == model(GEMMA_26B)
    with pytest.raises(ConfigError, match="per_layer_config"):
        describe({**newer, "per_layer_config": {"4": {"head_dim": 512}}})
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        with pytest.raises(ConfigError, match=key):
            describe({**GEMMA_26B, key: 3})


def test_ministral_grows_from_where_it_was_trained() -> None:
    assert mixers(MINISTRAL)[0].score.query_scale == LogScale(16_384, 0.1, first=0)
    assert describe(MINISTRAL).context == 262_144


def test_kimi_k2_5_is_counted_by_its_text() -> None:
    text = {
        "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 163_840,
        "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 262_144,
        "routed_scaling_factor": 2.827,
    }  # fmt: skip
    record = Record()
    found = describe({"model_type": "kimi_k25", "text_config": text, "vision_config": {}}, record=record)
    assert found.model.parameters() == 1_026_408_232_448
    assert record.unknown == {"vision_config": {}}


def test_internlm_has_a_bias_on_every_projection() -> None:
    llama = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 103_168,
        "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    found = model({**llama, "model_type": "internlm", "bias": True})
    assert found.parameters() == model(llama).parameters() + 32 * 4 * 4096
    with pytest.raises(ConfigError, match="bias"):
        describe({**llama, "bias": True})


def test_experts_of_qwen3_vl() -> None:
    text = {
        "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151_936,
        "max_position_embeddings": 262_144,
    }  # fmt: skip
    file = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"out_hidden_size": 2048}}
    record = Record()
    found = describe(file, record=record).model
    towers = sum(tensor.size for name, tensor in found.weights().items() if name.startswith("towers."))
    assert found.parameters() - towers == 30_532_122_624


def test_rows_of_an_image_that_see_one_another_are_not_run() -> None:
    """Gemma 3's: what is not run is refused, and a text alone is run."""
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 12, "intermediate_size": 20, "image_size": 28,
        "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
    }  # fmt: skip
    text = {
        "model_type": "gemma3_text", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50,
        "sliding_window": 4,
    }  # fmt: skip
    file = {"model_type": "gemma3", "text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    found = model({**file, "image_token_index": 7})
    assert isinstance(found.towers[0].join, Replace) and found.towers[0].join.both_ways
    network = Transformer(found)
    for values in network.parameters():
        values.data.normal_(std=0.1)
    assert network(torch.tensor([[1, 2, 3]])).shape == (1, 3, 50)
    with pytest.raises(UnsupportedError, match="both ways"):
        network(torch.tensor([[1, 7, 7, 7, 7]]), features=torch.zeros(1, 3, 28, 28))
