"""What is asked of a model's answer: one number of its logits.

A metric is called with logits (rows, places, answers), the answers at its own `places` only, and gives
(rows,), with gradient. Any object with `name`, `places` and such a call is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from qkv.errors import RequestError

Logits = Float[Tensor, "rows places answers"]


class Metric(Protocol):
    """What of an answer is measured."""

    @property
    def name(self) -> str:
        """What a number is, in words: "logit of 7 at place -1"."""
        ...

    @property
    def places(self) -> tuple[int, ...] | None:
        """The tokens whose answers it reads, negative from the end; None where a head answers once."""
        ...

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]: ...


@dataclass(frozen=True)
class _OfOne:
    """A number of one answer: `token` is the id of a token, or the number of a class.

    `place` is the token that answers, the last where not given; None for a head that answers once for
    the whole sequence, as a classifier's does. `called` is what the answer is named, its number where
    not given.
    """

    token: int
    place: int | None = -1
    called: str | None = None

    what: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.what} of {_called(self.called, self.token)}{_placed(self.place)}"

    @property
    def places(self) -> tuple[int, ...] | None:
        return None if self.place is None else (self.place,)


class Logit(_OfOne):
    """The logit of a token or class."""

    what = "logit"

    @property
    def weights(self) -> tuple[tuple[int, float], ...]:
        """The metric as a weighted sum of logits."""
        return ((self.token, 1.0),)

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        return _answer(logits, self.token)


class LogProbability(_OfOne):
    """The natural logarithm of its probability."""

    what = "log-probability"

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        return _answer(logits.float().log_softmax(-1), self.token)


class Probability(_OfOne):
    """Its probability, from 0 to 1."""

    what = "probability"

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        return _answer(logits.float().softmax(-1), self.token)


@dataclass(frozen=True)
class Difference:
    """Why `token` rather than `against`: the difference of their logits, which is that of their
    log-probabilities too. `called` are what the two are named."""

    token: int
    against: int
    place: int | None = -1
    called: tuple[str | None, str | None] = (None, None)

    @property
    def name(self) -> str:
        both = zip(self.called, (self.token, self.against), strict=True)
        first, second = (_called(*one) for one in both)
        return f"logit of {first} less that of {second}{_placed(self.place)}"

    @property
    def places(self) -> tuple[int, ...] | None:
        return None if self.place is None else (self.place,)

    @property
    def weights(self) -> tuple[tuple[int, float], ...]:
        return (self.token, 1.0), (self.against, -1.0)

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        return _answer(logits, self.token) - _answer(logits, self.against)


@dataclass(frozen=True, eq=False)
class Similarity:
    """The cosine of a text's vector with that of another: of models that answer a text with one vector.

    `other` (width,) is what the model makes of the other text, and `text` names it.
    """

    other: Float[Tensor, " width"]
    text: str
    places: ClassVar[None] = None

    @property
    def name(self) -> str:
        return f"cosine with {self.text!r}"

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        if logits.shape[-1] != len(self.other):
            theirs, ours = len(self.other), logits.shape[-1]
            raise RequestError(f"The other text's vector has {theirs:,} numbers and this model's {ours:,}.")
        return torch.cosine_similarity(logits[:, 0].float(), self.other.to(logits).float()[None], dim=-1)


@dataclass(frozen=True, eq=False)
class Less:
    """One metric less another that reads the same places: why more like this text than like that."""

    first: Metric
    second: Metric

    @property
    def name(self) -> str:
        return f"{self.first.name} less {self.second.name}"

    @property
    def places(self) -> tuple[int, ...] | None:
        if self.first.places != self.second.places:
            raise RequestError("Two metrics are subtracted only where they read the same places.")
        return self.first.places

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        return self.first(logits) - self.second(logits)


@dataclass(frozen=True)
class Loss:
    """The mean of -log p(target) over successive places, in nats a token.

    `targets` are what the places from `first` on should answer: of a decoder that is asked to tell the
    whole prompt, its tokens from the second on, with `first` 0.
    """

    targets: tuple[int, ...]
    first: int = 0

    @property
    def name(self) -> str:
        return f"loss over {len(self.targets):,} tokens from place {self.first}"

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(range(self.first, self.first + len(self.targets)))

    def __call__(self, logits: Logits) -> Float[Tensor, " rows"]:
        if not self.targets:
            raise RequestError("A loss needs at least one target.")
        _check(logits, *self.targets)
        targets = torch.tensor(self.targets, device=logits.device)[None, :, None]
        told = logits.float().log_softmax(-1).gather(-1, targets.expand(len(logits), -1, -1))
        return -told[..., 0].mean(-1)


def _called(name: str | None, number: int) -> str:
    return str(number) if name is None else repr(name)


def _placed(place: int | None) -> str:
    return "" if place is None else f" at place {place}"


def _answer(logits: Logits, token: int) -> Float[Tensor, " rows"]:
    _check(logits, token)
    return logits[:, 0, token].float()


def _check(logits: Logits, *tokens: int) -> None:
    for token in tokens:
        if not 0 <= token < logits.shape[-1]:
            raise RequestError(f"{token} is not one of this model's {logits.shape[-1]:,} answers.")
