"""Which head `architectures` names, among those a family offers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qkv.errors import ConfigError
from qkv.families.config import Config, shown
from qkv.spec import Pool, SequenceClass, Span, TokenClass
from qkv.spec.heads import Head

# ends in "Model" as well, and is no bare model
OTHERS = ("LMHeadModel", "DoubleHeadsModel", "EncoderModel", "DecoderModel", "MTModel")
MOST_CLASSES = 1 << 20


def head_among(config: Config, offers: Mapping[str, Head | None], default: str = "Model") -> Head | None:
    """The head under the ending of the class named first; a file that names none means `default`."""
    return offers[ending_among(config, offers, default)]


def ending_among(config: Config, offers: Iterable[str], default: str = "Model") -> str:
    """The longest ending that fits decides: BertLMHeadModel is no bare model."""
    name = (config.take("architectures", list, None) or [default])[0]
    known = tuple(offers)
    if isinstance(name, str):
        fits = [ending for ending in (*known, *OTHERS) if name.endswith(ending)]
        best = max(fits, key=len, default=None)
        if best in known:
            return str(best)
    raise ConfigError(
        f"{config.at('architectures')} names {shown(name)}, whose head is not known for this model "
        f"(those that are end in {', '.join(known)})."
    )


def labels(config: Config, default: int = 2) -> int:
    """The number of classes: of the names in `id2label`, else `num_labels`."""
    number = config.size("num_labels", default, most=MOST_CLASSES)
    config.discard("_num_labels")  # an older spelling, always beside id2label
    return len(config.take("id2label", dict, None) or ()) or number


def classifiers(config: Config, pool: Pool) -> dict[str, Head | None]:
    """The heads that most encoders offer beside that of their pretraining."""
    classes = labels(config)
    return {
        "ForSequenceClassification": SequenceClass(classes, pool),
        "ForTokenClassification": TokenClass(classes),
        "ForQuestionAnswering": Span(),
        "ForMultipleChoice": SequenceClass(1, pool),  # one score a choice
    }
