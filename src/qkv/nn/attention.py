"""Self-attention in five stages: project, score, bias and mask, normalise, mix."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qkv import spec
from qkv.errors import ConfigError, UnsupportedError
from qkv.nn.backends import Backend, Reference
from qkv.nn.build import build_if, implements
from qkv.nn.cache import Cache
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.positions import Rotary
from qkv.nn.taps import NoTap, Tap


@implements(spec.Attention)
class Attention(nn.Module):
    """MHA, GQA and MQA: softmax(q k^T / sqrt(head_dim)) v for each head. Vaswani et al. 2017, section 3.2.

    Taps: query (batch, heads, length, head_dim); key and value at kv_heads, before they are cached;
    scores and weights (batch, heads, query, key); heads (batch, length, heads, value_dim); output.
    """

    backend: Backend = Reference()

    def __init__(self, node: spec.Attention, width: int):
        super().__init__()
        self.node = node
        value_dim, through = node.value_dim or node.head_dim, node.projections
        self.query = Linear(width, node.heads * node.head_dim, "q" in through.bias)
        self.key = Linear(width, node.kv_heads * node.head_dim, "k" in through.bias)
        self.value = Linear(width, node.kv_heads * value_dim, "v" in through.bias)
        self.output = Linear(node.heads * value_dim, width, "o" in through.bias)
        self.query_norm = build_if(through.norm, *through.norm_sizes(node.heads, node.head_dim))
        self.key_norm = build_if(through.norm, *through.norm_sizes(node.kv_heads, node.head_dim))
        self.sink = nn.Parameter(torch.empty(node.heads)) if node.score.sink else None
        _refuse_unknown(node)
        self.rotary = Rotary(node.position, node.head_dim) if isinstance(node.position, spec.Rotary) else None

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        name: str = "",
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        query, key, value = self.project(x)
        if self.rotary is not None:
            query = self.rotary(query, layout, keys=False)
            if cache is None or not self.rotary.by_length:
                key = self.rotary(key, layout, keys=False)
        query, key, value = tap("query", query), tap("key", key), tap("value", value)
        if cache is not None:
            key, value = cache.store(name, key, value)
            if self.rotary is not None and self.rotary.by_length:
                key = self.rotary(key, layout, keys=True)  # a base that changed turns old keys too
        visible = layout.visible(self.node.mask)
        mixed = self.backend.attend(query, key, value, visible, self.node.score, self.sink, tap=tap)
        heads = tap("heads", mixed.transpose(1, 2))
        return tap("output", self.output(heads.flatten(-2)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, (batch, heads, length, dim); clipped and normalised.

        In the stream's type, also where one of the parts is kept in another.
        """
        through = self.node.projections
        query, key, value = self.query(x), self.key(x), self.value(x)
        if through.clip is not None:
            query, key, value = (t.clamp(-through.clip, through.clip) for t in (query, key, value))
        query = self.normalised(query, self.query_norm, self.node.heads)
        key = self.normalised(key, self.key_norm, self.node.kv_heads)
        value = value.unflatten(-1, (self.node.kv_heads, -1))
        query, key, value = (t.to(x.dtype).transpose(1, 2) for t in (query, key, value))
        return query, key, value

    def normalised(self, x: Tensor, norm: nn.Module | None, heads: int) -> Tensor:
        """Split into heads; the norm over all heads at once comes before the split."""
        if norm is not None and self.node.projections.norm_over == "all":
            return norm(x).unflatten(-1, (heads, -1))
        x = x.unflatten(-1, (heads, -1))
        return x if norm is None else norm(x)


def _refuse_unknown(node: spec.Attention) -> None:
    """What this module would otherwise leave out in silence."""
    through, position = node.projections, node.position
    if node.heads % node.kv_heads:
        raise ConfigError(f"{node.heads} heads cannot share {node.kv_heads} key/value heads evenly.")
    reasons = {
        "gated heads": through.gate is not None,
        "queries scaled by position": node.score.query_scale is not None,
        "norms after rotation": through.norm is not None and through.norm_after_rotation,
        f"{type(position).__name__} positions": not isinstance(position, spec.Rotary | None),
        "positions on several axes": isinstance(position, spec.Rotary) and position.axes is not None,
        f"{type(node.score).__name__} scores": type(node.score) not in (spec.Score, spec.Dot),
    }
    for reason, present in reasons.items():
        if present:
            raise UnsupportedError(f"Attention with {reason} can be described but not run in torch yet.")
