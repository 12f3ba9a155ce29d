"""GPT-BigCode: GPT-2 whose heads share one key and one value, as in SantaCoder and StarCoder.

Ben Allal et al. 2023, Li et al. 2023.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.decoder_parts import activation_of, assembled, context_of, depth_of, head_sizes, renamed
from qkv.families.family import Description, Family
from qkv.families.gpt2 import MASKS, NAMES, WEIGHTS
from qkv.families.weights import Place, Table, fused, layer_names
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


def describe(config: Config) -> Description:
    """From a configuration of model type gpt_bigcode."""
    renamed(config, NAMES)
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 1024)
    norm = LayerNorm(config.positive("layer_norm_epsilon", 1e-5))
    heads, kv_heads, head_dim = head_sizes(config, width)
    shares = config.take("multi_query", bool, True)
    if shares:
        kv_heads = 1
    attention = Attention(
        heads,
        kv_heads,
        head_dim,
        score=Score(None if config.take("scale_attn_weights", bool, True) else 1.0),
        projections=Projections(bias="qkvo"),
    )
    activation = activation_of(config, "activation_function", "gelu_pytorch_tanh")
    dense = Dense(activation, config.size("n_inner", 4 * width))
    # of precision, of a kernel and of a server
    config.discard("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    config.discard(
        "runner_max_sequence_length", "inference_runner", "validate_runner_input", "pre_allocate_kv_cache"
    )
    stack = Stack(
        Tokens(vocab, width, position=Learned(context)),
        (pre_norm(attention, dense, norm=norm),) * depth_of(config),
        norm,
    )
    found = assembled(config, stack, Language(vocab), context)
    return found.named(_names(1 if shares else heads), "transformer.", MASKS)


def _names(groups: int) -> Table:
    """Queries, keys and values one after the other, or those of each head together."""
    parts: dict[str, str | Place] = {
        "attention_before": "ln_1",
        **fused("attn.c_attn", "attention.query", "attention.key", "attention.value", groups=groups),
        "attention.output": "attn.c_proj",
        "feed_forward_before": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    return {**WEIGHTS, **layer_names("transformer.h.{layer}", parts)}


FAMILY = Family(
    types=("gpt_bigcode",), describe=describe, defaults={"gpt_bigcode": {"tie_word_embeddings": True}}
)
