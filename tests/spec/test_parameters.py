"""Counted parameters equal transformers, model by model, and formulas where it has no class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from qkv.spec import (
    Attention,
    CrossAttention,
    Dense,
    Experts,
    Gated,
    GatedDelta,
    Language,
    Model,
    Projections,
    Sinusoidal,
    Stack,
    StateSpace,
    Tokens,
    post_norm,
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


def vaswani(width: int, hidden: int, heads: int, bias: str = "", vocab: int = 37_000) -> Model:
    """Table 3's models, counted as there: no biases in attention, one table for both sides and the head."""
    through = Projections(bias=bias)
    tokens = Tokens(vocab, width, scale=width**0.5, position=Sinusoidal(), shared="tokens")
    around = Attention(heads, heads, width // heads, projections=through)
    cross = CrossAttention(heads, heads, width // heads, source_width=width, projections=through)
    feed_forward = Dense("relu", hidden)
    return Model(
        encoder=Stack(tokens, (post_norm(around, feed_forward),) * 6),
        decoder=Stack(tokens, (post_norm(around, cross, feed_forward),) * 6),
        head=Language(vocab, shared="tokens"),
    )


def test_the_original_transformer() -> None:
    """65M and 213M in the paper's Table 3; 63.05M and 214.2M by count, 63.08M with attention biases."""
    assert round(vaswani(512, 2048, 8).parameters() / 1e6, 2) == 63.05
    assert round(vaswani(1024, 4096, 16).parameters() / 1e6, 1) == 214.2
    assert vaswani(512, 2048, 8, "qkvo").parameters() - vaswani(512, 2048, 8).parameters() == 18 * 4 * 512
    assert round(vaswani(512, 2048, 8, "qkvo").parameters() / 1e6, 2) == 63.08
