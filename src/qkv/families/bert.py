"""BERT: a post-norm encoder over tokens, positions and types. Devlin et al. 2018.

The bare model is its hidden states; the pooler that some files hold beside it belongs to the heads
that read it.
"""

from __future__ import annotations

from qkv.families.config import Config
from qkv.families.encoders import (
    bert_layer,
    bert_tokens,
    masked_language,
    pooler,
    refuse_decoder,
    rows,
    shape,
)
from qkv.families.family import Description, Family
from qkv.families.heads import classifiers, head_among
from qkv.spec import Learned, Model, SequenceClass, Stack

# of the multilingual model, which the class never read
UNREAD = (
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)


def describe(config: Config) -> Description:
    """From a configuration of model type bert."""
    refuse_decoder(config)
    size, context = shape(config), rows(config)
    tokens = bert_tokens(config, size, Learned(context))
    first = pooler(size.width)
    head = head_among(
        config,
        {
            "Model": None,
            "ForMaskedLM": masked_language(tokens, size.activation, size.norm),
            "ForNextSentencePrediction": SequenceClass(2, first),
            **classifiers(config, first),
        },
    )
    config.discard(*UNREAD)
    config.finish()
    stack = Stack(tokens, (bert_layer(config, size),) * size.depth)
    return Description(Model(encoder=stack, head=head), {}, context)


FAMILY = Family(types=("bert",), describe=describe)
