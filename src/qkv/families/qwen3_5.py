"""Qwen3.5: Qwen3-Next over text, images and films, dense or with experts. Qwen team 2026.

The state's maps lie one by one in its files; positions of the attention are in time, height and width.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import expected
from qkv.families.encoders import discard_if
from qkv.families.family import Description, Family
from qkv.families.pairs import nested
from qkv.families.qwen3_next import hybrid, table
from qkv.families.qwen3_vl import seeing, three_axes
from qkv.families.rotary_decoders import Sizes, attention, decoder, extended, sizes
from qkv.families.weights import Place, fused
from qkv.spec import Attention, GatedDelta, Layer, RMSNorm, Stack, Tokens

SECTIONS = (11, 11, 10)
MAPS: dict[str, str | Place] = {
    **fused("linear_attn.in_proj_qkv", "mixer.query", "mixer.key", "mixer.value"),
    "mixer.gate": "linear_attn.in_proj_z",
    "mixer.beta": "linear_attn.in_proj_b",
    "mixer.decay": "linear_attn.in_proj_a",
}


def describe(config: Config) -> Description:
    """From a configuration of model type qwen3_5, qwen3_5_moe, or the text's own of either."""
    kind = str(config.peek("model_type"))
    if not kind.endswith("_text"):
        return _seeing(config, DEFAULTS[f"{kind}_text"])
    size, layers, norm, mixer, delta = _layers(config)
    found = decoder(config, size, layers, norm, irrelevant=("mtp.*",))
    return found.named(table(mixer.heads, delta, MAPS), "model.")


def _seeing(config: Config, defaults: dict[str, object]) -> Description:
    text = nested(config, "text_config", defaults)
    tied = config.take("tie_word_embeddings", bool, False) or text.peek("tie_word_embeddings") is True
    text.discard("tie_word_embeddings", "router_aux_loss_coef")
    size, layers, norm, _, _ = _layers(text)
    discard_if(config, {"language_model_only": False})
    tokens = Tokens(size.vocab, size.width, shared="tokens" if tied else None)
    return seeing(config, text, Stack(tokens, tuple(layers), norm), size.context)


def _layers(config: Config) -> tuple[Sizes, list[Layer], RMSNorm, Attention, GatedDelta]:
    if "num_experts" in config and "intermediate_size" not in config:
        config.put("intermediate_size", config.peek("moe_intermediate_size"))  # no layer is dense
    size = sizes(config)
    position = three_axes(config, config.size("head_dim"), size.context, SECTIONS, 10_000.0)
    mixer = attention(config, size, position=position)
    size = extended(config, size, position)
    expected(config, attn_output_gate=True)
    # of the layers that guess ahead, and of precision
    config.discard("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    discard_if(config, {"mlp_only_layers": [], "output_gate_type": "swish"})  # of the state's gate
    layers, norm, delta = hybrid(config, size, mixer)
    return size, layers, norm, mixer, delta


DENSE: dict[str, object] = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
ROUTED: dict[str, object] = {
    **{key: value for key, value in DENSE.items() if key != "intermediate_size"},
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,  # always
}
DEFAULTS = {"qwen3_5_text": DENSE, "qwen3_5_moe_text": ROUTED}
FAMILY = Family(
    types=("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"),
    describe=describe,
    defaults=DEFAULTS,
)
