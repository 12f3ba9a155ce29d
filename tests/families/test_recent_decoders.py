"""Mixtral, Qwen, Gemma, DeepSeek, gpt-oss and Llama 4: counts equal, and what sets each family apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from qkv.errors import ConfigError
from qkv.families import (
    Config,
    Description,
    deepseek,
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    llama4,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_next,
)
from qkv.spec import (
    Attention,
    Causal,
    Chunk,
    ClampedSwish,
    Everything,
    Experts,
    Gated,
    GatedDelta,
    Interpolation,
    Language,
    LatentAttention,
    Llama3,
    LogScale,
    Model,
    Pool,
    RMSNorm,
    Rotary,
    Router,
    SequenceClass,
    Span,
    TokenClass,
    Window,
    Yarn,
    arrangement,
)

MODULES = (
    deepseek, gemma, gemma2, gemma3, gpt_oss, llama4, mixtral, qwen2, qwen2_moe, qwen3, qwen3_next,
)  # fmt: skip
FAMILIES = {kind: module.FAMILY for module in MODULES for kind in module.FAMILY.types}

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "pad_token_id": None,
}
NO_HEAD_DIM = {key: value for key, value in SMALL.items() if key != "head_dim"} | {"num_key_value_heads": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 5e4}
LATENT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 36,
    "intermediate_size": 52,
    "moe_intermediate_size": 11,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_shared_experts": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "pad_token_id": None,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_conv_kernel_dim": 3,
}
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
SEEING_SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "image_size": 56,
    "patch_size": 7,
    "vision_use_head": False,
}

Case = tuple[type, Any]
CASES: dict[str, Callable[[], Case]] = {
    "mixtral": lambda: (hf.MixtralForCausalLM, hf.MixtralConfig()),
    "mixtral, small": lambda: (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=3, sliding_window=7,
                         tie_word_embeddings=True),
    ),
    "qwen2": lambda: (hf.Qwen2ForCausalLM, hf.Qwen2Config()),
    "qwen2, small": lambda: (
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=3,
                       tie_word_embeddings=True, rope_parameters=YARN, max_position_embeddings=128),
    ),
    "qwen2, classes": lambda: (hf.Qwen2ForSequenceClassification, hf.Qwen2Config(**SMALL, num_labels=5)),
    "qwen2_moe": lambda: (hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig()),
    "qwen2_moe, small": lambda: (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig(**NO_HEAD_DIM, **QWEN_EXPERTS, shared_expert_intermediate_size=17, qkv_bias=False,
                          decoder_sparse_step=2, use_sliding_window=True, sliding_window=7,
                          max_window_layers=3, norm_topk_prob=True),
    ),
    "qwen3": lambda: (hf.Qwen3ForCausalLM, hf.Qwen3Config()),
    "qwen3, small": lambda: (
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config(**SMALL, attention_bias=True, use_sliding_window=True, sliding_window=7,
                       max_window_layers=2, tie_word_embeddings=True),
    ),
    "qwen3, tokens": lambda: (hf.Qwen3ForTokenClassification, hf.Qwen3Config(**SMALL)),
    "qwen3_moe": lambda: (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig()),
    "qwen3_moe, small": lambda: (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(**SMALL, **QWEN_EXPERTS, mlp_only_layers=[0, 3], use_sliding_window=True,
                          sliding_window=7),
    ),
    "qwen3_moe, answers": lambda: (
        hf.Qwen3MoeForQuestionAnswering, hf.Qwen3MoeConfig(**SMALL, **QWEN_EXPERTS)
    ),
    "qwen3_next": lambda: (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig()),
    "qwen3_next, small": lambda: (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig(**SMALL | {"head_dim": 16}, **DELTA, **QWEN_EXPERTS,
                           shared_expert_intermediate_size=17, mlp_only_layers=[1]),
    ),
    "gemma": lambda: (hf.GemmaForCausalLM, hf.GemmaConfig()),
    "gemma, small": lambda: (
        hf.GemmaForCausalLM, hf.GemmaConfig(**SMALL, attention_bias=True, tie_word_embeddings=False)
    ),
    "gemma2": lambda: (hf.Gemma2ForCausalLM, hf.Gemma2Config()),
    "gemma2, small": lambda: (
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(**SMALL, attention_bias=True, sliding_window=7, query_pre_attn_scalar=5,
                        attn_logit_softcapping=20.0, final_logit_softcapping=None),
    ),
    "gemma3_text": lambda: (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig()),
    "gemma3_text, small": lambda: (
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(**SMALL, sliding_window=7, sliding_window_pattern=2, tie_word_embeddings=False,
                            final_logit_softcapping=9.0,
                            rope_scaling={"rope_type": "linear", "factor": 8.0}),
    ),
    "gemma3_text, both ways": lambda: (
        hf.Gemma3TextModel,
        hf.Gemma3TextConfig(**SMALL, sliding_window=8, use_bidirectional_attention=True),
    ),
    "gemma3": lambda: (
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(vision_config={"model_type": "siglip_vision_model", "vision_use_head": False},
                        mm_tokens_per_image=49),
    ),
    "gemma3, small": lambda: (
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(text_config=SMALL, vision_config=SEEING_SMALL, mm_tokens_per_image=16,
                        image_token_index=96, tie_word_embeddings=False),
    ),
    "deepseek_v2": lambda: (hf.DeepseekV2ForCausalLM, hf.DeepseekV2Config(num_experts_per_tok=6)),
    "deepseek_v2, small": lambda: (
        hf.DeepseekV2ForCausalLM,
        hf.DeepseekV2Config(**LATENT, q_lora_rank=None, attention_bias=True, mlp_bias=True, n_group=3,
                            topk_group=2, topk_method="group_limited_greedy", first_k_dense_replace=1,
                            routed_scaling_factor=16.0),
    ),
    "deepseek_v3": lambda: (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config()),
    "deepseek_v3, small": lambda: (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(**LATENT, q_lora_rank=13, attention_bias=True, n_group=3, topk_group=2,
                            first_k_dense_replace=2, rope_interleave=False, tie_word_embeddings=True,
                            rms_norm_eps=1e-5, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    ),
    "gpt_oss": lambda: (hf.GptOssForCausalLM, hf.GptOssConfig()),
    "gpt_oss, small": lambda: (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2, attention_bias=False,
                        sliding_window=7, swiglu_limit=5.0),
    ),
    "llama4_text": lambda: (hf.Llama4ForCausalLM, hf.Llama4TextConfig()),
    "llama4_text, small": lambda: (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig(**SMALL, intermediate_size_mlp=44, num_local_experts=5, num_experts_per_tok=2,
                            interleave_moe_layer_step=2, attention_bias=True, attention_chunk_size=7,
                            no_rope_layers=[1, 0, 1, 1, 0], tie_word_embeddings=True, use_qk_norm=False),
    ),
}  # fmt: skip


def read(data: dict[str, Any], *, packed: bool = False) -> Description:
    """As `qkv.families.describe` will read it; `packed` looks away from how weights are stored."""
    family = FAMILIES[data["model_type"]]
    config = Config({**family.defaults.get(data["model_type"], {}), **data}, "config.json")
    if packed:
        config.discard("quantization_config")
    return family.describe(config)


def written(case: Case) -> dict[str, Any]:
    kind, config = case
    return json.loads(json.dumps({**config.to_dict(), "architectures": [kind.__name__]}))


def small(name: str, **changes: Any) -> Description:
    return read({**written(CASES[name]()), **changes})


def attentions(found: Description | Model) -> list[Attention]:
    model = found.model if isinstance(found, Description) else found
    mixers = (mixer for layer in model.trunk.layers for _, mixer in layer.mixers())
    return [mixer for mixer in mixers if isinstance(mixer, Attention)]


def latent(found: Description) -> LatentAttention:
    mixer = found.model.trunk.layers[0].mixers()[0][1]
    assert isinstance(mixer, LatentAttention)
    return mixer


def feed_forwards(found: Description) -> list[Any]:
    return [layer.mixers()[-1][1] for layer in found.model.trunk.layers]


def windows(found: Description) -> list[int]:
    """The places of layers that do not see everything before them."""
    return [i for i, attention in enumerate(attentions(found)) if attention.mask != Causal()]


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        read(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def older(data: dict[str, Any]) -> dict[str, Any]:
    """The same in the spelling of transformers 4."""
    data = dict(data)
    rotation = data.pop("rope_parameters", None)
    if rotation and "full_attention" in rotation:
        data["rope_local_base_freq"] = rotation["sliding_attention"]["rope_theta"]
        rotation = rotation["full_attention"]
    if rotation:
        scaling = {key: value for key, value in rotation.items() if key != "rope_theta"}
        data["rope_theta"] = rotation["rope_theta"]
        data["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if "text_config" in data:
        data["text_config"] = older(data["text_config"])
    return data


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


PUBLISHED = {
    "mistralai--Mixtral-8x7B-v0.1": "Mixtral-8x7B",
    "Qwen--Qwen3-8B": "Qwen3-8B",
    "Qwen--Qwen3-30B-A3B": "Qwen3-30B-A3B",
    "deepseek-ai--DeepSeek-V3": "DeepSeek-V3",
    "openai--gpt-oss-20b": "gpt-oss-20b",
}
READ = {
    "mistralai--Mixtral-8x7B-v0.1": (46_702_792_704, 32_768),
    "Qwen--Qwen3-0.6B": (596_049_920, 40_960),
    "Qwen--Qwen3-8B": (8_190_735_360, 40_960),
    "Qwen--Qwen3-32B": (32_762_123_264, 40_960),
    "Qwen--Qwen3-32B-FP8": (32_762_123_264, 40_960),
    "Qwen--Qwen3-30B-A3B": (30_532_122_624, 40_960),
    "Qwen--Qwen3-235B-A22B": (235_093_634_560, 40_960),
    "XiaomiMiMo--MiMo-7B-Base": (None, 32_768),
    "deepseek-ai--DeepSeek-V3": (671_026_419_200, 163_840),
    "deepseek-ai--DeepSeek-R1": (671_026_419_200, 163_840),
    "deepseek-ai--DeepSeek-V3.2": (671_877_944_064, 163_840),
    "zai-org--GLM-5": (743_911_218_432, 202_752),
    "moonshotai--Kimi-K2-Instruct": (None, 131_072),
    "openai--gpt-oss-20b": (20_914_757_184, 131_072),
    "openai--gpt-oss-120b": (116_829_156_672, 131_072),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (None, 10_485_760),
}


def published(folder: Path, name: str) -> Description:
    return read(json.loads((folder / "configs" / f"{name}_config.json").read_text()), packed=True)


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


GEMMA3_27B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
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
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


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


# what sets each family apart


def test_mixtral_has_no_window_unless_it_says_so() -> None:
    assert windows(small("mixtral")) == []
    found = small("mixtral, small")
    assert windows(found) == [0, 1, 2, 3, 4]
    assert feed_forwards(found)[0] == Experts(5, 3, Gated("silu", 52), Router())
    assert attentions(small("mixtral"))[0].position == Rotary(1e6)


def test_qwen2_windows_begin_where_the_file_says_and_only_if_switched_on() -> None:
    assert windows(small("qwen2, small")) == [3, 4]
    assert windows(small("qwen2, small", layer_types=None)) == [3, 4]
    off = {"layer_types": None, "use_sliding_window": False}
    assert windows(small("qwen2, small", **off)) == []
    assert windows(read({**QWEN25_7B, "use_sliding_window": True})) == []  # longer than the context
    assert "gives no window, and some layers call for one" in refused(
        {**written(CASES["qwen2, small"]()), "use_sliding_window": False}
    )
    attention = attentions(small("qwen2, small"))[0]
    assert attention.projections.bias == "qkv" and attention.projections.norm is None


def test_yarn_multiplies_what_qwen_calls_its_context() -> None:
    assert read(QWEN25_7B).context == 32_768
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    found = read({**QWEN25_7B, "rope_scaling": yarn})
    assert found.context == 131_072
    assert attentions(found)[0].position == Rotary(1e6, scaling=Yarn(4.0, 32768))
    assert "more positions than can be counted" in refused(
        {**QWEN25_7B, "rope_scaling": {**yarn, "factor": 1e30}}
    )


def test_qwen2_moe_windows_are_every_other_one_below_a_limit() -> None:
    found = small("qwen2_moe, small")
    assert windows(found) == [0, 2] == windows(small("qwen2_moe, small", layer_types=None))
    dense, routed = feed_forwards(found)[:2]
    assert dense == Gated("silu", 52) and feed_forwards(found)[3] == routed
    assert routed == Experts(
        5, 2, Gated("silu", 14), Router(normalise=True), shared_expert=Gated("silu", 17), shared_gate=True
    )
    assert feed_forwards(small("qwen2_moe"))[0].router == Router(normalise=False)
    assert attentions(small("qwen2_moe"))[0].projections.bias == "qkv"
    assert attentions(found)[0].projections.bias == ""


def test_qwen3_normalises_each_head() -> None:
    found = small("qwen3, small", rms_norm_eps=1e-5)
    projections = attentions(found)[0].projections
    assert (projections.bias, projections.norm, projections.norm_over) == ("qkvo", RMSNorm(1e-5), "head")
    assert not projections.norm_after_rotation
    assert windows(found) == [2, 3, 4]
    assert attentions(small("qwen3"))[0].head_dim == 128


def test_qwen3_moe_has_windows_in_all_layers_and_experts_in_some(shared_folder: Path) -> None:
    found = small("qwen3_moe, small")
    assert windows(found) == [0, 1, 2, 3, 4]
    assert [isinstance(mixer, Experts) for mixer in feed_forwards(found)] == [False, True, True, False, True]
    large = published(shared_folder, "Qwen--Qwen3-235B-A22B")
    assert feed_forwards(large)[93] == Experts(128, 8, Gated("silu", 1536), Router())
    assert windows(large) == []


def test_qwen3_next_keeps_a_state_in_three_layers_of_four() -> None:
    found = small("qwen3_next, small")
    mixers = [layer.mixers()[0][1] for layer in found.model.trunk.layers]
    delta = GatedDelta(2, 6, 5, 7, convolution=3)
    assert mixers[:3] + mixers[4:] == [delta] * 4
    attention = attentions(found)[0]
    assert attention.position == Rotary(dims=4)
    assert attention.projections.gate == "sigmoid" and attention.projections.norm == RMSNorm(offset=1.0)
    assert arrangement(found.model.trunk.layers[0]) == (
        "pre_norm", {"norm": RMSNorm(offset=1.0), "scale": 1.0, "shared": None}
    )  # fmt: skip
    every = small("qwen3_next, small", layer_types=None, full_attention_interval=2)
    assert len(attentions(every)) == 2
    assert "attention_bias is True" in refused({**written(CASES["qwen3_next"]()), "attention_bias": True})


def test_gemma_says_gelu_and_means_the_tanh_form() -> None:
    for change in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}):
        assert feed_forwards(small("gemma, small", **change))[0] == Gated("gelu_tanh", 52)
    found = small("gemma, small")
    assert found.model.trunk.input.scale == 6.0  # type: ignore[union-attr]
    assert found.model.trunk.norm == RMSNorm(offset=1.0)
    assert arrangement(found.model.trunk.layers[0])[0] == "pre_norm"  # type: ignore[index]
    assert isinstance(found.model.head, Language) and found.model.head.shared is None


def test_gemma2_caps_and_looks_near_in_even_layers() -> None:
    found = read(GEMMA2_9B)
    assert windows(found) == list(range(0, 42, 2))
    assert attentions(found)[0].mask == Causal() & Window(4096)
    score = attentions(found)[0].score
    assert (score.scale, score.cap) == (256**-0.5, 50.0)  # type: ignore[union-attr]
    assert isinstance(found.model.head, Language) and found.model.head.cap == 30.0
    assert arrangement(found.model.trunk.layers[0])[0] == "sandwich"  # type: ignore[index]
    changed = small("gemma2, small")
    score = attentions(changed)[0].score
    assert (score.scale, score.cap) == (5**-0.5, 20.0)  # type: ignore[union-attr]
    assert isinstance(changed.model.head, Language) and changed.model.head.cap is None


def test_gemma3_has_two_bases_and_scales_one() -> None:
    """The 5:1 pattern and both bases are in no file of the first release."""
    found = read(GEMMA3_27B)
    everywhere = [i for i in range(62) if i not in windows(found)]
    assert everywhere == [5, 11, 17, 23, 29, 35, 41, 47, 53, 59]
    near, far = attentions(found)[0], attentions(found)[5]
    assert near.position == Rotary(1e4) and near.mask == Causal() & Window(1024)
    assert far.position == Rotary(1e6, scaling=Interpolation(8.0))
    assert near.score.scale == far.score.scale == 168**-0.5  # type: ignore[union-attr]
    assert near.projections.norm == RMSNorm(offset=1.0)
    assert found.context == 131_072
    assert windows(small("gemma3_text, small")) == [0, 2, 4]
    assert windows(small("gemma3_text, small", layer_types=None, sliding_window_pattern=3)) == [0, 1, 3, 4]


def test_gemma3_sees_through_siglip() -> None:
    (tower,) = read(GEMMA3_27B).model.towers
    assert tower.projector is not None and tower.projector.pool == 16
    assert tower.projector.norm == RMSNorm(1e-6, offset=1.0)
    assert tower.stack.input.rows(0) == 4096 and tower.take_layer == -1
    assert tower.join.token == 262_144  # type: ignore[union-attr]
    assert read({**GEMMA3_27B, "architectures": ["Gemma3Model"]}).model.head is None
    pooled = {**GEMMA3_27B, "vision_config": {**GEMMA3_27B["vision_config"], "vision_use_head": True}}  # type: ignore[dict-item]
    assert read(pooled) == read(GEMMA3_27B)
    assert "do not average" in refused({**GEMMA3_27B, "mm_tokens_per_image": 250})
    assert "only siglip_vision_model is known" in refused(
        {**GEMMA3_27B, "vision_config": {"model_type": "vit"}}
    )


def test_gemma3_both_ways_is_an_encoder_with_half_the_window_to_either_side() -> None:
    found = small("gemma3_text, both ways")
    assert found.model.decoder is None and found.model.head is None
    near = {attention.mask for attention in attentions(found)}
    assert near == {Window(5, 4)}  # transformers: a distance below 8 // 2 + 1
    deep = small("gemma3_text, both ways", num_hidden_layers=6, layer_types=None)
    assert attentions(deep)[5].mask == Everything()


def test_deepseek_v3_scales_all_and_rotates_neighbours(shared_folder: Path) -> None:
    found = published(shared_folder, "deepseek-ai--DeepSeek-V3")
    mixer = latent(found)
    assert mixer.score.scale == pytest.approx(0.1352338, abs=1e-7)
    assert mixer.position == Rotary(
        pairs="interleaved", scaling=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    )
    assert found.irrelevant == ("model.layers.61.*",)
    routed = feed_forwards(found)
    assert routed[2] == Gated("silu", 18432)
    assert routed[3] == Experts(
        256,
        8,
        Gated("silu", 2048),
        Router("sigmoid", scale=2.5, balance=True, groups=8, top_groups=4),
        shared_expert=Gated("silu", 2048),
    )
    changed = latent(small("deepseek_v3, small"))
    assert isinstance(changed.position, Rotary) and changed.position.pairs == "half"
    assert changed.norm == RMSNorm(1e-6) and changed.bias == "ao"  # whatever rms_norm_eps is


def test_deepseek_v2_weighs_by_softmax_and_ranks_groups_by_their_best() -> None:
    found = small("deepseek_v2, small")
    routed = feed_forwards(found)[1]
    assert routed.router == Router(
        "softmax", normalise=False, scale=16.0, groups=3, top_groups=2, group_best=1
    )
    assert routed.shared_expert == Gated("silu", 22, bias=True) and not routed.expert.bias
    assert latent(found).query_rank is None
    plain = feed_forwards(small("deepseek_v2, small", topk_method="greedy"))[1]
    assert plain.router == Router("softmax", normalise=False, scale=16.0)
    data = written(CASES["deepseek_v2, small"]())
    assert "norm_topk_prob is True" in refused({**data, "norm_topk_prob": True})
    assert "moe_layer_freq is 2" in refused({**data, "moe_layer_freq": 2})


def test_a_scale_that_is_not_finite_is_refused() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "mscale": 1e300, "mscale_all_dim": 1e300}
    data = older(written(CASES["deepseek_v3"]()))
    assert "gives no finite scale" in refused({**data, "rope_scaling": scaling})


def test_gpt_oss_has_sinks_a_clamp_and_a_window_in_even_layers(shared_folder: Path) -> None:
    found = published(shared_folder, "openai--gpt-oss-20b")
    near, far = attentions(found)[:2]
    assert near.score.sink and near.mask == Causal() & Window(128)  # type: ignore[union-attr]
    assert far.mask == Causal() and len(windows(found)) == 12
    assert near.position == Rotary(150_000.0, scaling=Yarn(32.0, 4096, truncate=False))
    assert near.projections.bias == "qkvo"
    expert = Gated(ClampedSwish(1.702, 7.0, 1.0), 2880, bias=True)
    assert feed_forwards(found)[0] == Experts(32, 4, expert, Router(bias=True))
    assert found.model.parameters(active=True, embedding=False) == 3_608_307_264
    assert feed_forwards(small("gpt_oss, small"))[0].expert.activation.limit == 5.0


def test_llama4_looks_around_or_far_and_scales_what_experts_read(shared_folder: Path) -> None:
    found = published(shared_folder, "meta-llama--Llama-4-Scout-17B-16E-Instruct")
    local, everywhere = attentions(found)[2:4]
    assert local.mask == Causal() & Chunk(8192) and everywhere.mask == Causal()
    assert local.position == Rotary(500_000.0, pairs="interleaved", scaling=Llama3(16.0, 1.0, 1.0, 8192))
    assert local.projections.norm == RMSNorm(1e-5, scale=False) and local.projections.norm_after_rotation
    assert everywhere.position is None and everywhere.projections.norm is None
    assert everywhere.score.query_scale == LogScale(8192, 0.1)  # type: ignore[union-attr]
    assert local.score.query_scale is None  # type: ignore[union-attr]
    assert feed_forwards(found)[0].router == Router("sigmoid", normalise=False, scales="input")
    assert isinstance(found.model.head, Language) and found.model.towers == ()
    with torch.device("meta"):
        text = hf.Llama4ForCausalLM(hf.Llama4TextConfig())
    assert found.model.parameters() == sum(parameter.numel() for parameter in text.parameters())


def test_llama4_lists_decide() -> None:
    found = small("llama4_text, small")
    turning = [attention.position is not None for attention in attentions(found)]
    assert turning == [True, False, True, True, False]
    assert windows(found) == [0, 2, 3]
    assert {attention.projections.norm for attention in attentions(found)} == {None}
    dense = [isinstance(mixer, Gated) for mixer in feed_forwards(found)]
    assert dense == [True, False, True, False, True] and feed_forwards(found)[0].hidden == 44
    listed = feed_forwards(small("llama4_text, small", moe_layers=[4]))
    assert [isinstance(mixer, Experts) for mixer in listed] == [False, False, False, False, True]
    still = attentions(small("llama4_text, small", attn_temperature_tuning=False))[1]
    assert still.score.query_scale is None  # type: ignore[union-attr]
    assert attentions(small("llama4_text, small", attn_temperature_tuning=4))[1] == attentions(found)[1]


def test_heads_follow_the_architecture() -> None:
    assert small("qwen2, classes").model.head == SequenceClass(5, Pool("last"), bias=False)
    assert small("qwen3, tokens").model.head == TokenClass(2)
    assert small("qwen3_moe, answers").model.head == Span()
    assert small("mixtral", architectures=["MixtralModel"]).model.head is None
    assert "names 'MixtralForDivination'" in refused(
        {**written(CASES["mixtral"]()), "architectures": ["MixtralForDivination"]}
    )


def test_what_does_not_fit_together_is_refused() -> None:
    data = written(CASES["mixtral, small"]())
    assert "there are only 5 experts" in refused({**data, "num_experts_per_tok": 6})
    assert "is no multiple of num_key_value_heads" in refused({**data, "num_key_value_heads": 4})
    data = written(CASES["qwen3_next, small"]())
    assert "is no multiple of linear_num_key_heads" in refused({**data, "linear_num_key_heads": 4})
    data = written(CASES["deepseek_v3, small"]())
    assert "do not fit together" in refused({**data, "topk_group": 4})
    data = written(CASES["llama4_text, small"]())
    assert "attention_chunk_size is missing" in refused({**data, "attention_chunk_size": None})
