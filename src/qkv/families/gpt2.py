"""GPT-2: pre-norm, learned positions, biases everywhere. Radford et al. 2019."""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import (
    activation_of,
    assembled,
    context_of,
    depth_of,
    expected,
    head_sizes,
    renamed,
)
from qkv.families.encoders import discard_if
from qkv.families.family import Description, Family
from qkv.families.weights import KINDS, Place, fused, layer_names
from qkv.spec import (
    Attention,
    Dense,
    Language,
    LayerNorm,
    Learned,
    Projections,
    Score,
    Stack,
    Tokens,
    pre_norm,
)

# GPT-J has them too
NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}

PARTS: dict[str, str | Place] = {  # matrices stand there as (in, out)
    "attention_before": "ln_1",
    **fused("attn.c_attn", "attention.query", "attention.key", "attention.value", transposed=True),
    "attention.output": Place("attn.c_proj", transposed=True),
    "feed_forward_before": "ln_2",
    "feed_forward.up": Place("mlp.c_fc", transposed=True),
    "feed_forward.down": Place("mlp.c_proj", transposed=True),
}
WEIGHTS = {
    "decoder.embedding.weight": "transformer.wte.weight",
    "decoder.embedding.position.weight": "transformer.wpe.weight",
    **layer_names("transformer.h.{layer}", PARTS),
    **{f"decoder.norm.{kind}": f"transformer.ln_f.{kind}" for kind in KINDS},
    "head.weight": "lm_head.weight",
    "head.output.weight": "score.weight",
}
MASKS = ("*.attn.bias", "*.attn.masked_bias")  # older files keep the causal mask


def describe(config: Config) -> Description:
    """From a configuration of model type gpt2."""
    renamed(config, NAMES)
    expected(config, add_cross_attention=False)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 1024)
    norm = LayerNorm(config.positive("layer_norm_epsilon", 1e-5))
    heads, kv_heads, head_dim = head_sizes(config, width)
    feed_forward = Dense(
        activation_of(config, "activation_function", "gelu_new"),
        config.size("n_inner", 4 * width),
    )
    layers = tuple(
        pre_norm(
            Attention(heads, kv_heads, head_dim, score=score, projections=Projections(bias="qkvo")),
            feed_forward,
            norm=norm,
        )
        for score in _scores(config, depth_of(config), head_dim)
    )
    # n_ctx repeats n_positions; the other chooses a precision, which is ours to choose
    config.discard("n_ctx", "reorder_and_upcast_attn")
    # of the first files, and of no class since
    config.discard("predict_special_tokens")
    discard_if(config, {"n_special": 0})
    tokens = Tokens(vocab, width, position=Learned(context))
    found = assembled(config, Stack(tokens, layers, norm), Language(vocab), context)
    return found.named(WEIGHTS, "transformer.", MASKS)


def _scores(config: Config, depth: int, head_dim: int) -> list[Score]:
    """Scaled by 1 / sqrt(head_dim) or not at all, and in some copies by 1 / (layer + 1) as well."""
    scaled = config.take("scale_attn_weights", bool, True)
    if not config.take("scale_attn_by_inverse_layer_idx", bool, False):
        return [Score(None if scaled else 1.0)] * depth
    return [Score((head_dim**-0.5 if scaled else 1.0) / (i + 1)) for i in range(depth)]


FAMILY = Family(types=("gpt2",), describe=describe, defaults={"gpt2": {"tie_word_embeddings": True}})
