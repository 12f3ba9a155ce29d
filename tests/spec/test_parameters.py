"""Counted parameters and cache sizes equal transformers, the published counts, and the cases of planning."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from qkv.spec import (
    Attention,
    Causal,
    CrossAttention,
    Dense,
    Experts,
    Gated,
    GatedDelta,
    Language,
    Layer,
    LongRope,
    Mask,
    Model,
    MultiToken,
    Sinusoidal,
    Stack,
    StateSpace,
    Tokens,
    Window,
    post_norm,
    pre_norm,
)
from tests.spec import descriptions as of

Case = tuple[Model, Callable[[Any], torch.nn.Module], Any]


def llama_like(**sizes: Any) -> dict[str, Any]:
    """Their names for the sizes most decoders have."""
    names = {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "hidden": "intermediate_size",
        "vocab": "vocab_size",
        "tie": "tie_word_embeddings",
    }
    return {names.get(name, name): value for name, value in sizes.items()} | {"pad_token_id": None}


def nemotron_h(pattern: str, **sizes: Any) -> hf.NemotronHConfig:
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
    return hf.NemotronHConfig(layer_types=[kinds[letter] for letter in pattern], **sizes)


def untied_t5(config: hf.T5Config) -> torch.nn.Module:
    """transformers ties the head of every T5 it makes, and unties it where a checkpoint has its own."""
    model = hf.T5ForConditionalGeneration(config)
    model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


SMALL = {"layers": 3, "width": 36, "heads": 6, "kv_heads": 2, "head_dim": 10, "hidden": 52, "vocab": 97}
MHA = {"layers": 3, "width": 36, "heads": 6, "hidden": 52, "vocab": 97}
NO_KV = {name: size for name, size in SMALL.items() if name not in ("kv_heads", "head_dim")}


def same(
    description: Callable[..., Model], kind: type, config: type, sizes: dict[str, Any], **more: Any
) -> Case:
    return description(**sizes), kind, config(**llama_like(**sizes), **more)


DEBERTA = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"]}
DEBERTA_V3 = DEBERTA | {
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "max_relative_positions": -1,
}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
LLAMA3_8B = {
    "layers": 32,
    "width": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "hidden": 14336,
    "vocab": 128256,
}
DELTA = GatedDelta(key_heads=2, value_heads=6, key_dim=5, value_dim=7, convolution=3)
CLIP_L = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 336,
    "patch_size": 14,
}
CLIP_SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 44,
    "image_size": 35,
    "patch_size": 7,
}
VISION = {"layers": 2, "width": 24, "heads": 3, "hidden": 44, "size": 7, "image": 35}
SIGLIP = {
    "hidden_size": 1152,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "intermediate_size": 4304,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}
BART_SMALL = {
    "d_model": 36,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 52,
    "vocab_size": 97,
    "max_position_embeddings": 30,
}
WHISPER_BASE = {
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
WHISPER_SMALL = {
    "d_model": 36,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 52,
    "vocab_size": 97,
    "num_mel_bins": 11,
    "pad_token_id": 0,
}
T5_LARGE = {"d_model": 1024, "num_layers": 24, "num_decoder_layers": 24, "num_heads": 16, "d_ff": 4096}
T5_SMALL = {
    "d_model": 36,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 6,
    "d_kv": 10,
    "d_ff": 52,
    "vocab_size": 97,
}
T5_SIZES = {
    "encoder_layers": 3,
    "decoder_layers": 2,
    "width": 36,
    "heads": 6,
    "head_dim": 10,
    "hidden": 52,
    "vocab": 97,
}

CASES: dict[str, Callable[[], Case]] = {
    "gpt2": lambda: (of.gpt2(), hf.GPT2LMHeadModel, hf.GPT2Config()),
    "gpt2, small": lambda: (
        of.gpt2(3, 36, 6, 97, 30),
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=97, n_positions=30, n_embd=36, n_layer=3, n_head=6),
    ),
    "opt 125m": lambda: (of.opt(), hf.OPTForCausalLM, hf.OPTConfig()),
    "opt, small": lambda: (
        of.opt(**MHA),
        hf.OPTForCausalLM,
        hf.OPTConfig(**llama_like(**MHA), ffn_dim=52, word_embed_proj_dim=36),
    ),
    "opt 350m": lambda: (
        of.opt_350m(),
        hf.OPTForCausalLM,
        hf.OPTConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            ffn_dim=4096,
            word_embed_proj_dim=512,
            do_layer_norm_before=False,
        ),
    ),
    "opt 350m, small": lambda: (
        of.opt_350m(**MHA, table=14),
        hf.OPTForCausalLM,
        hf.OPTConfig(**llama_like(**MHA), ffn_dim=52, word_embed_proj_dim=14, do_layer_norm_before=False),
    ),
    "bloom 176b": lambda: (
        of.bloom(),
        hf.BloomForCausalLM,
        hf.BloomConfig(hidden_size=14336, n_layer=70, n_head=112),
    ),
    "bloom, small": lambda: (
        of.bloom(3, 36, 6, 97),
        hf.BloomForCausalLM,
        hf.BloomConfig(vocab_size=97, hidden_size=36, n_layer=3, n_head=6),
    ),
    "mpt 7b": lambda: (
        of.mpt(),
        hf.MptForCausalLM,
        hf.MptConfig(d_model=4096, n_heads=32, n_layers=32, vocab_size=50432),
    ),
    "mpt, small": lambda: (
        of.mpt(3, 36, 6, 97),
        hf.MptForCausalLM,
        hf.MptConfig(d_model=36, n_heads=6, n_layers=3, vocab_size=97),
    ),
    "llama 3.1 8b": lambda: same(of.llama, hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA3_8B),
    "llama, small and tied": lambda: same(
        of.llama, hf.LlamaForCausalLM, hf.LlamaConfig, SMALL | {"tie": True}
    ),
    "mixtral 8x7b": lambda: (of.mixtral(), hf.MixtralForCausalLM, hf.MixtralConfig()),
    "mixtral, small": lambda: (
        of.mixtral(**SMALL, experts=5, top_k=3),
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**llama_like(**SMALL), num_local_experts=5, num_experts_per_tok=3),
    ),
    "qwen2.5 7b": lambda: (
        of.qwen2(),
        hf.Qwen2ForCausalLM,
        hf.Qwen2Config(**llama_like(layers=28, width=3584, heads=28, kv_heads=4, hidden=18944, vocab=152064)),
    ),
    "qwen2, small and tied": lambda: same(
        of.qwen2, hf.Qwen2ForCausalLM, hf.Qwen2Config, SMALL | {"tie": True}
    ),
    "qwen3 8b": lambda: (
        of.qwen3(),
        hf.Qwen3ForCausalLM,
        hf.Qwen3Config(**llama_like(layers=36, width=4096, heads=32, kv_heads=8, hidden=12288, vocab=151936)),
    ),
    "qwen3-moe, small": lambda: (
        of.qwen3(3, 36, 6, 2, 10, 97, Experts(5, 2, Gated("silu", 14))),
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(
            **llama_like(**SMALL), num_experts=5, num_experts_per_tok=2, moe_intermediate_size=14
        ),
    ),
    "phi-3 mini": lambda: (of.phi3(), hf.Phi3ForCausalLM, hf.Phi3Config()),
    "phi-3, small": lambda: (
        of.phi3(3, 36, 6, 2, 52, 97),
        hf.Phi3ForCausalLM,
        hf.Phi3Config(**llama_like(**NO_KV, kv_heads=2)),
    ),
    "granite 8b": lambda: (
        of.granite(),
        hf.GraniteForCausalLM,
        hf.GraniteConfig(
            **llama_like(layers=40, width=4096, heads=32, kv_heads=8, hidden=12800, vocab=49155, tie=True)
        ),
    ),
    "granite, small": lambda: same(
        of.granite, hf.GraniteForCausalLM, hf.GraniteConfig, NO_KV | {"kv_heads": 3}, tie_word_embeddings=True
    ),
    "olmo 2 7b": lambda: (of.olmo2(), hf.Olmo2ForCausalLM, hf.Olmo2Config(vocab_size=100352)),
    "olmo 2, small": lambda: same(of.olmo2, hf.Olmo2ForCausalLM, hf.Olmo2Config, NO_KV | {"kv_heads": 3}),
    "gemma 2 9b": lambda: (
        of.gemma2(),
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(
            hidden_size=3584,
            num_hidden_layers=42,
            num_attention_heads=16,
            num_key_value_heads=8,
            intermediate_size=14336,
        ),
    ),
    "gemma 2, small": lambda: same(of.gemma2, hf.Gemma2ForCausalLM, hf.Gemma2Config, SMALL),
    "gemma 3, default": lambda: (
        of.gemma3(26, 2304, 8, 4, 256, 9216, window=4096, query_scalar=256),
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(),
    ),
    "gemma 3, small": lambda: same(
        of.gemma3, hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, SMALL | {"layers": 7}
    ),
    "gemma 3 27b with vision": lambda: (
        of.gemma3(towers=(of.gemma3_vision(),)),
        hf.Gemma3ForConditionalGeneration,
        hf.Gemma3Config(
            text_config=llama_like(
                layers=62, width=5376, heads=32, kv_heads=16, head_dim=128, hidden=21504, vocab=262208
            ),
            vision_config=SIGLIP,
            mm_tokens_per_image=256,
        ),
    ),
    "gpt-j 6b": lambda: (of.gpt_j(), hf.GPTJForCausalLM, hf.GPTJConfig()),
    "gpt-j, small": lambda: (
        of.gpt_j(3, 36, 6, 97, 4),
        hf.GPTJForCausalLM,
        hf.GPTJConfig(vocab_size=97, n_embd=36, n_layer=3, n_head=6, rotary_dim=4),
    ),
    "gpt-neox 20b": lambda: (of.gpt_neox(), hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig()),
    "gpt-neox, small": lambda: same(of.gpt_neox, hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, MHA),
    "command r": lambda: (of.cohere(), hf.CohereForCausalLM, hf.CohereConfig()),
    "cohere, small, normalised queries": lambda: (
        of.cohere(**NO_KV, kv_heads=2, query_norm=True),
        hf.CohereForCausalLM,
        hf.CohereConfig(**llama_like(**NO_KV, kv_heads=2), use_qk_norm=True),
    ),
    "falcon 7b": lambda: (of.falcon(), hf.FalconForCausalLM, hf.FalconConfig()),
    "falcon 40b, small": lambda: (
        of.falcon(3, 36, 6, 2, 97, norms=2),
        hf.FalconForCausalLM,
        hf.FalconConfig(
            vocab_size=97,
            hidden_size=36,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_kv_heads=2,
            new_decoder_architecture=True,
        ),
    ),
    "deepseek v3": lambda: (of.deepseek_v3(), hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config()),
    "deepseek v3, small": lambda: (
        of.deepseek_v3(
            4,
            36,
            6,
            head_dim=10,
            rotary_dim=4,
            value_dim=8,
            rank=14,
            query_rank=None,
            hidden=52,
            expert_hidden=11,
            experts=6,
            shared_experts=2,
            top_k=2,
            groups=3,
            top_groups=2,
            dense_layers=1,
            vocab=97,
        ),
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            vocab_size=97,
            hidden_size=36,
            intermediate_size=52,
            moe_intermediate_size=11,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=6,
            n_shared_experts=2,
            n_routed_experts=6,
            kv_lora_rank=14,
            q_lora_rank=None,
            qk_rope_head_dim=4,
            v_head_dim=8,
            qk_nope_head_dim=10,
            n_group=3,
            topk_group=2,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            pad_token_id=None,
        ),
    ),
    "gpt-oss 20b": lambda: (
        of.gpt_oss(),
        hf.GptOssForCausalLM,
        hf.GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    ),
    "gpt-oss, small": lambda: same(
        lambda **sizes: of.gpt_oss(**sizes, experts=5, top_k=2),
        hf.GptOssForCausalLM,
        hf.GptOssConfig,
        SMALL,
        num_local_experts=5,
        num_experts_per_tok=2,
    ),
    "llama 4 scout": lambda: (of.llama4(), hf.Llama4ForCausalLM, hf.Llama4TextConfig()),
    "llama 4, small, dense between": lambda: same(
        lambda **sizes: of.llama4(**sizes, dense_hidden=44, experts=5, every=2),
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig,
        SMALL | {"layers": 5},
        intermediate_size_mlp=44,
        num_local_experts=5,
        interleave_moe_layer_step=2,
    ),
    "qwen3-next 80b": lambda: (of.qwen3_next(), hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig()),
    "qwen3-next, small": lambda: (
        of.qwen3_next(5, 36, 6, 2, 12, DELTA, expert_hidden=11, experts=5, top_k=2, vocab=97),
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig(
            **llama_like(**SMALL | {"layers": 5, "head_dim": 12}),
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            linear_key_head_dim=5,
            linear_value_head_dim=7,
            linear_conv_kernel_dim=3,
            moe_intermediate_size=11,
            shared_expert_intermediate_size=11,
            num_experts=5,
            num_experts_per_tok=2,
        ),
    ),
    "nemotron-h 56b": lambda: (
        of.nemotron_h(),
        hf.NemotronHForCausalLM,
        nemotron_h(
            "M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-",
            hidden_size=8192,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=32768,
            mamba_num_heads=256,
            mamba_head_dim=64,
            ssm_state_size=256,
            vocab_size=131072,
        ),
    ),
    "nemotron-h, small": lambda: (
        of.nemotron_h("M-*-M", 36, 6, 2, 10, 52, StateSpace(4, 5, 7, 2, 3, convolution_bias=False), 97),
        hf.NemotronHForCausalLM,
        nemotron_h(
            "M-*-M",
            **{name: size for name, size in llama_like(**SMALL).items() if name != "num_hidden_layers"},
            mamba_num_heads=4,
            mamba_head_dim=5,
            ssm_state_size=7,
            n_groups=2,
            conv_kernel=3,
            use_conv_bias=False,
        ),
    ),
    "bert": lambda: (of.bert(), hf.BertModel, hf.BertConfig()),
    "bert, small": lambda: same(of.bert, hf.BertModel, hf.BertConfig, MHA),
    "bert, masked": lambda: (of.bert_mlm(), hf.BertForMaskedLM, hf.BertConfig()),
    "bert, masked, small": lambda: same(of.bert_mlm, hf.BertForMaskedLM, hf.BertConfig, MHA),
    "albert base": lambda: (of.albert(), hf.AlbertModel, hf.AlbertConfig(**BASE)),
    "albert, small": lambda: same(
        lambda **sizes: of.albert(**sizes, table=14), hf.AlbertModel, hf.AlbertConfig, MHA, embedding_size=14
    ),
    "electra small": lambda: (of.electra(), hf.ElectraModel, hf.ElectraConfig()),
    "electra, small": lambda: same(
        lambda **sizes: of.electra(**sizes, table=14),
        hf.ElectraModel,
        hf.ElectraConfig,
        MHA,
        embedding_size=14,
    ),
    "deberta base": lambda: (of.deberta(), hf.DebertaModel, hf.DebertaConfig(**DEBERTA)),
    "deberta, small": lambda: same(of.deberta, hf.DebertaModel, hf.DebertaConfig, MHA, **DEBERTA),
    "deberta v3 base": lambda: (of.deberta_v3(), hf.DebertaV2Model, hf.DebertaV2Config(**BASE, **DEBERTA_V3)),
    "deberta v3, small": lambda: (
        of.deberta_v3(**MHA, buckets=12),
        hf.DebertaV2Model,
        hf.DebertaV2Config(**llama_like(**MHA), **DEBERTA_V3 | {"position_buckets": 12}),
    ),
    "modernbert base": lambda: (of.modernbert(), hf.ModernBertForMaskedLM, hf.ModernBertConfig()),
    "modernbert, small": lambda: same(
        of.modernbert, hf.ModernBertForMaskedLM, hf.ModernBertConfig, MHA | {"layers": 4}
    ),
    "t5 large": lambda: (of.t5(), hf.T5ForConditionalGeneration, hf.T5Config(**T5_LARGE)),
    "t5, small": lambda: (of.t5(**T5_SIZES), hf.T5ForConditionalGeneration, hf.T5Config(**T5_SMALL)),
    "t5 1.1 large": lambda: (
        of.t5(hidden=2816, version="1.1"),
        untied_t5,
        hf.T5Config(**T5_LARGE | {"d_ff": 2816}, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "t5 1.1, small": lambda: (
        of.t5(**T5_SIZES, version="1.1"),
        untied_t5,
        hf.T5Config(**T5_SMALL, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "bart large": lambda: (of.bart(), hf.BartForConditionalGeneration, hf.BartConfig()),
    "bart, small": lambda: (
        of.bart(2, 36, 6, 52, 97, 30),
        hf.BartForConditionalGeneration,
        hf.BartConfig(**BART_SMALL),
    ),
    "whisper base": lambda: (
        of.whisper(),
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(**WHISPER_BASE),
    ),
    "whisper, small": lambda: (
        of.whisper(3, 2, 36, 6, 52, 97, 11),
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(**WHISPER_SMALL),
    ),
    "vit base": lambda: (of.vit(), hf.ViTModel, hf.ViTConfig()),
    "vit, small": lambda: (of.vit(**VISION), hf.ViTModel, hf.ViTConfig(**CLIP_SMALL)),
    "clip vision": lambda: (of.clip_vision(), hf.CLIPVisionModel, hf.CLIPVisionConfig()),
    "clip vision, small, projected": lambda: (
        of.clip_vision(**VISION, projection=14),
        hf.CLIPVisionModelWithProjection,
        hf.CLIPVisionConfig(**CLIP_SMALL, projection_dim=14),
    ),
    "clip text": lambda: (of.clip_text(), hf.CLIPTextModel, hf.CLIPTextConfig()),
    "clip text, small, projected": lambda: (
        of.clip_text(**MHA, projection=14),
        hf.CLIPTextModelWithProjection,
        hf.CLIPTextConfig(**llama_like(**MHA) | {"pad_token_id": 1}, projection_dim=14),
    ),
    "llava 1.5 7b": lambda: (
        of.llava(),
        hf.LlavaForConditionalGeneration,
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(vocab_size=32064),
            vision_config=hf.CLIPVisionConfig(**CLIP_L),
            image_token_id=32000,
        ),
    ),
    "llava, small": lambda: (
        of.llava(lambda: of.llama(**SMALL), lambda: of.clip_vision(**VISION), token=96),
        hf.LlavaForConditionalGeneration,
        hf.LlavaConfig(
            text_config=hf.LlamaConfig(**llama_like(**SMALL)),
            vision_config=hf.CLIPVisionConfig(**CLIP_SMALL),
            image_token_id=96,
        ),
    ),
}


def counted(model: torch.nn.Module) -> int:
    """Unique parameters, and the routing biases that transformers keeps as buffers."""
    routing = (buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    return sum(p.numel() for p in model.parameters()) + sum(buffer.numel() for buffer in routing)


@pytest.mark.parametrize("name", CASES)
def test_parameters_equal_transformers(name: str) -> None:
    description, kind, config = CASES[name]()
    with torch.device("meta"):
        theirs = kind(config)
    assert description.parameters() == counted(theirs)


def test_every_description_is_compared() -> None:
    """Twice each; transformers has no Transformer-XL any more and SigLIP's encoder stands in Gemma 3."""
    used = {name for case in CASES.values() for name in case.__code__.co_names if name in of.ALL}
    assert set(of.ALL) - used == {"transformer_xl", "siglip_vision", "llama2"}


# --- the twenty published models --------------------------------------------------------------


def llama_of(e: dict[str, Any]) -> Model:
    mask: Mask = Causal() & Window(e["win"]) if e["win"] else Causal()
    sizes = [e[name] for name in ("L", "h", "nh", "nkv", "hd", "ff", "V")]
    return of.llama(*sizes, theta=e["theta"], scaling=None, mask=mask, tie=e["tie"])


def gemma_of(e: dict[str, Any]) -> list[int]:
    return [e[name] for name in ("L", "h", "nh", "nkv", "hd", "ff", "V", "win")]


PUBLISHED: dict[str, Callable[[dict[str, Any]], Model]] = {
    "Llama-2-7B": llama_of,
    "Llama-2-70B": llama_of,
    "Llama-3-8B": llama_of,
    "Llama-3-70B": llama_of,
    "Llama-3.1-405B": llama_of,
    "Mistral-7B-v0.1": llama_of,
    "Mixtral-8x7B": lambda e: of.mixtral(
        e["L"], e["h"], e["nh"], e["nkv"], e["hd"], e["ff"], e["V"], e["experts"], e["top_k"]
    ),
    "Qwen2.5-7B": lambda e: of.qwen2(e["L"], e["h"], e["nh"], e["nkv"], e["hd"], e["ff"], e["V"]),
    "Qwen3-8B": lambda e: of.qwen3(
        e["L"], e["h"], e["nh"], e["nkv"], e["hd"], e["V"], Gated("silu", e["ff"])
    ),
    "Qwen3-30B-A3B": lambda e: of.qwen3(
        e["L"],
        e["h"],
        e["nh"],
        e["nkv"],
        e["hd"],
        e["V"],
        Experts(e["experts"], e["top_k"], Gated("silu", e["moe_ff"])),
    ),
    "Gemma-2-9B": lambda e: of.gemma2(*gemma_of(e)),
    "Gemma-3-27B": lambda e: of.gemma3(*gemma_of(e)),
    "DeepSeek-V3": lambda e: of.deepseek_v3(
        e["L"],
        e["h"],
        e["nh"],
        e["nope_hd"],
        e["rope_hd"],
        e["v_hd"],
        e["kv_lora"],
        e["q_lora"],
        e["ff"],
        e["moe_ff"],
        e["experts"],
        e["shared"],
        e["top_k"],
        dense_layers=e["first_dense"],
        vocab=e["V"],
    ),
    "BLOOM-176B": lambda e: of.bloom(e["L"], e["h"], e["nh"], e["V"]),
    "MPT-7B": lambda e: of.mpt(e["L"], e["h"], e["nh"], e["V"]),
    "T5-large": lambda e: of.t5(e["L_enc"], e["L_dec"], e["h"], e["nh"], e["hd"], e["ff"], e["V"]),
    "BERT-base-uncased": lambda e: of.bert(e["L"], e["h"], e["nh"], e["ff"], e["V"]),
    "GPT-2": lambda e: of.gpt2(e["L"], e["h"], e["nh"], e["V"], e["mpe"]),
    "Phi-3-mini-128k": lambda e: of.phi3(
        e["L"],
        e["h"],
        e["nh"],
        e["nkv"],
        e["ff"],
        e["V"],
        LongRope((1.0,) * 48, (2.0,) * 48, e["orig"], 32.0),
    ),
    "gpt-oss-20b": lambda e: of.gpt_oss(
        e["L"],
        e["h"],
        e["nh"],
        e["nkv"],
        e["hd"],
        e["moe_ff"],
        e["experts"],
        e["top_k"],
        e["V"],
        e["win"],
    ),
}


@pytest.fixture
def published(shared_folder: Path) -> dict[str, dict[str, Any]]:
    entries = json.loads((shared_folder / "configs" / "reference_models.json").read_text())
    del entries["_doc"]
    assert entries.keys() == PUBLISHED.keys()
    return entries


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameters_and_cache(name: str, published: dict[str, dict[str, Any]]) -> None:
    entry = published[name]
    model = PUBLISHED[name](entry)
    totals = [entry[k] for k in ("params", "params_main", "params_text", "params_with_pooler") if k in entry]
    assert [model.parameters()] == totals
    kept = [entry[k] for k in ("kv_elems", "kv_elems_mla", "kv_elems_self_decoder") if k in entry]
    assert [model.cache_bytes(1)] == [2 * values for values in kept]
    if "active" in entry:
        assert model.parameters(active=True) == entry["active"]


def test_published_counts_under_other_conventions(published: dict[str, dict[str, Any]]) -> None:
    def of_(name: str) -> tuple[Model, dict[str, Any]]:
        return PUBLISHED[name](published[name]), published[name]

    model, entry = of_("gpt-oss-20b")
    assert model.parameters(active=True, embedding=False) == entry["active_ex_input_embed"]
    assert 32 * model.cache_bytes(8192) == entry["kv_bytes_8192x32_windowed_bf16"]
    model, entry = of_("Gemma-2-9B")
    assert model.cache_bytes(8192) == entry["kv_bytes_at_8192_windowed_bf16"]
    model, entry = of_("Gemma-3-27B")
    assert model.cache_bytes(131072) == entry["kv_bytes_at_131072_windowed_bf16"]
    seeing = replace(model, towers=(of.gemma3_vision(entry["h"]),))
    assert seeing.parameters() == entry["params_total_with_vision"]
    model, entry = of_("T5-large")
    assert model.cache_bytes(0, source=1) == 2 * entry["kv_elems_cross_per_source_token"]
    _, entry = of_("DeepSeek-V3")
    expanded = Attention(
        entry["nh"], entry["nh"], entry["nope_hd"] + entry["rope_hd"], value_dim=entry["v_hd"]
    )
    assert of_layers(*(expanded,) * entry["L"]).cache_bytes(1) == 2 * entry["kv_elems_expanded_hf"]


def test_an_input_table_the_head_multiplies_by_always_counts() -> None:
    """`embedding=False` leaves out a table that is only looked up."""
    assert of.gpt2().parameters(embedding=False) == of.gpt2().parameters()
    untied = of.llama()
    assert untied.parameters() - untied.parameters(embedding=False) == 128256 * 4096
    assert of.bert().parameters() - of.bert().parameters(embedding=False) == 30522 * 768


def test_a_second_token_adds_a_layer_a_join_and_three_norms() -> None:
    """DeepSeek-V3 predicts one more: 11.6 billion parameters; table and head are the first token's."""
    model = of.deepseek_v3()
    assert model.decoder is not None and isinstance(model.head, Language)
    further = model.decoder.layers[-1]
    more = replace(model, head=MultiToken(model.head, (further,))).parameters() - model.parameters()
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
    assert more == attention + experts + 2 * 7168 + 2 * 7168 * 7168 + 3 * 7168
    assert round(more / 1e9, 1) == 11.6


# --- what transformers has no class for -------------------------------------------------------


@pytest.mark.parametrize("untied", [False, True])
def test_transformer_xl_by_hand(untied: bool) -> None:
    """Dai et al. 2019: enwik8, 12 layers, "41M parameters"."""
    n, d, ff, vocab = 12, 512, 2048, 204
    attention = 3 * d * d + d * d + d * d  # queries, keys and values; the distances' keys; output
    feed_forward = d * ff + ff + ff * d + d
    layer = attention + feed_forward + 2 * 2 * d
    biases = 2 * d * (n if untied else 1)
    expected = n * layer + biases + vocab * d + vocab
    assert of.transformer_xl(untied=untied).parameters() == expected
    assert expected // 1_000_000 == 41


def vaswani(width: int, hidden: int, heads: int, vocab: int = 37_000) -> Model:
    """Table 3's models, counted as there: no biases in attention, one table for both sides and the head."""
    tokens = Tokens(vocab, width, scale=width**0.5, position=Sinusoidal(), shared="tokens")
    around = Attention(heads, heads, width // heads)
    cross = CrossAttention(heads, heads, width // heads, source_width=width)
    feed_forward = Dense("relu", hidden)
    return Model(
        encoder=Stack(tokens, (post_norm(around, feed_forward),) * 6),
        decoder=Stack(tokens, (post_norm(around, cross, feed_forward),) * 6),
        head=Language(vocab, shared="tokens"),
    )


def test_the_original_transformer() -> None:
    """65M and 213M in the paper's Table 3; 63.05M and 214.2M by simple count."""
    assert round(vaswani(512, 2048, 8).parameters() / 1e6, 2) == 63.05
    assert round(vaswani(1024, 4096, 16).parameters() / 1e6, 1) == 214.2


# --- cache ------------------------------------------------------------------------------------


def of_layers(*attentions: Attention) -> Model:
    return Model(decoder=Stack(Tokens(11, 8), tuple(pre_norm(attention) for attention in attentions)))


def test_cache_counts_key_value_heads() -> None:
    """Case L1."""
    model = of_layers(*(Attention(32, 8, 128),) * 32)
    assert model.cache_bytes(1) == 131_072
    assert model.cache_bytes(8192) == 2**30
    assert of_layers(*(Attention(32, 32, 128),) * 32).cache_bytes(8192) == 4 * 2**30


def test_window_layers_keep_their_window() -> None:
    """Case L3."""

    def model(layers: int, every: int, window: int, kv_heads: int, head_dim: int) -> Model:
        def mask(i: int) -> Mask:
            return Causal() if (i + 1) % every == 0 else Causal() & Window(window)

        return of_layers(*(Attention(kv_heads, kv_heads, head_dim, mask=mask(i)) for i in range(layers)))

    assert model(62, 6, 1024, 16, 128).cache_bytes(131_072) == 11_173_625_856
    assert of_layers(*(Attention(16, 16, 128),) * 62).cache_bytes(131_072) == 66_571_993_088
    assert model(6, 6, 8, 2, 4).cache_bytes(32) == 2304
    assert of_layers(*(Attention(2, 2, 4),) * 6).cache_bytes(32) == 6144


def test_a_latent_is_kept_once() -> None:
    """Case L5."""
    model = of.deepseek_v3()
    assert model.cache_bytes(1) == 70_272
    assert model.cache_bytes(163_840) == 11_513_364_480


def test_cache_of_published_models_in_full_context() -> None:
    """D31: 2 GiB, 16 GiB, and 512 MiB however long."""
    assert of.llama2().cache_bytes(4096) == 2 * 2**30
    assert of.llama().cache_bytes(131_072) == 16 * 2**30
    mistral = of.llama(vocab=32000, theta=1e4, scaling=None, mask=Causal() & Window(4096))
    assert mistral.cache_bytes(32_768) == mistral.cache_bytes(4096) == 512 * 2**20
    assert mistral.cache_bytes(4095) == 4095 * 131_072


def test_chunks_states_and_sources_have_caches_of_their_own() -> None:
    scout = of.llama4()
    per_token = 2 * 8 * 128 * 2
    assert scout.cache_bytes(100_000) == per_token * (36 * 8192 + 12 * 100_000)
    # a state is fp32 whatever the cache's type, and has no length
    hybrid = of.qwen3_next()
    state, inputs = 36 * 32 * 128 * 128, 36 * 3 * (2 * 16 * 128 + 32 * 128)
    assert hybrid.cache_bytes(0) == 4 * state + 2 * inputs
    assert hybrid.cache_bytes(10, bytes_per_value=1) == 4 * state + inputs + 12 * 2 * 2 * 256 * 10
    nemotron = of.nemotron_h()
    state, inputs = 54 * 256 * 64 * 256, 54 * 3 * (256 * 64 + 2 * 8 * 256)
    assert nemotron.cache_bytes(10) == 4 * state + 2 * (inputs + 10 * 2 * 8 * 128 * 10)
    # whisper: 3000 spectrogram frames are 1500 rows
    assert of.whisper().cache_bytes(7, source=3000) == 2 * 6 * 2 * 512 * (7 + 1500)
    assert of.bert().cache_bytes(512) == 0


# --- names ------------------------------------------------------------------------------------


def test_weights_by_name() -> None:
    weights = of.gpt2(1, 4, 2, 11, 6).weights()
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        "decoder.embedding.weight": (11, 4),
        "decoder.embedding.position.weight": (6, 4),
        "decoder.layers.0.attention_before.weight": (4,),
        "decoder.layers.0.attention_before.bias": (4,),
        "decoder.layers.0.attention.query.weight": (4, 4),
        "decoder.layers.0.attention.query.bias": (4,),
        "decoder.layers.0.attention.key.weight": (4, 4),
        "decoder.layers.0.attention.key.bias": (4,),
        "decoder.layers.0.attention.value.weight": (4, 4),
        "decoder.layers.0.attention.value.bias": (4,),
        "decoder.layers.0.attention.output.weight": (4, 4),
        "decoder.layers.0.attention.output.bias": (4,),
        "decoder.layers.0.feed_forward_before.weight": (4,),
        "decoder.layers.0.feed_forward_before.bias": (4,),
        "decoder.layers.0.feed_forward.up.weight": (16, 4),
        "decoder.layers.0.feed_forward.up.bias": (16,),
        "decoder.layers.0.feed_forward.down.weight": (4, 16),
        "decoder.layers.0.feed_forward.down.bias": (4,),
        "decoder.norm.weight": (4,),
        "decoder.norm.bias": (4,),
    }


@pytest.mark.parametrize("name", of.ALL)
def test_names_are_unique_and_shared_tensors_agree(name: str) -> None:
    tensors = list(of.ALL[name]().tensors())
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for tensor in tensors:
        shapes.setdefault(tensor.key, set()).add(tensor.shape)
        assert 0 < tensor.used <= tensor.size
    assert all(len(found) == 1 for found in shapes.values())


def test_a_shared_name_covers_a_table_and_not_what_is_added_to_it() -> None:
    names = of.bart(1, 4, 2, 5, 11, 6).weights()
    assert [name for name in names if "embedding" in name or "head" in name] == [
        f"{side}.embedding.{part}"
        for side, parts in (
            ("encoder", ("weight", "position.weight", "norm.weight", "norm.bias")),
            ("decoder", ("position.weight", "norm.weight", "norm.bias")),
        )
        for part in parts
    ]


def test_a_shared_layer_is_stored_once() -> None:
    layer = Layer(pre_norm(Attention(2, 2, 2), Gated("silu", 5)).sublayers, shared="all")
    once, often = (Model(decoder=Stack(Tokens(11, 4), (layer,) * n)) for n in (1, 9))
    assert once.weights() == often.weights()
    assert often.flops(6) == 9 * once.flops(6)
