"""T5: scores unscaled, distances in buckets, one table a stack. Raffel et al. 2019.

Version 1.0 has a ReLU and a tied head whose logits are scaled for it; 1.1 has a gate and a head of its
own.
"""

from __future__ import annotations

from dataclasses import dataclass

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.encoders import ACTIVATIONS, MOST_LAYERS, MOST_POSITIONS, discard_training
from qkv.families.family import Description, Family
from qkv.families.heads import ending_among, labels
from qkv.families.weights import KINDS, Place, Table, layer_names
from qkv.spec import (
    Attention,
    Buckets,
    Causal,
    CrossAttention,
    Dense,
    Dot,
    Everything,
    Gated,
    Language,
    Layer,
    Model,
    Pool,
    Project,
    RMSNorm,
    SequenceClass,
    Span,
    Stack,
    TokenClass,
    Tokens,
    pre_norm,
)
from qkv.spec.heads import Head

DERIVED = ("dense_act_fn", "is_gated_act")  # from feed_forward_proj, by the class
ALONE = ("EncoderModel", "ForTokenClassification")  # without the decoder

ATTENTION = {"query": "q", "key": "k", "value": "v", "output": "o", "position": "relative_attention_bias"}
STEPS = {  # of a layer, and their names there
    "encoder": {"attention": "SelfAttention", "feed_forward": "DenseReluDense"},
    "decoder": {"attention": "SelfAttention", "cross": "EncDecAttention", "feed_forward": "DenseReluDense"},
}
# a table that the first files have, and nothing reads
UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)


def describe(config: Config) -> Description:
    """From a configuration of model type t5."""
    return described(config, _language(config))


def _language(config: Config) -> Language:
    """Scaled where it is tied.

    transformers from version 5 on writes `scale_decoder_outputs` and says of every file that it is
    tied; what is not scaled was not.
    """
    tied = config.take("tie_word_embeddings", bool, True)
    tied = config.take("scale_decoder_outputs", bool, tied) and tied
    scale = config.size("d_model") ** -0.5 if tied else 1.0
    return Language(config.size("vocab_size"), scale=scale, shared="tokens" if tied else None)


def described(config: Config, language: Language) -> Description:
    """Around a head. `n_positions`, in older files, is a length that was trained and no limit."""
    discard_training(config)
    config.discard("dropout_rate", *DERIVED)
    parts = _Parts.read(config)
    depth = config.size("num_layers", most=MOST_LAYERS)
    decoder_depth = config.size("num_decoder_layers", depth, most=MOST_LAYERS)
    tokens = Tokens(config.size("vocab_size"), config.size("d_model"), shared="tokens")
    pool, classes = Pool("last", Project(tokens.width, activation="tanh")), labels(config)
    heads: dict[str, Head | None] = {
        "Model": None,
        "EncoderModel": None,
        "ForConditionalGeneration": language,
        "LMHeadModel": language,
        "ForSequenceClassification": SequenceClass(classes, pool),
        "ForTokenClassification": TokenClass(classes),
        "ForQuestionAnswering": Span(),
    }
    ending = ending_among(config, heads, "ForConditionalGeneration")
    context = config.size("n_positions", None, most=MOST_POSITIONS)
    config.finish()
    encoder = Stack(tokens, (parts.encoder_layer(),) * depth, parts.norm)
    decoder = Stack(tokens, (parts.decoder_layer(tokens.width),) * decoder_depth, parts.norm)
    model = Model(encoder, None if ending in ALONE else decoder, heads[ending])
    answer = "classifier" if ending == "ForTokenClassification" else "classification_head.out_proj"
    return Description(model, {}, context).named(
        _names(parts.feed_forward, answer),
        irrelevant=UNUSED,
        copies={"encoder.embed_tokens.weight": "shared.weight"},
    )


def _names(feed_forward: Dense | Gated, answer: str) -> Table:
    up = {"up": "wi"} if isinstance(feed_forward, Dense) else {"gate": "wi_0", "up": "wi_1"}
    found: dict[str, str | Place] = {
        "encoder.embedding.weight": "shared.weight",
        "decoder.embedding.weight": "decoder.embed_tokens.weight",
        "head.weight": "lm_head.weight",
    }
    for stack, steps in STEPS.items():
        parts = {}
        for place, (step, called) in enumerate(steps.items()):
            parts[f"{step}_before"] = f"layer.{place}.layer_norm"
            inside = {**up, "down": "wo"} if step == "feed_forward" else ATTENTION
            parts |= {f"{step}.{our}": f"layer.{place}.{called}.{their}" for our, their in inside.items()}
        found |= layer_names(f"{stack}.block.{{layer}}", parts, stack)
        found[f"{stack}.norm.weight"] = f"{stack}.final_layer_norm.weight"
    for kind in KINDS:
        found[f"head.pool.dense.linear.{kind}"] = f"classification_head.dense.{kind}"
        found[f"head.output.{kind}"] = f"{answer}.{kind}"
    return found


@dataclass(frozen=True)
class _Parts:
    """What both stacks are made of."""

    heads: int
    head_dim: int
    feed_forward: Dense | Gated
    norm: RMSNorm
    buckets: int
    furthest: int

    @classmethod
    def read(cls, config: Config) -> _Parts:
        return cls(
            heads=config.size("num_heads"),
            head_dim=config.size("d_kv"),
            feed_forward=_feed_forward(config),
            norm=RMSNorm(config.positive("layer_norm_epsilon", 1e-6)),
            buckets=config.size("relative_attention_num_buckets", 32),
            furthest=config.size("relative_attention_max_distance", 128),
        )

    def attention(self, side: str) -> Attention:
        around = side == "encoder"
        return Attention(
            self.heads,
            self.heads,
            self.head_dim,
            score=Dot(),
            position=Buckets(self.buckets, self.furthest, around, shared=f"{side} distances"),
            mask=Everything() if around else Causal(),
        )

    def encoder_layer(self) -> Layer:
        return pre_norm(self.attention("encoder"), self.feed_forward, norm=self.norm)

    def decoder_layer(self, width: int) -> Layer:
        cross = CrossAttention(self.heads, self.heads, self.head_dim, source_width=width, score=Dot())
        return pre_norm(self.attention("decoder"), cross, self.feed_forward, norm=self.norm)


def _feed_forward(config: Config) -> Dense | Gated:
    """An activation's name, with "gated-" in front where there is a gate."""
    kind, hidden = config.take("feed_forward_proj", str, "relu"), config.size("d_ff")
    name = kind.removeprefix("gated-")
    if kind == "gated-gelu":
        name = "gelu_new"  # what 1.1 was trained with
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"{config.at('feed_forward_proj')} {shown(kind)} is not known "
            f'({", ".join(ACTIVATIONS)}; "gated-" in front for a gate).'
        )
    activation = ACTIVATIONS[name]
    return Gated(activation, hidden) if kind.startswith("gated-") else Dense(activation, hidden, bias=False)


FAMILY = Family(types=("t5",), describe=describe)
