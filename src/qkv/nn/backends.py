"""How scores become outputs: the protocol, and the reference that shows every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.nn.taps import NoTap, Tap

Beside = Callable[[Tensor], Tensor | None]


class Backend(Protocol):
    """Scores, masks, normalises and mixes. Equal to `Reference`."""

    name: str

    def lacks(self, node: spec.Node) -> str | None:
        """What this attention has and the backend does not do; None if it does all."""
        ...

    def attend(
        self,
        query: Float[Tensor, "batch heads query head_dim"],
        key: Float[Tensor, "batch kv_heads key head_dim"],
        value: Float[Tensor, "batch kv_heads key value_dim"],
        visible: Bool[Tensor, "batch query key"],
        score: spec.Score,
        sink: Float[Tensor, " heads"] | None = None,
        bias: Float[Tensor, "#batch heads query key"] | None = None,
        beside: Beside | None = None,
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch heads query value_dim"]:
        """The mixed values. A query that sees nothing gets zeros, and finite gradients.

        Query head h reads key/value head h // (heads / kv_heads). `bias` is added to the scaled
        scores; `beside` gives from the weights what is added to the mixed values, or None.
        """
        ...


class Reference:
    """softmax(scale * q k^T + bias, over what is visible) v, stage by stage, softmax in fp32.

    Vaswani et al. 2017, section 3.2.1; grouped heads: Ainslie et al. 2023; soft-cap: Gemma 2;
    sink: gpt-oss.
    """

    name = "reference"

    def lacks(self, node: spec.Node) -> str | None:
        return None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor,
        score: spec.Score,
        sink: Tensor | None = None,
        bias: Tensor | None = None,
        beside: Beside | None = None,
        tap: Tap = NoTap(),
    ) -> Tensor:
        batch, heads, queries, head_dim = query.shape
        kv_heads, keys = key.shape[1], key.shape[2]
        scale = head_dim**-0.5 if score.scale is None else score.scale
        # heads of a group side by side, so that K and V are read once and never repeated
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * queries, head_dim)
        scores = (grouped @ key.transpose(-1, -2)).float().view(batch, heads, queries, keys) * scale
        if score.cap is not None:
            scores = score.cap * torch.tanh(scores / score.cap)
        if bias is not None:
            scores = scores + bias
        scores = tap("scores", scores.masked_fill(~visible[:, None], float("-inf")))
        weights = tap("weights", normalise(scores, sink))
        mixed = weights.to(value.dtype).view(batch, kv_heads, -1, keys) @ value
        mixed = mixed.view(batch, heads, queries, -1)
        more = beside(weights) if beside is not None else None
        return mixed if more is None else mixed + more.to(mixed.dtype)


def without_weights(node: spec.Node) -> str | None:
    """What needs the weights themselves, which a fused kernel never holds."""
    position = getattr(node, "position", None)
    return "positions on the values" if isinstance(position, spec.Shaw) and position.values else None


def with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, bias: Tensor | None, sink: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A sink as one more key: of zeros, so its score is its bias, and with a value of zeros."""
    batch, heads, queries, _ = query.shape
    key, value = (F.pad(t, (0, 0, 0, 1)) for t in (key, value))
    logits = sink.float()[None, :, None, None].expand(batch, heads, queries, 1)
    if bias is None:
        bias = logits.new_zeros(1, 1, 1, 1)
    bias = bias.expand(batch, heads, queries, mask.shape[-1])
    return key, value, F.pad(mask, (0, 1), value=True), torch.cat([bias, logits], -1)


def normalise(scores: Tensor, sink: Tensor | None = None) -> Tensor:
    """Softmax over the last axis in fp32; -inf is hidden, and a row of nothing else gives zeros.

    `sink` (heads,) is a further logit of each head that takes weight and has no value.
    """
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        logit = sink.float()[None, :, None, None]
        top = torch.maximum(top, logit)
    top = torch.where(top.isinf(), 0.0, top).detach()  # a row of -inf would be -inf - -inf
    shares = torch.exp(scores - top)
    total = shares.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(logit - top)
    return shares / torch.where(total == 0, 1.0, total)
