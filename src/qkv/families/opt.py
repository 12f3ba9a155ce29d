"""OPT: ReLU, learned positions after two rows nobody reads; 350m is post-norm and narrow at both ends.

Zhang et al. 2022.
"""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.decoder_parts import activation_of, assembled, context_of, depth_of, head_sizes
from qkv.families.family import Description, Family
from qkv.families.weights import KINDS, layer_names
from qkv.spec import (
    Attention,
    Dense,
    Language,
    LayerNorm,
    Learned,
    Project,
    Projections,
    Stack,
    Tokens,
    post_norm,
    pre_norm,
)

OFFSET = 2

PARTS = {
    **dict.fromkeys(("attention_before", "attention_post"), "self_attn_layer_norm"),
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    **dict.fromkeys(("feed_forward_before", "feed_forward_post"), "final_layer_norm"),
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
}
WEIGHTS = {
    "decoder.embedding.weight": "model.decoder.embed_tokens.weight",
    "decoder.embedding.widen.weight": "model.decoder.project_in.weight",
    "decoder.embedding.position.weight": "model.decoder.embed_positions.weight",
    **layer_names("model.decoder.layers.{layer}", PARTS),
    **{f"decoder.norm.{kind}": f"model.decoder.final_layer_norm.{kind}" for kind in KINDS},
    "head.transform.linear.weight": "model.decoder.project_out.weight",
    "head.weight": "lm_head.weight",
    "head.output.weight": "score.weight",
}


def describe(config: Config) -> Description:
    """From a configuration of model type opt."""
    width, vocab, context = config.size("hidden_size"), config.size("vocab_size"), context_of(config, 2048)
    affine = config.take("layer_norm_elementwise_affine", bool, True)
    norm = LayerNorm(scale=affine, bias=affine)
    biased = config.take("enable_bias", bool, True)
    mixers = (
        Attention(*head_sizes(config, width), projections=Projections(bias="qkvo" if biased else "")),
        Dense(activation_of(config, "activation_function", "relu"), config.size("ffn_dim"), biased),
    )
    first = config.take("do_layer_norm_before", bool, True)
    layer = pre_norm(*mixers, norm=norm) if first else post_norm(*mixers, norm=norm)
    last = first and not config.take("_remove_final_layer_norm", bool, False)
    config.discard("_remove_final_layer_norm")  # means nothing after post-norm layers
    table = config.size("word_embed_proj_dim", width)
    narrow = table if table != width else None
    position = Learned(context + OFFSET, offset=OFFSET)
    tokens = Tokens(vocab, width, position=position, table_width=narrow)
    stack = Stack(tokens, (layer,) * depth_of(config), norm if last else None)
    transform = Project(narrow, bias=False) if narrow else None
    found = assembled(config, stack, Language(vocab, transform=transform), context)
    if narrow and not isinstance(found.model.head, Language):
        # the map to the narrow width belongs to the bare model there; here it is part of the head
        raise ConfigError(
            f"{config.at('architectures')} names a model without a language head whose states are "
            f"word_embed_proj_dim {narrow:,} wide and not hidden_size {width:,}; "
            "only its language model can be described."
        )
    return found.named(WEIGHTS, "model.")


FAMILY = Family(types=("opt",), describe=describe, defaults={"opt": {"tie_word_embeddings": True}})
