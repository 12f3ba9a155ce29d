"""Attention over one small latent from which every head's keys and values are made."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import UnsupportedError
from qkv.nn.attention import OnBackend
from qkv.nn.build import build, build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.positions import AttentionPosition
from qkv.nn.taps import NoTap, Tap


@implements(spec.LatentAttention)
class LatentAttention(OnBackend):
    """MLA: c = norm(W x), key = [U c, rotated k], value = V c. DeepSeek-AI 2024 (V2), section 2.1.

    The cache keeps c and the rotated part of the key, which all heads share. As written, each head's
    keys and values are made from c at every call. `absorbed` moves U into the query and V behind the
    mixing, (U^T q) . c = q . (U c): the heads then attend over the latent itself, as one shared key
    of rank + rotary_dim. Equal, and cheaper where queries are few, as in decoding.

    Taps: query (batch, heads, length, head_dim + rotary_dim); key and value (batch, heads, key, dim)
    of all tokens so far, or absorbed, query, key and value of one shared head, of rank + rotary_dim
    and rank; scores, weights, heads (batch, length, heads, value_dim) and output as in `Attention`.
    """

    def __init__(self, node: spec.LatentAttention, width: int):
        super().__init__()
        if node.score.sink or node.score.query_scale is not None:
            lacking = "a sink" if node.score.sink else "queries that grow"
            raise UnsupportedError(f"Latent attention with {lacking} can be described but not run in torch.")
        if node.indexer is not None:
            raise UnsupportedError(
                "Latent attention over the keys an indexer chooses can be described but not run in torch yet."
            )
        self.node, self.absorbed = node, False
        heads, down = node.heads, "a" in node.bias
        queries = heads * (node.head_dim + node.rotary_dim)
        self.query = Linear(width, queries) if node.query_rank is None else None
        self.query_down = None if node.query_rank is None else Linear(width, node.query_rank, down)
        self.query_norm = None if node.query_rank is None else build(node.norm, node.query_rank)
        self.query_up = None if node.query_rank is None else Linear(node.query_rank, queries)
        self.latent = Linear(width, node.rank + node.rotary_dim, down)
        self.latent_norm = build(node.norm, node.rank)
        self.key_up = Linear(node.rank, heads * node.head_dim)
        self.value_up = Linear(node.rank, heads * node.value_dim)
        self.output = Linear(heads * node.value_dim, width, "o" in node.bias)
        position = build_if(node.position, width, heads, node.rotary_dim)
        self.position = AttentionPosition() if position is None else cast(AttentionPosition, position)

    @property
    def scale(self) -> float:
        """What the product of a query and a key is multiplied by, in either form."""
        given = self.node.score.scale
        return (self.node.head_dim + self.node.rotary_dim) ** -0.5 if given is None else given

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        name: str = "",
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        late = cache is not None and self.position.by_length  # a base that changes turns old keys too
        content, turning = self.as_queries(x, layout)
        latent, turned = self.as_latent(x)
        turned = turned if late else self.position.turn(turned, layout, keys=False)
        if cache is not None:
            latent, turned = cache.store(name, latent, turned)
        if late:
            turned = self.position.turn(turned, layout, keys=True)
        if self.absorbed:
            content, key, value = self.into_query(content), latent, latent
        else:
            key, value = self.expanded(latent, self.key_up), self.expanded(latent, self.value_up)
        query = tap("query", torch.cat([content, turning], -1))
        key = tap("key", torch.cat([key, turned.expand(-1, key.shape[1], -1, -1)], -1))
        visible, score = layout.visible(self.node.mask), replace(self.node.score, scale=self.scale)
        value = tap("value", value)
        heads = self.runs_on(tap).attend(query, key, value, visible, score, tap=tap)
        heads = (self.out_of_latent(heads) if self.absorbed else heads).transpose(1, 2)
        return tap("output", self.output(tap("heads", heads).flatten(-2)))

    def as_queries(
        self, x: Tensor, layout: Layout
    ) -> tuple[Float[Tensor, "batch heads length head_dim"], Float[Tensor, "batch heads length rotary_dim"]]:
        """What meets a key's content, and what turns."""
        if self.query is not None:
            query = self.query(x)
        else:
            query = cast(Linear, self.query_up)(
                cast(nn.Module, self.query_norm)(cast(Linear, self.query_down)(x))
            )
        query = query.unflatten(-1, (self.node.heads, -1)).transpose(1, 2).to(x.dtype)
        content, turning = query.split([self.node.head_dim, self.node.rotary_dim], -1)
        return content, self.position.turn(turning, layout, keys=False)

    def as_latent(
        self, x: Tensor
    ) -> tuple[Float[Tensor, "batch 1 length rank"], Float[Tensor, "batch 1 length rotary_dim"]]:
        """The latent, and the part of the key that turns, not turned yet; both as one shared head."""
        both = self.latent(x).to(x.dtype)[:, None]
        latent, turning = both.split([self.node.rank, self.node.rotary_dim], -1)
        return self.latent_norm(latent), turning

    def expanded(
        self, latent: Float[Tensor, "batch 1 key rank"], up: Linear
    ) -> Float[Tensor, "batch heads key dim"]:
        made = up(latent[:, 0]).unflatten(-1, (self.node.heads, -1))
        return cast(Tensor, made.transpose(1, 2).to(latent.dtype))

    def into_query(
        self, content: Float[Tensor, "batch heads length head_dim"]
    ) -> Float[Tensor, "batch heads length rank"]:
        """U^T q for each head: what the query asks of the latent."""
        up = self.key_up.weight.unflatten(0, (self.node.heads, -1))
        return (content.to(up.dtype) @ up).to(content.dtype)

    def out_of_latent(
        self, mixed: Float[Tensor, "batch heads length rank"]
    ) -> Float[Tensor, "batch heads length value_dim"]:
        """V c for each head, after the mixing."""
        up = self.value_up.weight.unflatten(0, (self.node.heads, -1))
        return (mixed.to(up.dtype) @ up.transpose(-1, -2)).to(mixed.dtype)
