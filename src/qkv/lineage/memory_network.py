"""End-To-End Memory Networks. Sukhbaatar, Szlam, Weston, Fergus, 2015 (NIPS; arXiv 1503.08895).

A question is answered from sentences that are read several times: each reading (a hop) attends to
the sentences with what is known so far and adds what it found.

    sentence (4.1)   sum_j l_j * A x_j: an element-wise product, summed over the words; l is the
                     position encoding, or ones (a bag of words)
    places (4.1)     m_i = (sentence i by A) + T_A(i),  c_i = (sentence i by C) + T_C(i),
                     i counted back from the question
    question         u^1 = sum_j l_j * B q_j, without a place
    a hop (2.1)      p = softmax_i(u . m_i),  o = sum_i p_i c_i,  u' = u + o
    answer           softmax(W u^{K+1}), one word
    tying (2.2)      adjacent: A^{k+1} = C^k, B = A^1, W^T = C^K, places likewise; or
                     layer-wise: one A and one C for all hops, and u' = H u + o
    training (4.2)   random noise: empty sentences among the real ones; linear start: the hops'
                     softmaxes left out until validation stalls

The positions here multiply words and are fixed, and what is added, to sentences, is learned. Word 0
is padding, to the right of a sentence's words; it has no parameters and embeds to zero.

Where they differ this is the paper, not its authors' code: J is the length of each sentence, not of
the longest; a sentence that is not there takes no weight, where a row of zeros takes some; and an
empty sentence is one that can be read, where the code leaves a gap in the count of places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError, RequestError
from qkv.nn.linear import Linear
from qkv.nn.scores import Attended, Dot, attend

PADDING = 0


@dataclass(frozen=True)
class Hyperparameters:
    """Section 4.2. The width is 50 where one model learns all tasks."""

    width: int = 20
    hops: int = 3
    sentences: int = 50  # the most that are read: the last before the question
    deviation: float = 0.1  # of every parameter at the start

    def __post_init__(self) -> None:
        if min(self.width, self.hops, self.sentences) < 1:
            raise ConfigError(
                "Width, hops and sentences are at least 1, not "
                f"{self.width}, {self.hops} and {self.sentences}."
            )


@dataclass(frozen=True)
class Training:
    """Plain stochastic gradient descent on the loss summed over a batch. Section 4.2.

    With a linear start the rate begins at `linear_rate`, before and again after the softmaxes are
    put in. A gradient longer than `clip` is shortened to it.
    """

    rate: float = 0.01
    linear_rate: float = 0.005
    halving: int = 25  # epochs between one halving of the rate and the next
    epochs: int = 100
    batch: int = 32
    clip: float = 40.0
    empty: float = 0.1  # empty sentences for each real one, while training


def learning_rate(epoch: int, start: float = Training.rate, halving: int = Training.halving) -> float:
    """The rate in an epoch, counted from 0: halved every `halving` epochs."""
    return float(start * 0.5 ** (epoch // halving))


def stalled(validation: Sequence[float]) -> bool:
    """Whether the last loss is no lower than the lowest before: the linear start is then over."""
    return len(validation) > 1 and validation[-1] >= min(validation[:-1])


Encoding = Callable[[Int[Tensor, "*sentences"], int, int], Float[Tensor, "*sentences words width"]]
"""What words are multiplied by: `encoding(lengths, words, width)`, for sentences of these lengths J,
padded to `words`. Rows past a sentence's end meet padding, so they may hold anything finite."""


def position_encoding(
    lengths: Int[Tensor, "*sentences"], words: int, width: int
) -> Float[Tensor, "*sentences words width"]:
    """l_kj = (1 - j/J) - (k/d)(1 - 2j/J), word j of J and element k of d counted from 1. Section 4.1."""
    word, element = _counted(lengths, words, width)
    share = word / lengths.clamp(min=1)[..., None, None]
    return (1 - share) - element / width * (1 - 2 * share)


def official_position_encoding(
    lengths: Int[Tensor, "*sentences"], words: int, width: int
) -> Float[Tensor, "*sentences words width"]:
    """1 + 4 (k - (d+1)/2) (j - (J+1)/2) / (d J): the authors' code, about twice the paper's.

    They take the longest sentence of the data as J for all.
    """
    word, element = _counted(lengths, words, width)
    length = lengths.clamp(min=1)[..., None, None]
    return 1 + 4 * (element - (width + 1) / 2) * (word - (length + 1) / 2) / (width * length)


def bag_of_words(
    lengths: Int[Tensor, "*sentences"], words: int, width: int
) -> Float[Tensor, "*sentences words width"]:
    """Ones: words count, their order does not. Section 4.1."""
    return torch.ones(*lengths.shape, words, width, device=lengths.device)


def _counted(lengths: Tensor, words: int, width: int) -> tuple[Tensor, Tensor]:
    """Words down, elements across, both from 1."""
    word = torch.arange(1, words + 1, device=lengths.device, dtype=torch.float32)
    element = torch.arange(1, width + 1, device=lengths.device, dtype=torch.float32)
    return word[:, None], element


class Words(nn.Module):
    """An embedding of words whose padding is zero: A, B or C."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary - 1, width))  # of every word but padding

    def table(self) -> Float[Tensor, "vocabulary width"]:
        return F.pad(self.weight, (0, 0, 1, 0))

    def forward(
        self,
        tokens: Int[Tensor, "*sentences words"],
        encoding: Float[Tensor, "*sentences words width"],
    ) -> Float[Tensor, "*sentences width"]:
        """Sentences as sums of their words, each multiplied by what its position says."""
        return (F.embedding(tokens, self.table()) * encoding).sum(-2)


class Sentences(nn.Module):
    """An embedding of sentences and the places they stand at: A with T_A, or C with T_C."""

    def __init__(self, vocabulary: int, width: int, sentences: int):
        super().__init__()
        self.words = Words(vocabulary, width)
        self.places = nn.Parameter(torch.empty(sentences, width))

    def forward(
        self,
        stories: Int[Tensor, "batch sentences words"],
        encoding: Float[Tensor, "batch sentences words width"],
        places: Int[Tensor, "batch sentences"],
    ) -> Float[Tensor, "batch sentences width"]:
        """Place 0 is the last sentence before the question. Places past the last row read that one."""
        rows = places.clamp(max=len(self.places) - 1)
        return self.words(stories, encoding) + F.embedding(rows, self.places)


class Memory(NamedTuple):
    """What a hop reads: what sentences are found by, and what they answer."""

    keys: Float[Tensor, "batch sentences width"]  # m
    values: Float[Tensor, "batch sentences width"]  # c


class Tying(Protocol):
    """Which parameters the hops have in common. Built as `tying(vocabulary, hyperparameters)`."""

    def asked(
        self, question: Int[Tensor, "batch words"], encoding: Float[Tensor, "batch words width"]
    ) -> Float[Tensor, "batch width"]:
        """u of the first hop."""
        ...

    def memories(
        self,
        stories: Int[Tensor, "batch sentences words"],
        encoding: Float[Tensor, "batch sentences words width"],
        places: Int[Tensor, "batch sentences"],
    ) -> list[Memory]:
        """One a hop."""
        ...

    def carried(self, state: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        """What of u goes on into the next, to which o is added."""
        ...

    def answer(self, state: Float[Tensor, "batch width"]) -> Float[Tensor, "batch vocabulary"]:
        """Logits of the answer."""
        ...


class Adjacent(nn.Module):
    """What one hop answers by is what the next finds by; the ends are the question's and the answer's.

    A^{k+1} = C^k, B = A^1, W^T = C^K: hops + 1 embeddings in all. Section 2.2, type 1.
    """

    def __init__(self, vocabulary: int, sizes: Hyperparameters):
        super().__init__()
        self.embeddings = nn.ModuleList(
            Sentences(vocabulary, sizes.width, sizes.sentences) for _ in range(sizes.hops + 1)
        )

    def asked(self, question: Tensor, encoding: Tensor) -> Tensor:
        return cast(Sentences, self.embeddings[0]).words(question, encoding)

    def memories(self, stories: Tensor, encoding: Tensor, places: Tensor) -> list[Memory]:
        made = [embedding(stories, encoding, places) for embedding in self.embeddings]
        return [Memory(keys, values) for keys, values in pairwise(made)]

    def carried(self, state: Tensor) -> Tensor:
        return state

    def answer(self, state: Tensor) -> Tensor:
        return state @ cast(Sentences, self.embeddings[-1]).words.table().T


class LayerWise(nn.Module):
    """Every hop has the same parameters, as a recurrent network's steps: u' = H u + o.

    A^1 = ... = A^K and C^1 = ... = C^K; B and W are their own. Section 2.2, type 2.
    """

    def __init__(self, vocabulary: int, sizes: Hyperparameters):
        super().__init__()
        self.hops = sizes.hops
        self.keys = Sentences(vocabulary, sizes.width, sizes.sentences)
        self.values = Sentences(vocabulary, sizes.width, sizes.sentences)
        self.question = Words(vocabulary, sizes.width)
        self.carry = Linear(sizes.width, sizes.width)
        self.output = Linear(sizes.width, vocabulary)

    def asked(self, question: Tensor, encoding: Tensor) -> Tensor:
        return self.question(question, encoding)

    def memories(self, stories: Tensor, encoding: Tensor, places: Tensor) -> list[Memory]:
        keys, values = (made(stories, encoding, places) for made in (self.keys, self.values))
        return [Memory(keys, values)] * self.hops

    def carried(self, state: Tensor) -> Tensor:
        return self.carry(state)

    def answer(self, state: Tensor) -> Tensor:
        return self.output(state)


Mix = Callable[
    [
        Float[Tensor, "batch query key"],
        Float[Tensor, "batch key width"],
        Bool[Tensor, "batch _ key"],
    ],
    Attended,
]
"""From scores, values and what is visible to the mixture: `attend` (a softmax), or `attend_linearly`."""


def attend_linearly(
    scores: Float[Tensor, "batch query key"],
    values: Float[Tensor, "batch key width"],
    visible: Bool[Tensor, "batch _ key"],
) -> Attended:
    """The scores themselves as weights: a hop without its softmax, for the linear start. Section 4.2."""
    weights = scores.masked_fill(~visible, 0)
    return Attended(weights @ values, weights)


class Answer(NamedTuple):
    """Logits of every word as the answer, and how each hop weighed the sentences."""

    logits: Float[Tensor, "batch vocabulary"]
    weights: Float[Tensor, "batch hops sentences"]


class MemoryNetwork(nn.Module):
    """MemN2N, as for the question-answering tasks of section 4."""

    def __init__(
        self,
        vocabulary: int,
        sizes: Hyperparameters = Hyperparameters(),
        tying: Callable[[int, Hyperparameters], Tying] = Adjacent,
        encoding: Encoding = position_encoding,
    ):
        super().__init__()
        self.sizes, self.encoding = sizes, encoding
        self.score = Dot(spec.Dot(), sizes.width, sizes.width)
        self.tying = tying(vocabulary, sizes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.1^2), every one. Section 4.2."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.sizes.deviation)

    def forward(
        self,
        stories: Int[Tensor, "batch sentences words"],
        present: Bool[Tensor, "batch sentences"],
        question: Int[Tensor, "batch words"],
        mix: Mix = attend,
    ) -> Answer:
        """`present` is true where a sentence is, in the story's order; more than fit are not read.

        Raises RequestError where shapes do not fit each other.
        """
        _check(stories, present, question)
        places = back_from_the_question(present)
        visible = (present & (places < self.sizes.sentences))[:, None]
        memories = self.tying.memories(stories, self._encoded(stories), places)
        state = self.tying.asked(question, self._encoded(question))
        weights = []
        for memory in memories:
            scores = self.score(state[:, None], self.score.prepared(memory.keys))
            found = mix(scores, memory.values, visible)
            state = self.tying.carried(state) + found.mixed[:, 0]
            weights.append(found.weights[:, 0])
        return Answer(self.tying.answer(state), torch.stack(weights, 1))

    def _encoded(self, tokens: Int[Tensor, "*sentences words"]) -> Float[Tensor, "*sentences words width"]:
        return self.encoding((tokens != PADDING).sum(-1), tokens.shape[-1], self.sizes.width)


def back_from_the_question(present: Bool[Tensor, "batch sentences"]) -> Int[Tensor, "batch sentences"]:
    """How many sentences stand between each and the question: 0 for the last. Section 4.1."""
    after = present.long().flip(-1).cumsum(-1).flip(-1)
    return after - present.long()


def loss(answer: Answer, words: Int[Tensor, " batch"]) -> Float[Tensor, ""]:
    """Cross-entropy in nats, summed over the batch: the learning rate is for the sum."""
    return F.cross_entropy(answer.logits, words, reduction="sum")


def with_empty_sentences(
    stories: Int[Tensor, "batch sentences words"],
    present: Bool[Tensor, "batch sentences"],
    share: float = Training.empty,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "batch more words"], Bool[Tensor, "batch more"]]:
    """Random noise: each sentence is followed by an empty one with probability `share`. Section 4.2.

    It moves all that stands before to places further back, so that rows of T_A and T_C that few
    stories reach are trained too. For training alone.
    """
    drawn = torch.rand(present.shape, generator=generator, device=present.device)
    empty = (drawn < share) & present
    slots = torch.arange(present.shape[1], device=present.device) + empty.cumsum(-1) - empty.long()
    more = present.shape[1] + (int(empty.sum(-1).max()) if empty.numel() else 0)
    there = present.new_zeros(len(present), more).scatter(1, slots, present)
    # an empty sentence stands right behind its own; where there is none, the slot is written as it was
    there = there.scatter(1, slots + empty.long(), present)
    rows = stories.new_full((len(stories), more, stories.shape[2]), PADDING)
    return rows.scatter(1, slots[..., None].expand_as(stories), stories), there


def _check(stories: Tensor, present: Tensor, question: Tensor) -> None:
    if stories.ndim != 3 or question.ndim != 2 or len(question) != len(stories):
        raise RequestError(
            "Stories are (batch, sentences, words) and their questions (batch, words), not "
            f"{tuple(stories.shape)} and {tuple(question.shape)}."
        )
    if present.shape != stories.shape[:2]:
        raise RequestError(
            f"Which sentences are present is said for each: {tuple(stories.shape[:2])}, "
            f"not {tuple(present.shape)}."
        )
