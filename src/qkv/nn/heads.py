"""What a model answers with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import RequestError
from qkv.nn.build import build, build_if, implements
from qkv.nn.inputs import Tokens
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear


@implements(spec.Language, spec.MaskedLanguage)
class Language(nn.Module):
    """scale * (W transform(x) + b), bounded by cap * tanh(. / cap) where there is a cap."""

    def __init__(self, node: spec.Language, width: int):
        super().__init__()
        self.node = node
        self.transform = build_if(node.transform, width)
        into = node.transform.width if node.transform else width
        self.weight = nn.Parameter(torch.empty(node.vocab, into))
        self.bias = nn.Parameter(torch.empty(node.vocab)) if node.bias else None

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocab"]:
        x = x if self.transform is None else self.transform(x)
        logits = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        if self.node.scale != 1:
            logits = logits * self.node.scale
        if self.node.cap is not None:
            logits = self.node.cap * torch.tanh(logits / self.node.cap)
        return logits


@implements(spec.TokenClass, spec.Span)
class TokenClass(nn.Module):
    """W transform(x) + b for each token: its classes' scores, or that a span starts and ends here."""

    def __init__(self, node: spec.TokenClass | spec.Span, width: int):
        super().__init__()
        self.transform = build_if(node.transform, width)
        self.output = Linear(node.transform.width if node.transform else width, node.classes, node.bias)

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows scores"]:
        return self.output(x if self.transform is None else self.transform(x))


@implements(spec.Pool)
class Pool(nn.Module):
    """The rows that are there as one: the first, the last, their mean or their largest values; then `dense`.

    Of a sequence without any it is zeros, before `dense`.
    """

    def __init__(self, node: spec.Pool, width: int):
        super().__init__()
        self.how = node.how
        self.dense = build_if(node.dense, width)

    def forward(
        self, x: Float[Tensor, "batch length width"], layout: Layout
    ) -> Float[Tensor, "batch pooled"]:
        if layout.documents is not None:
            raise RequestError(
                "This head answers once for a row, and packed rows hold several documents: "
                "give each document its row."
            )
        pooled = self.pooled(x, layout.positions)
        return pooled if self.dense is None else self.dense(pooled)

    def pooled(
        self, x: Float[Tensor, "batch length width"], positions: Int[Tensor, "batch length"]
    ) -> Float[Tensor, "batch width"]:
        there = (positions >= 0)[..., None]
        if self.how == "mean":
            total = torch.where(there, x, 0).float().sum(1)
            return (total / there.sum(1).clamp(min=1)).to(x.dtype)
        if self.how == "max":
            return torch.where(there.any(1), x.masked_fill(~there, float("-inf")).amax(1), 0)
        chosen = positions.argmax(1) if self.how == "last" else there[..., 0].int().argmax(1)
        place = chosen[:, None, None].expand(-1, 1, x.shape[-1])
        return torch.where(there.any(1), x.gather(1, place)[:, 0], 0)


@implements(spec.SequenceClass)
class SequenceClass(nn.Module):
    """W pool(x) + b: the scores of the classes of a whole sequence."""

    def __init__(self, node: spec.SequenceClass, width: int):
        super().__init__()
        self.pool = build(node.pool, width)
        self.output = Linear(node.pool.width(width), node.classes, node.bias)

    def forward(
        self, x: Float[Tensor, "batch length width"], layout: Layout
    ) -> Float[Tensor, "batch classes"]:
        return self.output(self.pool(x, layout))


@implements(spec.PooledEmbedding)
class PooledEmbedding(nn.Module):
    """pool(x), divided by its length where asked. Reimers and Gurevych 2019 (Sentence-BERT)."""

    def __init__(self, node: spec.PooledEmbedding, width: int):
        super().__init__()
        self.normalise = node.normalise
        self.pool = build(node.pool, width)

    def forward(
        self, x: Float[Tensor, "batch length width"], layout: Layout
    ) -> Float[Tensor, "batch pooled"]:
        pooled = self.pool(x, layout)
        return F.normalize(pooled.float(), dim=-1).to(pooled.dtype) if self.normalise else pooled


class Further(nn.Module):
    """layer(join([norm(states); norm(row of the token ahead)])). DeepSeek-V3, equations 21 and 22."""

    def __init__(self, node: spec.MultiToken, layer: spec.Layer, width: int):
        super().__init__()
        self.hidden_norm = build(node.norm, width)
        self.token_norm = build(node.norm, width)
        self.join = Linear(2 * width, width)
        self.layer = build(layer, width)
        self.norm = build(node.norm, width)

    def forward(
        self,
        states: Float[Tensor, "batch length width"],
        rows: Float[Tensor, "batch length width"],
        layout: Layout,
    ) -> Float[Tensor, "batch length width"]:
        both = torch.cat([self.hidden_norm(states), self.token_norm(rows)], -1)
        return self.layer(self.join(both), layout)


@implements(spec.MultiToken)
class MultiToken(nn.Module):
    """The next token's logits; `ahead` gives those of the tokens after it. DeepSeek-V3, section 2.2."""

    def __init__(self, node: spec.MultiToken, width: int):
        super().__init__()
        self.next = build(node.next, width)
        self.layers = nn.ModuleList(Further(node, layer, width) for layer in node.layers)

    def forward(self, x: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows vocab"]:
        return self.next(x)

    def ahead(
        self,
        states: Float[Tensor, "batch length width"],
        tokens: Int[Tensor, "batch length"],
        layout: Layout,
        embedding: Tokens,
    ) -> list[Float[Tensor, "batch shorter vocab"]]:
        """Logits that place i gives of token i + k + 1, for k = 1 up to the number of further layers.

        `states` are those the next token is told from. The k-th reads token i + k, so the last k
        places of the rows have none, and places whose token i + k is padding or of another document
        see nothing and tell nothing. A layer hands its output on before the norm it answers through.
        """
        answers = []
        for k, further in enumerate(cast(Iterable[Further], self.layers), 1):
            if tokens.shape[1] <= k:
                raise RequestError(f"To look {k + 1} tokens ahead a row must hold more than {k}.")
            layout = _followed(layout)
            states = further(states[:, :-1], embedding.row(tokens[:, k:]), layout)
            answers.append(self.next(further.norm(states)))
        return answers


def _followed(layout: Layout) -> Layout:
    """The places of these whose next one is there and goes on from them: one place fewer in each row."""
    here, after = layout.positions[:, :-1], layout.positions[:, 1:]
    follows = (here >= 0) & (after == here + 1)
    documents = layout.documents
    if documents is not None:
        follows = follows & (documents[:, :-1] == documents[:, 1:])
        documents = documents[:, :-1]
    positions = torch.where(follows, here, -1)
    return replace(
        layout,
        positions=positions,
        key_positions=positions,
        documents=documents,
        key_documents=documents,
        _memo={},
    )
