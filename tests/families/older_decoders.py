"""Configurations of GPT-2 to GLM-4: small odd ones, those of their classes, and published files."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
import transformers as hf

from qkv.families import (
    bloom,
    cohere,
    falcon,
    glm4,
    gpt2,
    gpt_neox,
    gptj,
    mpt,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    phi3,
    stablelm,
    starcoder2,
)
from qkv.families.config import Config
from qkv.families.family import Description

MODULES = (
    gpt2, gptj, gpt_neox, opt, bloom, mpt, falcon, phi, phi3, stablelm, starcoder2, cohere, olmo, olmo2,
    olmoe, glm4,
)  # fmt: skip
FAMILIES = {kind: module.FAMILY for module in MODULES for kind in module.FAMILY.types}


def read(data: dict[str, Any], ignore: tuple[str, ...] = ()) -> Description:
    family = FAMILIES[data["model_type"]]
    return family.describe(
        Config({**family.defaults.get(data["model_type"], {}), **data}, "config.json", ignore)
    )


class Case(NamedTuple):
    config: Any
    model: Any
    changes: dict[str, Any] = {}  # noqa: RUF012 (never changed)

    def file(self) -> dict[str, Any]:
        """As it is saved: through text, with the name of the class."""
        config = self.config(**self.changes)
        return {**json.loads(json.dumps(config.to_dict())), "architectures": [self.model.__name__]}

    def counted(self) -> int:
        with torch.device("meta"):
            found: int = self.model(self.config(**self.changes)).num_parameters()
        return found


def sizes(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": 97,
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "max_position_embeddings": 30,
        "pad_token_id": None,
    } | more


NANO = {"vocab_size": 97, "n_embd": 35, "n_layer": 3, "n_head": 5, "n_positions": 30}
FALCON = {"vocab_size": 97, "hidden_size": 36, "num_hidden_layers": 3, "num_attention_heads": 6}
OPT = {
    "vocab_size": 97,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "ffn_dim": 52,
    "max_position_embeddings": 30,
    "pad_token_id": None,
}
SMALL: dict[str, Case] = {
    "gpt2": Case(hf.GPT2Config, hf.GPT2LMHeadModel, {**NANO, "n_inner": 41, "tie_word_embeddings": False}),
    "gptj": Case(hf.GPTJConfig, hf.GPTJForCausalLM, {**NANO, "n_embd": 30, "rotary_dim": 4, "n_inner": 41}),
    "gptj, tied": Case(
        hf.GPTJConfig,
        hf.GPTJForCausalLM,
        {**NANO, "n_embd": 30, "rotary_dim": 4, "tie_word_embeddings": True},
    ),
    "gpt_neox": Case(
        hf.GPTNeoXConfig,
        hf.GPTNeoXForCausalLM,
        sizes(attention_bias=False, tie_word_embeddings=True, rotary_pct=0.5, use_parallel_residual=False),
    ),
    "opt": Case(hf.OPTConfig, hf.OPTForCausalLM, {**OPT, "enable_bias": False, "tie_word_embeddings": False}),
    "opt, plain norms": Case(
        hf.OPTConfig,
        hf.OPTForCausalLM,
        {**OPT, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True},
    ),
    "opt, 350m's shape": Case(
        hf.OPTConfig,
        hf.OPTForCausalLM,
        {**OPT, "word_embed_proj_dim": 14, "do_layer_norm_before": False},
    ),
    "bloom": Case(
        hf.BloomConfig,
        hf.BloomForCausalLM,
        {"vocab_size": 97, "hidden_size": 30, "n_layer": 3, "n_head": 5, "tie_word_embeddings": False},
    ),
    "mpt": Case(
        hf.MptConfig,
        hf.MptForCausalLM,
        {
            "vocab_size": 97,
            "d_model": 30,
            "n_layers": 3,
            "n_heads": 5,
            "max_seq_len": 40,
            "attn_config": {"clip_qkv": 6.0, "softmax_scale": 0.3},
        },
    ),
    "falcon, 7b's shape, after one another": Case(
        hf.FalconConfig,
        hf.FalconForCausalLM,
        {**FALCON, "parallel_attn": False, "bias": True, "ffn_hidden_size": 41, "tie_word_embeddings": False},
    ),
    "falcon, many heads": Case(
        hf.FalconConfig, hf.FalconForCausalLM, {**FALCON, "multi_query": False, "bias": True}
    ),
    "falcon, 40b's shape": Case(
        hf.FalconConfig,
        hf.FalconForCausalLM,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, 11b's shape": Case(
        hf.FalconConfig,
        hf.FalconForCausalLM,
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1},
    ),
    "phi": Case(
        hf.PhiConfig,
        hf.PhiForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True),
    ),
    "phi, normalised": Case(
        hf.PhiConfig,
        hf.PhiForCausalLM,
        sizes(qk_layernorm=True, num_key_value_heads=1, partial_rotary_factor=0.4),
    ),
    "phi3": Case(
        hf.Phi3Config,
        hf.Phi3ForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, head_dim=10, sliding_window=7),
    ),
    "phi3, partial, tied": Case(
        hf.Phi3Config,
        hf.Phi3ForCausalLM,
        sizes(num_key_value_heads=1, tie_word_embeddings=True, partial_rotary_factor=0.5),
    ),
    "stablelm": Case(
        hf.StableLmConfig,
        hf.StableLmForCausalLM,
        sizes(num_attention_heads=6, hidden_size=48, num_key_value_heads=2, qk_layernorm=True,
              use_qkv_bias=True),
    ),
    "stablelm, parallel": Case(
        hf.StableLmConfig,
        hf.StableLmForCausalLM,
        sizes(num_key_value_heads=3, use_parallel_residual=True, tie_word_embeddings=True,
              partial_rotary_factor=0.5),
    ),
    "starcoder2": Case(
        hf.Starcoder2Config,
        hf.Starcoder2ForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, head_dim=10, sliding_window=7),
    ),
    "starcoder2, plain": Case(
        hf.Starcoder2Config,
        hf.Starcoder2ForCausalLM,
        sizes(num_key_value_heads=1, use_bias=False, tie_word_embeddings=False),
    ),
    "cohere": Case(
        hf.CohereConfig,
        hf.CohereForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, head_dim=10, use_qk_norm=True,
              tie_word_embeddings=False),
    ),
    "cohere, biased": Case(
        hf.CohereConfig, hf.CohereForCausalLM, sizes(attention_bias=True, logit_scale=0.8)
    ),
    "cohere2": Case(
        hf.Cohere2Config,
        hf.Cohere2ForCausalLM,
        sizes(num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2, sliding_window=7,
              attention_bias=True),
    ),
    "olmo": Case(
        hf.OlmoConfig,
        hf.OlmoForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, head_dim=10, clip_qkv=8.0,
              tie_word_embeddings=True),
    ),
    "olmo, biased": Case(hf.OlmoConfig, hf.OlmoForCausalLM, sizes(attention_bias=True)),
    "olmo2": Case(
        hf.Olmo2Config,
        hf.Olmo2ForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True),
    ),
    "olmo2, biased": Case(hf.Olmo2Config, hf.Olmo2ForCausalLM, sizes(attention_bias=True)),
    "olmoe": Case(
        hf.OlmoeConfig,
        hf.OlmoeForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=2, num_experts=5, num_experts_per_tok=3,
              attention_bias=True, norm_topk_prob=True),
    ),
    "glm4": Case(
        hf.Glm4Config,
        hf.Glm4ForCausalLM,
        sizes(num_attention_heads=6, num_key_value_heads=3, head_dim=12, tie_word_embeddings=True),
    ),
    "glm4, plain": Case(
        hf.Glm4Config, hf.Glm4ForCausalLM, sizes(num_key_value_heads=1, head_dim=8, attention_bias=False)
    ),
}  # fmt: skip
DEFAULTS = {case.config: Case(case.config, case.model) for case in SMALL.values()}
CASES = {
    **SMALL,
    **{f"{config.model_type}, as its class has it": case for config, case in DEFAULTS.items()},
    "falcon 40b": Case(
        hf.FalconConfig,
        hf.FalconForCausalLM,
        {
            "hidden_size": 8192,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "new_decoder_architecture": True,
        },
    ),
    "opt 350m": Case(
        hf.OPTConfig,
        hf.OPTForCausalLM,
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "ffn_dim": 4096,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "phi-2": Case(
        hf.PhiConfig,
        hf.PhiForCausalLM,
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 32,
            "partial_rotary_factor": 0.4,
        },
    ),
}

HALVES = [1.0 + i / 16 for i in range(48)]
# as their files on the hub are written
PUBLISHED: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
        "layer_norm_epsilon": 1e-5, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "BLOOM-176B": {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_embed": 14336, "n_layer": 70,
        "num_attention_heads": 112, "vocab_size": 250880, "n_inner": None, "layer_norm_epsilon": 1e-5,
        "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "masked_softmax_fusion": True, "offset_alibi": 100, "pretraining_tp": 4,
        "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
        "unk_token_id": 0,
    },
    "MPT-7B": {
        "model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 4096, "n_heads": 32,
        "n_layers": 32, "max_seq_len": 2048, "expansion_ratio": 4, "vocab_size": 50432, "no_bias": True,
        "norm_type": "low_precision_layernorm", "learned_pos_emb": True, "logit_scale": None,
        "embedding_fraction": 1.0, "emb_pdrop": 0, "verbose": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "init_device": "cpu", "init_config": {"name": "kaiming_normal_"},
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
            "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
        },
    },
    "Phi-3-mini-128k": {
        "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "short_factor": HALVES, "long_factor": HALVES},
        "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
    },
}  # fmt: skip
