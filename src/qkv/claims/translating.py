"""What experiments with translators share: pairs of rows as they read them, and how much they get right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from qkv.claims.tasks import PAD, Ragged
from qkv.lineage.translation import Translator, greedy

START, END, FIRST = 1, 2, 3  # symbols are from FIRST on; 0 is padding


class Pairs(NamedTuple):
    """Sources and targets, padded; a target begins with START and ends with END."""

    source: Int[Tensor, "rows source"]
    present: Bool[Tensor, "rows source"]
    target: Int[Tensor, "rows target"]
    there: Bool[Tensor, "rows target"]


def paired(source: Ragged, target: Ragged) -> Pairs:
    """The rows of both, with the target's two ends set."""
    rows, longest = target.tokens.shape
    said = torch.cat([torch.full((rows, 1), START), target.tokens, torch.full((rows, 1), PAD)], 1)
    said = said.scatter(1, target.lengths[:, None] + 1, END)
    there = torch.arange(longest + 2) < target.lengths[:, None] + 2
    return Pairs(source.tokens, source.there, said, there)


@torch.no_grad()
def said_exactly(model: Translator[Any], pairs: Pairs, batch: int = 256) -> Bool[Tensor, " rows"]:
    """Which targets the model gives, to the last token, when it goes on with the likeliest at each step."""
    hits: list[bool] = []
    for source, present, target, there in zip(*(part.split(batch) for part in pairs), strict=True):
        found = greedy(model, source, present, START, END, most=target.shape[1])
        lengths = (there.sum(1) - 2).tolist()
        wanted = [row[1 : length + 1] for row, length in zip(target.tolist(), lengths, strict=True)]
        hits += [one == other for one, other in zip(found, wanted, strict=True)]
    return torch.tensor(hits)


@torch.no_grad()
def surprise(model: Translator[Any], pairs: Pairs, batch: int = 256) -> Float[Tensor, " rows"]:
    """-log p of each target after its start, its end included, in nats: a sum over its tokens."""
    found = []
    for source, present, target, there in zip(*(part.split(batch) for part in pairs), strict=True):
        logits = model.forward(source, present, target)[:, :-1].float()
        each = F.cross_entropy(logits.transpose(1, 2), target[:, 1:], reduction="none")
        found.append(each.masked_fill(~there[:, 1:], 0).sum(1))
    return torch.cat(found)


def like_lengths(
    draw: Callable[[int], Pairs], batch: int, generator: torch.Generator, together: int = 20
) -> Iterator[Pairs]:
    """Endless batches of rows of like lengths, so that little time goes into padding.

    `draw` gives so many rows; those of 20 batches are sorted by length and dealt out in random order.
    Bahdanau et al. 2014, appendix B.2.
    """
    while True:
        pairs = draw(batch * together)
        order = pairs.there.sum(1).argsort(stable=True).view(together, batch)
        for place in torch.randperm(together, generator=generator).tolist():
            yield trimmed(Pairs(*(part[order[place]] for part in pairs)))


def trimmed(pairs: Pairs) -> Pairs:
    """Without places that are padding in every row."""
    source, target = int(pairs.present.sum(1).max()), int(pairs.there.sum(1).max())
    return Pairs(
        pairs.source[:, :source], pairs.present[:, :source], pairs.target[:, :target], pairs.there[:, :target]
    )
