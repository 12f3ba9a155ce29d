"""DistilBERT: BERT at half the depth, without types and pooler. Sanh et al. 2019."""

from __future__ import annotations

from qkv.errors import ConfigError
from qkv.families.config import Config
from qkv.families.encoders import bert_layer, bert_tokens, masked_language, pooler, rows, shape
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, head_among
from qkv.spec import Learned, Model, Stack

NAMES = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}


def describe(config: Config) -> Description:
    """From a configuration of model type distilbert."""
    config = _renamed(config)
    config.put("type_vocab_size", 0)
    size, context = shape(config), rows(config)
    # whether the table began as sinusoids: it is stored, and trained, either way
    config.discard("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")
    tokens = bert_tokens(config, size, Learned(context))
    head = head_among(
        config,
        {
            "Model": None,
            "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
            **classifiers(config, pooler(size.width, "relu")),
        },
    )
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    return Description(Model(encoder=stack, head=head), {}, context)


def _renamed(config: Config) -> Config:
    """Under the names of the other encoders; messages keep the file's own."""
    twice = [theirs for theirs, ours in NAMES.items() if theirs in config and ours in config]
    if twice:
        raise ConfigError(f"{config.at(twice[0])} and {NAMES[twice[0]]} say the same thing twice.")
    data = {NAMES.get(key, key): value for key, value in config.data.items()}
    called = {ours: theirs for theirs, ours in NAMES.items() if theirs in config}
    return Config(data, config.where, config.ignore, {**config.called, **called})


FAMILY = Family(types=("distilbert",), describe=describe)
