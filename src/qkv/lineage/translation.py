"""What sequence-to-sequence models have in common, and how a translation is found with any of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.errors import RequestError

State = TypeVar("State")


class Translator(Protocol[State]):
    """A model of target sentences given source sentences.

    `present` is true where a source token is; padding never changes a result. A state is a tensor,
    or a (named) tuple of states, with the batch as the first axis of every tensor: a search re-orders
    it without knowing what is inside.
    """

    def forward(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target vocab"]:
        """Logits of the token after each target token, all of which are given; the first is the start."""
        ...

    def begin(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> State:
        """The state before any target token."""
        ...

    def next(self, state: State, tokens: Int[Tensor, " batch"]) -> tuple[Float[Tensor, "batch vocab"], State]:
        """Logits of the token after these, and the state that has read them: `forward`, a token at a time."""
        ...

    def alignment(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target source"]:
        """The weights by which the source was mixed for the token after each target token."""
        ...


class Translation(NamedTuple):
    """Tokens without the start and the end; their summed log-probability, the end's included; the score.

    `finished` is false for one cut off at the limit on length.
    """

    tokens: list[int]
    total: float
    score: float
    finished: bool


def negative_log_likelihood(
    logits: Float[Tensor, "batch target vocab"],
    target: Int[Tensor, "batch target"],
    present: Bool[Tensor, "batch target"],
) -> Float[Tensor, ""]:
    """-log p of a target sentence after its start, in nats: summed over its tokens, mean over the batch.

    `logits` are those of `forward` on the same `target`, start and end included. Bahdanau et al.
    2014, equation 4's objective; Luong et al. 2015, equation 4.
    """
    tokens = target.masked_fill(~present, 0)[:, 1:]
    losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens.flatten(), reduction="none")
    return losses.view(tokens.shape).mul(present[:, 1:]).sum(1).mean()


@torch.no_grad()
def greedy(
    model: Translator[Any],
    source: Int[Tensor, "batch source"],
    present: Bool[Tensor, "batch source"],
    start: int,
    end: int,
    most: int,
) -> list[list[int]]:
    """The likeliest token at each step, up to `most` tokens with the end; given without start and end.

    Raises RequestError for a `most` below 1.
    """
    _check(most=most)
    state, tokens = model.begin(source, present), source.new_full((len(source),), start)
    found, ended = [], torch.zeros_like(tokens, dtype=torch.bool)
    for _ in range(most):
        logits, state = model.next(state, tokens)
        tokens = logits.argmax(-1)
        found.append(tokens)
        ended = ended | (tokens == end)
        if bool(ended.all()):
            break
    rows = torch.stack(found, 1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


@torch.no_grad()
def beam_search(
    model: Translator[Any],
    source: Int[Tensor, "batch source"],
    present: Bool[Tensor, "batch source"],
    start: int,
    end: int,
    most: int,
    beams: int = 4,
    penalty: float = 0.6,
) -> list[list[Translation]]:
    """The `beams` best translations found of each source sentence, best first. Wu et al. 2016, section 7.

    A score is log p / ((5 + |Y|) / 6)^penalty, where |Y| counts the generated tokens, the end
    included and the start not: 0 compares plain sums. At each step the best `beams` continuations
    are looked at: those that end are kept with their scores, and as many as `beams` others go on. It
    stops after `most` tokens, or when nothing that goes on could come to score better than the
    best that ended. Only where none ended are unfinished ones given. One beam and no penalty is
    `greedy`. Raises RequestError for `most` or `beams` below 1, or a penalty below 0.
    """
    _check(most=most, beams=beams)
    if penalty < 0:
        raise RequestError(f"penalty is {penalty}; it must be at least 0.")
    search = _Search(len(source), beams, penalty, most, end)
    state = reordered(model.begin(source, present), search.first(source.device))
    tokens = source.new_full((len(source) * beams,), start)
    for _ in range(most):
        logits, state = model.next(state, tokens)
        rows, tokens = search.step(logits.float().log_softmax(-1).unflatten(0, (-1, beams)))
        state = reordered(state, rows)
        if search.done():
            break
    return search.found()


def reordered(state: State, rows: Int[Tensor, " rows"]) -> State:
    """These rows of every tensor of a state, in this order; a row may come twice."""
    parts: Any = state
    if isinstance(parts, Tensor):
        return parts[rows]  # type: ignore[return-value]
    moved = [reordered(part, rows) for part in parts]
    return type(parts)(*moved) if hasattr(parts, "_fields") else type(parts)(moved)


class _Search:
    """The live beams of a batch and the translations that ended."""

    def __init__(self, batch: int, beams: int, penalty: float, most: int, end: int):
        self.beams, self.penalty, self.most, self.end = beams, penalty, most, end
        self.length = 0
        self.ended: list[list[Translation]] = [[] for _ in range(batch)]
        # all beams of a sentence begin alike: only the first counts, or they would stay alike
        self.totals = torch.full((batch, beams), float("-inf"))
        self.totals[:, 0] = 0.0
        self.tokens = torch.zeros(batch, beams, 0, dtype=torch.long)

    def first(self, device: torch.device) -> Int[Tensor, " rows"]:
        """The rows that make of one state a sentence one state a beam."""
        return torch.arange(len(self.ended), device=device).repeat_interleave(self.beams)

    def score(self, total: float, length: int) -> float:
        return total / self.divisor(length)

    def divisor(self, length: int) -> float:
        return float(((5 + length) / 6) ** self.penalty)

    def step(
        self, gains: Float[Tensor, "batch beams vocab"]
    ) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
        """Chooses what goes on: for each live beam the row it comes from, and its token."""
        device, vocab = gains.device, gains.shape[-1]
        self.length += 1
        totals = (self.totals[..., None] + gains.cpu()).flatten(1)
        # of each beam at most one continuation ends: twice as many leave enough that do not
        best, at = totals.topk(min(2 * self.beams, totals.shape[1]))
        beam, token = at // vocab, at % vocab
        ends = token == self.end
        self.keep(best, beam, ends)
        order = ends.long().argsort(dim=1, stable=True)[:, : self.beams]
        beam, token = beam.gather(1, order), token.gather(1, order)
        self.totals = best.gather(1, order)
        earlier = self.tokens.gather(1, beam[..., None].expand(-1, -1, self.length - 1))
        self.tokens = torch.cat([earlier, token[..., None]], -1)
        rows = beam + torch.arange(len(beam))[:, None] * self.beams
        return rows.flatten().to(device), token.flatten().to(device)

    def keep(self, best: Tensor, beam: Tensor, ends: Tensor) -> None:
        """Those of the best `beams` continuations that end."""
        for sentence, place in (ends & best.isfinite())[:, : self.beams].nonzero().tolist():
            total = best[sentence, place].item()
            tokens = self.tokens[sentence, beam[sentence, place]].tolist()
            kept = self.ended[sentence]
            kept.append(Translation(tokens, total, self.score(total, self.length), True))
            kept.sort(key=lambda translation: -translation.score)
            del kept[self.beams :]

    def done(self) -> bool:
        """Whether no live beam could beat what ended: its total only falls, its divisor is at most this."""
        divisor = self.divisor(self.most)
        return all(
            bool(kept) and kept[0].score >= total / divisor
            for kept, total in zip(self.ended, self.totals.amax(1).tolist(), strict=True)
        )

    def found(self) -> list[list[Translation]]:
        return [kept or self.cut(sentence) for sentence, kept in enumerate(self.ended)]

    def cut(self, sentence: int) -> list[Translation]:
        """The live beams as they are."""
        pairs = zip(self.tokens[sentence].tolist(), self.totals[sentence].tolist(), strict=True)
        return [
            Translation(tokens, total, self.score(total, self.length), False)
            for tokens, total in pairs
            if total > float("-inf")
        ]


def _check(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise RequestError(f"{name} is {count}; it must be at least 1.")
