"""Configurations of Mixtral, Qwen, Gemma, DeepSeek, gpt-oss and Llama 4: small odd ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
    LatentAttention,
    Model,
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
