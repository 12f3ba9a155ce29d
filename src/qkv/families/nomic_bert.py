"""Nomic's BERT: post-norm, rotary, gated, hardly a bias. Nussbaum et al. 2024.

Two spellings: that of the files the model was released with, and that of its class in transformers.
"""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import (
    MOST_POSITIONS,
    Shape,
    discard_if,
    head_size,
    masked_bias,
    masked_language,
    pooler,
    rows,
    shape,
    tied,
    types,
)
from qkv.families.family import Description, Family
from qkv.families.heads import head_among, labels
from qkv.families.positions import rotary
from qkv.families.weights import KINDS, Table, fused, layer_names
from qkv.spec import (
    Attention,
    Everything,
    Gated,
    Model,
    SequenceClass,
    Stack,
    TokenClass,
    Tokens,
    post_norm,
)

NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
    "rotary_emb_interleaved": "rope_interleaved",
}
# switches of the first code, as its release has them; with another value a key is named
RELEASED = {
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
UNREAD = (  # how fast, in training, or of a head it has not
    "attn_pdrop",
    "dense_seq_output",
    "fused_bias_fc",
    "fused_dropout_add_ln",
    "pad_vocab_size_multiple",  # vocab_size is padded already
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "use_flash_attn",
    "use_xentropy",
)

LAYER = {
    "attention.output": "attn.out_proj",
    "attention_post": "norm1",
    "feed_forward.gate": "mlp.fc12",
    "feed_forward.up": "mlp.fc11",
    "feed_forward.down": "mlp.fc2",
    "feed_forward_post": "norm2",
}
WEIGHTS: Table = {
    "encoder.embedding.weight": "nomic_bert.embeddings.word_embeddings.weight",
    "encoder.embedding.types.weight": "nomic_bert.embeddings.token_type_embeddings.weight",
    **{f"encoder.embedding.norm.{kind}": f"nomic_bert.emb_ln.{kind}" for kind in KINDS},
    **layer_names("nomic_bert.encoder.layers.{layer}", LAYER, "encoder"),
    **fused(
        "nomic_bert.encoder.layers.{layer}.attn.Wqkv.weight",
        *(f"encoder.layers.{{layer}}.attention.{part}.weight" for part in ("query", "key", "value")),
    ),
    **{f"head.transform.linear.{kind}": f"cls.predictions.transform.dense.{kind}" for kind in KINDS},
    **{f"head.transform.norm.{kind}": f"cls.predictions.transform.layer_norm.{kind}" for kind in KINDS},
    "head.weight": "cls.predictions.decoder.weight",
    **{f"head.pool.dense.linear.{kind}": f"nomic_bert.pooler.dense.{kind}" for kind in KINDS},
    **{f"head.output.{kind}": f"classifier.{kind}" for kind in KINDS},
}
COPIES = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
# the last: of a head's two biases one is not added
UNUSED = ("*embeddings.position_ids", "*rotary_emb.inv_freq", "nomic_bert.pooler.*", "cls.predictions.bias")
MOVED = {"bert.": "nomic_bert."}  # the released masked model


def describe(config: Config) -> Description:
    """From a configuration of model type nomic_bert."""
    config = _renamed(config)
    size, context = shape(config), rows(config, 2048)
    tokens = Tokens(
        config.size("vocab_size"), size.width, types=types(config), norm=size.norm, shared=tied(config)
    )
    layer = post_norm(_attention(config, size, context), Gated(size.activation, size.hidden), norm=size.norm)
    classes = labels(config)
    head = head_among(
        config,
        {
            "Model": None,
            "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
            "ForSequenceClassification": SequenceClass(classes, pooler(size.width)),
            "ForTokenClassification": TokenClass(classes),
        },
    )
    discard_if(config, RELEASED)
    config.discard(*UNREAD)
    config.finish()
    found = Description(Model(encoder=Stack(tokens, (layer,) * size.depth), head=head), {}, context)
    weights = {**WEIGHTS, "head.bias": masked_bias("cls.predictions", tokens)}
    return found.named(weights, "nomic_bert.", UNUSED, COPIES, moved=MOVED)


def _attention(config: Config, size: Shape, context: int) -> Attention:
    head_dim = config.size("head_dim", None) or head_size(config, size.width, size.heads)
    trained = config.size("max_trained_positions", context, most=MOST_POSITIONS)
    factor = config.positive("rotary_scaling_factor", None)
    if factor is not None:
        config.put("rope_scaling", {"type": "dynamic", "factor": factor})
    position = rotary(config, head_dim, trained, theta=1000.0)
    return Attention(size.heads, size.heads, head_dim, position=position, mask=Everything())


def _renamed(config: Config) -> Config:
    """The first spelling under the names of the second; messages keep the file's own."""
    old = [theirs for theirs in NAMES if theirs in config]
    twice = [theirs for theirs in old if NAMES[theirs] in config]
    if twice:
        raise ConfigError(f"{config.at(twice[0])} and {NAMES[twice[0]]} say the same thing twice.")
    data = {NAMES.get(key, key): value for key, value in config.data.items()}
    if data.get("hidden_act") == "swiglu":
        data["hidden_act"] = "silu"  # the gate's activation
    called = {NAMES[theirs]: theirs for theirs in old}
    return config.again(data, called=called, made={NAMES.get(key, key) for key in config.derived})


FAMILY = Family(types=("nomic_bert",), describe=describe)
