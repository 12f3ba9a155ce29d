"""Attention in five stages: project, score, bias and mask, normalise, mix."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import ConfigError, UnsupportedError
from qkv.nn.backends import Backend, Reference
from qkv.nn.build import build, build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.feed_forward import activation
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.positions import AttentionPosition
from qkv.nn.streaming import seen_from_first, twofold
from qkv.nn.taps import NoTap, Tap


class OnBackend(nn.Module):
    """Attention that leaves scores, softmax and mixing to a backend."""

    backend: Backend = Reference()

    def runs_on(self, tap: Tap) -> Backend:
        """The backend; the reference where scores or weights are asked for, which only it has."""
        shown = tap.wants("scores") or tap.wants("weights")
        return Reference() if shown else self.backend


class Projected(OnBackend):
    """What stands between the stream and the heads: four maps, and norms, bounds and a gate where given."""

    def __init__(self, node: spec.Attention | spec.CrossAttention, width: int, source_width: int):
        super().__init__()
        _refuse(node)
        self.node = node
        value_dim, through = node.value_dim or node.head_dim, node.projections
        self.query = Linear(width, node.heads * node.head_dim, "q" in through.bias)
        self.key = Linear(source_width, node.kv_heads * node.head_dim, "k" in through.bias)
        own = not through.values_are_keys
        self.value = Linear(source_width, node.kv_heads * value_dim, "v" in through.bias) if own else None
        self.output = Linear(node.heads * value_dim, width, "o" in through.bias)
        self.gate = Linear(width, node.heads * value_dim) if through.gate else None
        self.query_norm = build_if(through.norm, *through.norm_sizes(node.heads, node.head_dim))
        self.key_norm = build_if(through.norm, *through.norm_sizes(node.kv_heads, node.head_dim))
        self.value_norm = build_if(through.value_norm, value_dim)
        # where nothing rotates, after rotation is now
        self.norms_last = through.norm_after_rotation and isinstance(node, spec.Attention)
        sink = isinstance(node.score, spec.Score) and node.score.sink
        self.sink = nn.Parameter(torch.empty(node.heads)) if sink else None

    @property
    def scale(self) -> float:
        """What the product of a query and a key is multiplied by."""
        given: float | None = self.node.score.scale
        return self.node.head_dim**-0.5 if given is None else given

    def as_queries(self, x: Tensor) -> Float[Tensor, "batch heads length head_dim"]:
        return self._heads(self.query(x), self.node.heads, self.query_norm, x.dtype)

    def as_keys(self, x: Tensor) -> Float[Tensor, "batch kv_heads length head_dim"]:
        return self._heads(self.key(x), self.node.kv_heads, self.key_norm, x.dtype)

    def as_values(self, x: Tensor) -> Float[Tensor, "batch kv_heads length value_dim"]:
        project = self.key if self.value is None else self.value
        values = self._heads(project(x), self.node.kv_heads, None, x.dtype)
        if self.value_norm is not None:
            values = self.value_norm(values)
        scale = self.node.projections.value_scale
        return values if scale == 1 else scale * values

    def _heads(self, x: Tensor, heads: int, norm: nn.Module | None, dtype: torch.dtype) -> Tensor:
        """Bounded, normalised and split, in the stream's type, also where a part is kept in another."""
        through = self.node.projections
        if through.clip is not None:
            x = x.clamp(-through.clip, through.clip)
        if norm is not None and not self.norms_last:
            x = self.normalised(x, heads, norm)
        return x.unflatten(-1, (heads, -1)).transpose(1, 2).to(dtype)

    def normalised(self, x: Tensor, heads: int, norm: nn.Module) -> Tensor:
        """Over all heads at once, or each by itself. x and the result are (batch, length, heads * dim)."""
        if self.node.projections.norm_over == "all":
            return cast(Tensor, norm(x))
        return cast(Tensor, norm(x.unflatten(-1, (heads, -1))).flatten(-2))

    def mixed(
        self, heads: Float[Tensor, "batch heads length value_dim"], x: Tensor, tap: Tap
    ) -> Float[Tensor, "batch length width"]:
        """The heads side by side, gated by the input where there is a gate, through the last map."""
        out = heads.transpose(1, 2)
        if self.gate is not None:
            gate = activation(self.node.projections.gate or "")(self.gate(x))
            out = out * gate.unflatten(-1, out.shape[-2:])
        return tap("output", self.output(tap("heads", out).flatten(-2)))


@implements(spec.Attention)
class Attention(Projected):
    """MHA, GQA and MQA: softmax(q k^T / sqrt(head_dim)) v for each head. Vaswani et al. 2017, section 3.2.

    Taps: query (batch, heads, length, head_dim); key and value at kv_heads, before they are cached;
    scores and weights (batch, heads, query, key); heads (batch, length, heads, value_dim), as the
    last map reads them; output.
    """

    def __init__(self, node: spec.Attention, width: int):
        super().__init__(node, width, width)
        self.position: AttentionPosition = (
            cast(AttentionPosition, build(node.position, width, node.heads, node.head_dim))
            if node.position is not None
            else AttentionPosition()
        )

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        name: str = "",
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        late = cache is not None and self.position.by_length  # a base that changes turns old keys too
        asked, key, value = self.as_queries(x), self.as_keys(x), self.as_values(x)
        query = self.scaled_by_position(self.placed(asked, layout, self.query_norm), layout)
        key = key if late else self.placed(key, layout, self.key_norm)
        query, key, value = tap("query", query), tap("key", key), tap("value", value)
        if cache is not None:
            key, value = cache.store(name, key, value)
        if late:
            key = self.placed(key, layout, self.key_norm, keys=True)
        mask, score = self.node.mask, self.node.score
        moved = seen_from_first(layout, mask.streaming)
        near = layout if moved is None else moved
        bias = self.position.bias(query, key, near, self)
        if moved is not None and mask.streaming is not None:
            far = self.scaled_by_position(self.placed(asked, moved, self.query_norm), layout)
            query, key = twofold(query, far, key, layout.key_positions < mask.streaming.first)
            score = replace(score, scale=self.scale)
        heads = self.runs_on(tap).attend(
            query,
            key,
            value,
            layout.visible(mask),
            score,
            sink=self.sink,
            bias=bias,
            beside=lambda weights: self.position.values(weights, near),
            tap=tap,
        )
        return self.mixed(heads, x, tap)

    def placed(self, x: Tensor, layout: Layout, norm: nn.Module | None, keys: bool = False) -> Tensor:
        """Queries or keys turned to their positions, and normalised where that comes last."""
        x = self.position.turn(x, layout, keys)
        if norm is not None and self.norms_last:
            flat = self.normalised(x.transpose(1, 2).flatten(-2), x.shape[1], norm)
            x = flat.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
        return x

    def scaled_by_position(self, query: Tensor, layout: Layout) -> Tensor:
        grows = self.node.score.query_scale
        if grows is None:
            return query
        steps = torch.floor((layout.positions.clamp(min=0).float() + grows.first) / grows.floor)
        factor = 1 + grows.factor * torch.log1p(steps)
        return (query * factor[:, None, :, None]).to(query.dtype)


@implements(spec.CrossAttention)
class CrossAttention(Projected):
    """Queries from this stream, keys and values from another. Vaswani et al. 2017, section 3.2.3.

    Keys and values are made once and kept in the cache. Taps as in `Attention`.
    """

    def __init__(self, node: spec.CrossAttention, width: int):
        super().__init__(node, width, node.source_width)

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        name: str = "",
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        """`layout` is this stream's; it holds the rows of the other as its `source`."""
        source = layout.source
        if source is None:
            raise UnsupportedError("Cross-attention has nothing to read: give the call a source.")

        def read() -> tuple[Tensor, Tensor]:
            states = cast(Tensor, source.states)  # there whenever no cache holds what is made of them
            return self.as_keys(states), self.as_values(states)

        key, value = read() if cache is None else cache.keep(name, read)
        query, key, value = tap("query", self.as_queries(x)), tap("key", key), tap("value", value)
        visible = source.visible(self.node.mask, layout)
        heads = self.runs_on(tap).attend(query, key, value, visible, self.node.score, sink=self.sink, tap=tap)
        return self.mixed(heads, x, tap)


def _refuse(node: spec.Attention | spec.CrossAttention) -> None:
    """What this module would otherwise leave out in silence."""
    if node.heads % node.kv_heads:
        raise ConfigError(f"{node.heads} heads cannot share {node.kv_heads} key/value heads evenly.")
    if node.projections.values_are_keys and node.value_dim not in (None, node.head_dim):
        raise ConfigError(f"Values that are keys have their size, {node.head_dim}, not {node.value_dim}.")
    if type(node.score) not in (spec.Score, spec.Dot):
        kind = type(node.score).__name__
        raise UnsupportedError(f"Attention with {kind} scores can be described but not run in torch yet.")
    vectors = isinstance(node.position, spec.Shaw) and node.position.values
    if vectors and node.value_dim not in (None, node.head_dim):
        raise ConfigError(
            f"Vectors of size {node.head_dim} cannot be added to values of size {node.value_dim}."
        )
