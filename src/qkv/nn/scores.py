"""Scores of one head as the models before the Transformer have them, and how they become a mixture."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError
from qkv.nn.backends import normalise
from qkv.nn.build import implements
from qkv.nn.linear import Linear


class ScoreFunction(Protocol):
    """How well each key fits each query. Built as `build(node, query_width, key_width)`."""

    def prepared(self, keys: Float[Tensor, "batch key key_width"]) -> Float[Tensor, "batch key prepared"]:
        """What of the keys is the same for every query: made once for a source, then read at each step."""
        ...

    def __call__(
        self,
        queries: Float[Tensor, "batch query query_width"],
        prepared: Float[Tensor, "batch key prepared"],
    ) -> Float[Tensor, "batch query key"]: ...


@implements(spec.Dot)
class Dot(nn.Module):
    """query . key. Luong et al. 2015, section 3.1."""

    def __init__(self, node: spec.Dot, query_width: int, key_width: int):
        super().__init__()
        if query_width != key_width:
            raise RequestError(f"A query of {query_width} has no dot product with a key of {key_width}.")

    def prepared(self, keys: Tensor) -> Tensor:
        return keys

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        return queries @ prepared.transpose(-1, -2)


@implements(spec.General)
class General(nn.Module):
    """query . W key. Luong et al. 2015, section 3.1."""

    def __init__(self, node: spec.General, query_width: int, key_width: int):
        super().__init__()
        self.key = Linear(key_width, query_width)

    def prepared(self, keys: Tensor) -> Tensor:
        return self.key(keys)

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        return queries @ prepared.transpose(-1, -2)


@implements(spec.Additive)
class Additive(nn.Module):
    """v . tanh(W query + U key). Bahdanau et al. 2014, appendix A.1.2."""

    def __init__(self, node: spec.Additive, query_width: int, key_width: int):
        super().__init__()
        self.query = Linear(query_width, node.hidden)
        self.key = Linear(key_width, node.hidden)
        self.output = Linear(node.hidden, 1)

    def prepared(self, keys: Tensor) -> Tensor:
        return self.key(keys)

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        hidden = torch.tanh(self.query(queries)[:, :, None] + prepared[:, None])
        return self.output(hidden)[..., 0]


@implements(spec.Concat)
class Concat(nn.Module):
    """v . tanh(W [query; key]): additive scores whose two maps are one. Luong et al. 2015, section 3.1."""

    def __init__(self, node: spec.Concat, query_width: int, key_width: int):
        super().__init__()
        self.query_width = query_width
        self.hidden = Linear(query_width + key_width, node.hidden)
        self.output = Linear(node.hidden, 1)

    def prepared(self, keys: Tensor) -> Tensor:
        return keys @ self.hidden.weight[:, self.query_width :].T

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        of_queries = queries @ self.hidden.weight[:, : self.query_width].T
        return self.output(torch.tanh(of_queries[:, :, None] + prepared[:, None]))[..., 0]


@implements(spec.Location)
class Location(nn.Module):
    """W query: a score for each place, whatever stands there. Luong et al. 2015, equation 8.

    Raises RequestError for more keys than W has rows.
    """

    def __init__(self, node: spec.Location, query_width: int, key_width: int):
        super().__init__()
        self.query = Linear(query_width, node.keys)

    def prepared(self, keys: Tensor) -> Tensor:
        most = len(self.query.weight)
        if keys.shape[1] > most:
            raise RequestError(f"Location scores reach {most} places, and there are {keys.shape[1]}.")
        return keys

    def forward(self, queries: Tensor, prepared: Tensor) -> Tensor:
        return self.query(queries)[..., : prepared.shape[1]]


class Attended(NamedTuple):
    """The mixture and the weights it was mixed by."""

    mixed: Float[Tensor, "batch query value_width"]
    weights: Float[Tensor, "batch query key"]


def attend(
    scores: Float[Tensor, "batch query key"],
    values: Float[Tensor, "batch key value_width"],
    visible: Bool[Tensor, "batch query_or_one key"],
) -> Attended:
    """Masks, normalises and mixes. A query that sees nothing gets zeros, and finite gradients."""
    weights = normalise(scores.masked_fill(~visible, float("-inf")))
    return Attended(weights.to(values.dtype) @ values, weights)
