"""Contents against distances and distances against contents. He et al. 2020, section 3.1 (DeBERTa)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import ConfigError
from qkv.nn.biases import at, steps
from qkv.nn.build import build, build_if, implements
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.positions import AttentionPosition, Projecting


@implements(spec.RelativeTable)
class RelativeTable(nn.Module):
    """One vector a distance or bucket of distances, normalised where there is a norm."""

    def __init__(self, node: spec.RelativeTable, width: int, heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.rows, width))
        self.norm = build_if(node.norm, width)

    def forward(self) -> Float[Tensor, "rows width"]:
        return self.weight if self.norm is None else self.norm(self.weight)


@implements(spec.Disentangled)
class Disentangled(AttentionPosition):
    """scale * [q_i . K(table[d]) + k_j . Q(table[d])], beside scale * q_i . k_j, with d of query minus key.

    Both terms read the row of query minus key, as every released model was trained; the paper's
    second term has key minus query. The scale is the attention's, 1 / sqrt(head_dim * (1 + terms)).
    """

    def __init__(self, node: spec.Disentangled, width: int, heads: int, head_dim: int):
        super().__init__()
        if node.table.rows != 2 * node.reach:
            raise ConfigError(
                f"A table of {node.table.rows:,} rows does not hold {node.reach:,} a side; "
                f"it must have {2 * node.reach:,}."
            )
        self.node, self.heads, self.starts = node, heads, node.starts()
        self.table = build(node.table, width, heads, head_dim)
        own_key = node.own and "content_to_position" in node.terms
        own_query = node.own and "position_to_content" in node.terms
        self.key = Linear(width, heads * head_dim) if own_key else None
        self.query = Linear(width, heads * head_dim, bias=True) if own_query else None

    def bias(
        self, query: Tensor, key: Tensor, layout: Layout, attention: Projecting
    ) -> Float[Tensor, "batch heads query key"] | None:
        places = layout.once(("disentangled", self.starts, self.node.reach), lambda: self.rows(layout))
        terms, table = [], self.table()[None]
        if "content_to_position" in self.node.terms:
            keys = attention.as_keys(table) if self.key is None else self._by_head(self.key(table))
            terms.append(at(query.float() @ self._for_all(keys).transpose(-1, -2), places))
        if "position_to_content" in self.node.terms:
            queries = attention.as_queries(table) if self.query is None else self._by_head(self.query(table))
            products = self._for_all(key) @ queries.float().transpose(-1, -2)
            terms.append(at(products, places.transpose(-1, -2)).transpose(-1, -2))
        return attention.scale * sum(terms[1:], terms[0]) if terms else None

    def rows(self, layout: Layout) -> Int[Tensor, "batch query key"]:
        """The table's row for each pair: beyond the last distance, the last row."""
        behind, reach = -layout.distances, self.node.reach
        return (behind.sign() * steps(self.starts, behind.abs()) + reach).clamp(0, 2 * reach - 1)

    def _by_head(self, x: Tensor) -> Float[Tensor, "batch heads rows head_dim"]:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _for_all(self, keys: Tensor) -> Float[Tensor, "batch heads rows head_dim"]:
        """Of each query head, in fp32: heads of a group read the same."""
        return keys.float().repeat_interleave(self.heads // keys.shape[1], dim=1)
