"""DistilBERT: BERT at half the depth, without types and pooler. Sanh et al. 2019."""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import bert_layer, bert_tokens, masked_language, pooler, rows, shape
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, ending_among
from qkv.families.weights import KINDS, layer_names
from qkv.spec import Learned, Model, Stack
from qkv.spec.heads import Head

NAMES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}

PARTS = {
    "attention.query": "attention.q_lin",
    "attention.key": "attention.k_lin",
    "attention.value": "attention.v_lin",
    "attention.output": "attention.out_lin",
    "attention_post": "sa_layer_norm",
    "feed_forward.up": "ffn.lin1",
    "feed_forward.down": "ffn.lin2",
    "feed_forward_post": "output_layer_norm",
}
HEADS = {
    "encoder.embedding.norm": "distilbert.embeddings.LayerNorm",
    "head": "vocab_projector",
    "head.transform.linear": "vocab_transform",
    "head.transform.norm": "vocab_layer_norm",
    "head.pool.dense.linear": "pre_classifier",
    "head.output": "classifier",
}
WEIGHTS = {
    "encoder.embedding.weight": "distilbert.embeddings.word_embeddings.weight",
    "encoder.embedding.position.weight": "distilbert.embeddings.position_embeddings.weight",
    **layer_names("distilbert.transformer.layer.{layer}", PARTS, "encoder"),
    **{f"{our}.{kind}": f"{their}.{kind}" for our, their in HEADS.items() for kind in KINDS},
}


def describe(config: Config) -> Description:
    """From a configuration of model type distilbert."""
    config = _renamed(config)
    config.put("type_vocab_size", 0)
    size, context = shape(config), rows(config)
    # whether the table began as sinusoids: it is stored, and trained, either way
    config.discard("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    tokens = bert_tokens(config, size, Learned(context))
    heads: dict[str, Head | None] = {
        "Model": None,
        "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
        **classifiers(config, pooler(size.width, "relu")),
    }
    ending = ending_among(config, heads)
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    found = Description(Model(encoder=stack, head=heads[ending]), {}, context)
    return found.named(WEIGHTS, "distilbert.")


def _renamed(config: Config) -> Config:
    """Under the names of the other encoders; messages keep the file's own."""
    twice = [theirs for theirs, ours in NAMES.items() if theirs in config and ours in config]
    if twice:
        raise ConfigError(f"{config.at(twice[0])} and {NAMES[twice[0]]} say the same thing twice.")
    data = {NAMES.get(key, key): value for key, value in config.data.items()}
    called = {ours: theirs for theirs, ours in NAMES.items() if theirs in config}
    return config.again(data, called=called, made={NAMES.get(key, key) for key in config.derived})


FAMILY = Family(types=("distilbert",), describe=describe)
