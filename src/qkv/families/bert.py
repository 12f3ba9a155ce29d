"""BERT: a post-norm encoder over tokens, positions and types. Devlin et al. 2018.

The bare model is its hidden states; the pooler that some files hold beside it belongs to the heads
that read it.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.encoders import (
    bert_layer,
    bert_tokens,
    discard_if,
    masked_language,
    pooler,
    refuse_decoder,
    rows,
    shape,
)
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, ending_among
from qkv.families.weights import KINDS, Table
from qkv.spec import Learned, Model, SequenceClass, Stack
from qkv.spec.heads import Head

# of the multilingual model, which the class never read
UNREAD = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)

LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_post": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_post": "output.LayerNorm",
}
LAYERS: dict[str, str] = {
    "encoder.embedding.weight": "bert.embeddings.word_embeddings.weight",
    "encoder.embedding.position.weight": "bert.embeddings.position_embeddings.weight",
    "encoder.embedding.types.weight": "bert.embeddings.token_type_embeddings.weight",
    **{f"encoder.embedding.norm.{kind}": f"bert.embeddings.LayerNorm.{kind}" for kind in KINDS},
    **{
        f"encoder.layers.{{layer}}.{our}.{kind}": f"bert.encoder.layer.{{layer}}.{their}.{kind}"
        for our, their in LAYER.items()
        for kind in KINDS
    },
}
WEIGHTS: Table = {
    **LAYERS,
    **{f"head.pool.dense.linear.{kind}": f"bert.pooler.dense.{kind}" for kind in KINDS},
    **{f"head.transform.linear.{kind}": f"cls.predictions.transform.dense.{kind}" for kind in KINDS},
    **{f"head.transform.norm.{kind}": f"cls.predictions.transform.LayerNorm.{kind}" for kind in KINDS},
    "head.weight": "cls.predictions.decoder.weight",
    "head.bias": "cls.predictions.bias",
}
COPIES = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
# the numbers of positions, and what other heads read
UNUSED = ("*embeddings.position_ids", "bert.pooler.*", "cls.seq_relationship.*")
OLDER = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


def describe(config: Config) -> Description:
    """From a configuration of model type bert."""
    refuse_decoder(config)
    size, context = shape(config), rows(config)
    tokens = bert_tokens(config, size, Learned(context))
    first = pooler(size.width)
    heads: dict[str, Head | None] = {
        "Model": None,
        "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
        "ForNextSentencePrediction": SequenceClass(2, first),
        **classifiers(config, first),
    }
    ending = ending_among(config, heads)
    config.discard(*UNREAD)
    discard_if(config, {"emb_size": size.width})
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    answer = "cls.seq_relationship" if ending == "ForNextSentencePrediction" else "classifier"
    weights = {**WEIGHTS, **{f"head.output.{kind}": f"{answer}.{kind}" for kind in KINDS}}
    found = Description(Model(encoder=stack, head=heads[ending]), {}, context)
    return found.named(weights, "bert.", UNUSED, COPIES, OLDER)


FAMILY = Family(types=("bert",), describe=describe)
