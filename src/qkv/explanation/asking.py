"""What of a model's answer is explained: the next token, a masked one, a class, a likeness, a translation.

Each kind of head has a way of its own to be asked; what comes of it is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
import torch

from qkv.engine import Completion
from qkv.engine.requests import start_token
from qkv.errors import RequestError, UnsupportedError
from qkv.explanation.lens import logit_lens, logit_lens_answers
from qkv.explanation.metric import Difference, Less, LogProbability, Metric, Similarity
from qkv.explanation.pairs import text_vector
from qkv.explanation.reading import Reading
from qkv.model import Model
from qkv.spec import Language, MaskedLanguage, MultiToken, Pool, PooledEmbedding, SequenceClass
from qkv.text import Tokenizer

MASKS = ("[MASK]", "<mask>")
LONGEST = 24  # tokens of an encoder-decoder's answer that are aligned with its source
Answer = str | int


@dataclass(frozen=True)
class Said:
    """What the model would answer if it stopped behind a layer, how likely, and the metric there.

    A model that answers with a vector has a metric alone.
    """

    layer: str
    answer: str | None
    probability: float | None
    metric: float


@dataclass(frozen=True, eq=False)
class Asked:
    """A reading, what of its answer is measured, and how to name it.

    `queries` are the tokens whose attention is looked at, and `role` which attention: their own side's,
    or "cross". `place` answers, where one does. `other` is the text that a similarity is with, and
    `answer` all that an encoder-decoder answers.
    """

    reading: Reading
    metric: Metric
    target: str
    against: str | None
    place: int | None
    queries: tuple[int, ...]
    role: str = "attention"
    choices: Choices | None = None
    other: Reading | None = None
    answer: tuple[int, ...] = ()

    def lens(self) -> tuple[Said, ...]:
        """Behind each layer."""
        metrics = logit_lens(self.reading, self.metric)
        found = []
        for row, (label, value) in enumerate(zip(metrics.axes[0].labels, metrics.values, strict=True)):
            answer, probability = (None, None) if self.choices is None else self.choices.best(row)
            found.append(Said(str(label), answer, probability, float(value)))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Choices:
    """All answers that a head gives one probability each: behind each layer, (layers, answers)."""

    shares: np.ndarray
    name: Callable[[int], str]
    target: int

    @property
    def probability(self) -> float:
        """Of what is explained."""
        return float(self.shares[-1, self.target])

    def likeliest(self, count: int) -> tuple[tuple[str, float], ...]:
        order = np.argsort(-self.shares[-1], kind="stable")[:count]
        return tuple((self.name(int(answer)), float(self.shares[-1, answer])) for answer in order)

    def best(self, layer: int) -> tuple[str, float]:
        best = int(self.shares[layer].argmax())
        return self.name(best), float(self.shares[layer, best])


class Kind(Protocol):
    def __call__(self, model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked: ...


def asked(model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked:
    """What is asked of a model of this kind.

    Raises RequestError for answers that there are not, and UnsupportedError for a model without a head
    that answers a text: its methods take a metric and a place.
    """
    if model.tokenizer is None:
        raise RequestError("A text is explained by its tokens, and this model has no tokenizer.")
    for head, kind in KINDS.items():
        if isinstance(model.spec.head, head):
            return kind(model, prompt, target, against)
    what = "gives the states of its tokens" if model.spec.head is None else "answers every token by itself"
    raise UnsupportedError(f"This model {what}: ask the methods of qkv.explanation, with a place.")


def token(model: Model, given: Answer) -> int:
    """The token that a text begins with, as it stands in a text; a token's id is its own.

    Raises RequestError for a text that makes none.
    """
    ids = [given] if isinstance(given, int) else encoded(model, given)
    if not ids:
        raise RequestError(f"{given!r} makes no token.")
    return ids[0]


def encoded(model: Model, text: str) -> list[int]:
    """A text's tokens without what the model's files put around it."""
    return [] if model.tokenizer is None else model.tokenizer.encode(text, bos=False, eos=False)


def masked_place(reading: Reading) -> int:
    """Where the prompt's one mask is. Raises RequestError for none, or several."""
    labels = [reading.label(one) for one in reading.sides[-1].given[0].tolist()]
    found = [place for place, label in enumerate(labels) if label.strip() in MASKS]
    if len(found) != 1:
        raise RequestError(f"The prompt must have one mask ({' or '.join(MASKS)}) and has {len(found)}.")
    return found[0]


def one_class(given: Answer, count: int) -> int:
    """The number of a class. Raises RequestError for what is none."""
    try:
        number = int(given)
    except ValueError:
        raise RequestError(f"{given!r} is no class: give its number, 0 to {count - 1}.") from None
    if not 0 <= number < count:
        raise RequestError(f"{number} is not one of this model's {count:,} answers.")
    return number


# each kind


def _next(model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked:
    if model.spec.encoder is not None:
        return _answered(model, prompt, target, against)
    reading = Reading(model, model.encode(prompt))
    return _told(reading, _Tokens(model), reading.length() - 1, target, against)


def _masked(model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked:
    reading = Reading(model, model.encode(prompt))
    return _told(reading, _Tokens(model), masked_place(reading), target, against)


def _answered(model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked:
    """An encoder-decoder: its first token is explained, and all that it answers is aligned."""
    source = model.encode(prompt)
    reading = Reading(model, [start_token(model.loaded)], source=source)
    found = _told(reading, _Tokens(model), 0, target, against)
    if target is None:
        room = LONGEST if model.context is None else min(LONGEST, model.context - 1)
        done = cast(Completion, model.generate(source, max_new_tokens=room, n=1, temperature=0.0))
        answer = done.tokens
    else:
        answer = [target] if isinstance(target, int) else encoded(model, target)
    return replace(found, role="cross", answer=tuple(answer))


def _class(model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked:
    reading, head = Reading(model, model.encode(prompt)), cast(SequenceClass, model.spec.head)
    found = _told(reading, _Classes(), None, target, against)
    return replace(found, queries=_pooled(reading, head.pool))


def _similar(model: Model, prompt: str, target: Answer | None, against: Answer | None) -> Asked:
    texts = [text for text in (target, against) if text is not None]
    if not isinstance(target, str) or not all(isinstance(text, str) for text in texts):
        raise RequestError(
            "This model answers a text with a vector: give the text to compare the prompt with as the target."
        )
    others = [Reading(model, model.encode(str(text))) for text in texts]
    likeness: list[Metric] = [
        Similarity(text_vector(other), str(text)) for other, text in zip(others, texts, strict=True)
    ]
    metric = likeness[0] if against is None else Less(*likeness)
    reading, head = Reading(model, model.encode(prompt)), cast(PooledEmbedding, model.spec.head)
    less = None if against is None else str(against)
    return Asked(reading, metric, target, less, None, _pooled(reading, head.pool), other=others[0])


KINDS: dict[type[Any], Kind] = {
    MaskedLanguage: _masked,  # before Language, which it is too
    Language: _next,
    MultiToken: _next,
    SequenceClass: _class,
    PooledEmbedding: _similar,
}


class _Names(Protocol):
    """What a head's answers are called, and which one is meant."""

    def name(self, answer: int) -> str: ...

    def number(self, given: Answer, count: int) -> int: ...

    def called(self, answer: int, given: Answer | None) -> str:
        """What an answer that was asked for in these words is called."""
        ...


@dataclass(frozen=True, eq=False)
class _Tokens:
    model: Model

    def name(self, answer: int) -> str:
        return cast(Tokenizer, self.model.tokenizer).decode([answer], skip_special=False)

    def number(self, given: Answer, count: int) -> int:
        return one_class(token(self.model, given), count)

    def called(self, answer: int, given: Answer | None) -> str:
        if isinstance(given, str) and len(encoded(self.model, given)) > 1:
            return f"{given} (its first token)"
        return self.name(answer)


class _Classes:
    def name(self, answer: int) -> str:
        return f"class {answer}"

    def number(self, given: Answer, count: int) -> int:
        return one_class(given, count)

    def called(self, answer: int, given: Answer | None) -> str:
        return self.name(answer)


def _told(
    reading: Reading, names: _Names, place: int | None, target: Answer | None, against: Answer | None
) -> Asked:
    """Where each answer has a probability, at a place or once."""
    logits = logit_lens_answers(reading, None if place is None else (place,)).values[:, 0]
    shares = torch.from_numpy(np.array(logits)).double().softmax(-1).numpy()
    count = shares.shape[-1]
    chosen = int(shares[-1].argmax()) if target is None else names.number(target, count)
    rather = None if against is None else names.number(against, count)
    ours = names.called(chosen, target)
    theirs = None if rather is None else names.called(rather, against)
    metric: Metric = (
        LogProbability(chosen, place, ours)
        if rather is None
        else Difference(chosen, rather, place, (ours, theirs))
    )
    return Asked(
        reading,
        metric,
        ours,
        theirs,
        place,
        () if place is None else (place,),
        choices=Choices(shares, names.name, chosen),
    )


def _pooled(reading: Reading, pool: Pool) -> tuple[int, ...]:
    """The tokens whose states a head reads."""
    every = range(reading.length())
    return {"first": (0,), "last": (every[-1],)}.get(pool.how, tuple(every))
