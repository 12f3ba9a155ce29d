"""What changes logits before a token is chosen: biases, penalties, and the rules of a model's authors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.engine.logprobs import log_softmax
from qkv.engine.sampling import Sampling
from qkv.errors import RequestError
from qkv.generation_config import token_ids

Scores = NDArray[np.float64]
NONE_LEFT = "Of all tokens none is left to choose: logit_bias or the model forbids each."
Allowed = NDArray[np.bool_]  # (vocab,)


@dataclass(frozen=True)
class Rules:
    """What a generation_config.json says of certain tokens, whatever is asked for.

    `first` is the first token of an answer, `last` are those one of which ends an answer that
    reaches its limit. `ends` are not chosen before `least` tokens. No sequence of `ngram` tokens
    comes twice (0: may). `never` are tokens not chosen at all, `never_first` not as the first that
    is free.
    """

    first: int | None = None
    last: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    least: int = 0
    ngram: int = 0
    never: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()

    @property
    def say(self) -> bool:
        """Whether any token may be treated apart."""
        never = self.never or self.never_first
        return bool(self.first is not None or self.last or self.least or self.ngram or never)

    @staticmethod
    def read(settings: Mapping[str, Any], prompt: int, ends: Iterable[int]) -> Rules:
        """From the file's settings, for a text that goes on after `prompt` tokens of its stack.

        As the authors' library reads them: `min_length` counts the prompt, and a first token is
        forced after a single token only, as an encoder-decoder's start is.
        """
        return Rules(
            first=settings.get("forced_bos_token_id") if prompt == 1 else None,
            last=token_ids(settings, "forced_eos_token_id"),
            ends=tuple(sorted(ends)),
            least=max(settings.get("min_new_tokens") or 0, (settings.get("min_length") or 0) - prompt),
            ngram=settings.get("no_repeat_ngram_size") or 0,
            never=token_ids(settings, "suppress_tokens"),
            never_first=token_ids(settings, "begin_suppress_tokens"),
        )


class Processor:
    """From a model's logits to those that are chosen from, given the answer so far.

    `prompt` is what the answer goes on from; `limit` is how many tokens the answer can have. For a
    beam search it is the log-probabilities that are changed, and they are not normalised again, as
    in the library that most models' settings were chosen with.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        limit: int,
        rules: Rules = Rules(),
        search: bool = False,
    ):
        self.search = search
        self.sampling, self.prompt, self.limit, self.rules = sampling, tuple(prompt), limit, rules
        self.biased = np.fromiter(sampling.logit_bias, np.int64)
        self.bias = np.fromiter(sampling.logit_bias.values(), np.float64)
        asked = sampling.logit_bias or sampling.frequency_penalty or sampling.presence_penalty
        self.changes = bool(search or asked or sampling.repetition_penalty != 1 or rules.say)

    def __call__(
        self,
        logits: np.ndarray,
        answer: Sequence[int],
        top: float | None = None,
        allowed: Allowed | None = None,
    ) -> np.ndarray:
        """fp64; the logits themselves where nothing changes them. `top` is the greatest, if it is known.

        Tokens that are not `allowed` get -inf, all being allowed without it.

        Raises RequestError where the logits are not numbers or no token is left. In a search none may
        be left: that beam goes no further, and others may.
        """
        if not math.isfinite(logits.max() if top is None else top):  # NaN is the largest
            raise RequestError("The model's logits are not numbers; its weights or its type overflow.")
        if not self.changes and allowed is None:
            return logits
        return self.changed(np.array(logits, np.float64), answer, allowed)

    def changed(self, scores: Scores, answer: Sequence[int], allowed: Allowed | None = None) -> Scores:
        if self.search:
            scores = log_softmax(scores)
        asked = self.sampling
        if len(self.biased):
            scores[self.biased] += self.bias
        if asked.repetition_penalty != 1:
            scores = repeated({*self.prompt, *answer}, asked.repetition_penalty, scores)
        if asked.frequency_penalty or asked.presence_penalty:
            scores = counted(answer, asked.frequency_penalty, asked.presence_penalty, scores)
        scores = self.ruled(scores, answer, allowed)
        if not self.search and not np.isfinite(scores.max()):
            raise RequestError(NONE_LEFT)
        return scores

    def ruled(self, scores: Scores, answer: Sequence[int], allowed: Allowed | None) -> Scores:
        """What the model's files force comes before what is `allowed`: it is no part of the text."""
        rules, place = self.rules, len(answer)
        if rules.last and place == self.limit - 1:
            return only(rules.last, scores)
        if rules.first is not None and place == 0:
            return only([rules.first], scores)
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        forbidden = list(rules.never)
        if place < rules.least:
            forbidden += rules.ends
        if place == (rules.first is not None):
            forbidden += rules.never_first
        if rules.ngram:
            forbidden += would_repeat([*self.prompt, *answer], rules.ngram)
        # the files may name tokens that the model does not have, and never gives
        scores[[token for token in forbidden if token < len(scores)]] = -np.inf
        return scores


def repeated(seen: Iterable[int], penalty: float, scores: Scores) -> Scores:
    """Scores of seen tokens divided where positive, multiplied where negative. Keskar et al. 2019."""
    scores, at = scores.copy(), np.fromiter(seen, np.int64)
    scores[at] = np.where(scores[at] > 0, scores[at] / penalty, scores[at] * penalty)
    return scores


def counted(answer: Sequence[int], frequency: float, presence: float, scores: Scores) -> Scores:
    """score - count * frequency - (count > 0) * presence, counting in the answer only.

    As OpenAI's interface defines the two; the prompt is not counted.
    """
    scores = scores.copy()
    tokens, counts = np.unique(np.asarray(answer, np.int64), return_counts=True)
    scores[tokens] -= counts * frequency + presence
    return scores


def only(tokens: Sequence[int], scores: Scores) -> Scores:
    """Nothing but these tokens, each as likely as the others."""
    forced = np.full_like(scores, -np.inf)
    forced[list(tokens)] = 0
    return forced


def would_repeat(text: Sequence[int], size: int) -> list[int]:
    """The tokens with which the text would end in `size` tokens it already holds. Paulus et al. 2017."""
    if len(text) < size:
        return []
    ending = tuple(text[len(text) - size + 1 :])
    starts = range(len(text) - size + 1)
    return [text[at + size - 1] for at in starts if tuple(text[at : at + size - 1]) == ending]
