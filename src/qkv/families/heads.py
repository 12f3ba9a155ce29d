"""Which head `architectures` names, among those a family offers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.families.family import head_of
from qkv.spec import Language, Pool, SequenceClass, Span, TokenClass
from qkv.spec.heads import Head

# ends in "Model" as well, and is no bare model
OTHERS = ("LMHeadModel", "DoubleHeadsModel", "EncoderModel", "DecoderModel", "MTModel")
MOST_CLASSES = 1 << 20


def head_among(config: Config, offers: Mapping[str, Head | None], default: str = "Model") -> Head | None:
    """The head under the ending of the class named first; a file that names none means `default`."""
    return offers[ending_among(config, offers, default)]


def ending_among(config: Config, offers: Iterable[str], default: str = "Model") -> str:
    """The longest ending that fits decides: BertLMHeadModel is no bare model.

    In lenient reading an unknown head is listed, and left out.
    """
    name = (config.take("architectures", list, None) or [default])[0]
    known = tuple(offers)
    if isinstance(name, str):
        fits = [ending for ending in (*known, *OTHERS) if name.endswith(ending)]
        best = max(fits, key=len, default=None)
        if best in known:
            return str(best)
    if config.record is not None:  # the layers are known all the same
        config.leave("architectures")
        return "Model"
    raise ConfigError(
        f"{config.at('architectures')} names {shown(name)}, whose head is not known for this model "
        f"(those that are end in {', '.join(known)})."
    )


def labels(config: Config, default: int = 2) -> int:
    """The number of classes: of the names in `id2label`, else `num_labels`."""
    number = config.size("num_labels", default, most=MOST_CLASSES)
    return len(config.take("id2label", dict, None) or ()) or number


def decoder_head(config: Config, language: Language) -> Head | None:
    """The head that `architectures` names, with the further ones that every decoder may have."""
    name = str((config.take("architectures", list, None) or [""])[0])
    if name.endswith("ForSequenceClassification"):
        return SequenceClass(labels(config), Pool("last"), bias=False)
    if name.endswith("ForTokenClassification"):
        return TokenClass(labels(config))
    if name.endswith("ForQuestionAnswering"):
        return Span()
    return head_of(config, language)


def classifiers(config: Config, pool: Pool) -> dict[str, Head | None]:
    """The heads that most encoders offer beside that of their pretraining."""
    classes = labels(config)
    return {
        "ForSequenceClassification": SequenceClass(classes, pool),
        "ForTokenClassification": TokenClass(classes),
        "ForQuestionAnswering": Span(),
        "ForMultipleChoice": SequenceClass(1, pool),  # one score a choice
    }
