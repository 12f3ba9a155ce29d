"""Attention by torch's compiler: masks and biases become part of one generated kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from qkv import spec
from qkv.nn.backends import Beside, with_sink, without_weights
from qkv.nn.taps import NoTap, Tap


class Flex:
    """`flex_attention`, Dong et al. 2024; blocks that the mask hides are skipped. No scores, no weights.

    On a processor it computes forward only. `compiled=False` runs the same definition without a
    compiler, whole and slowly: for comparison.
    """

    name = "flex"

    def __init__(self, compiled: bool = True):
        self.compiled = compiled

    def lacks(self, node: spec.Node) -> str | None:
        return without_weights(node)

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
        run: Any = _compiled() if self.compiled else flex.flex_attention
        blind, shown = ~visible.any(-1)[:, None, :, None], visible[:, None]
        if sink is not None:
            key, value, shown, bias = with_sink(query, key, value, shown, bias, sink)
        batch, _, queries, keys = shown.shape
        blocks = flex.create_block_mask(
            lambda b, h, q, k: shown[b, 0, q, k], batch, None, queries, keys, device=query.device.type
        )
        out = run(
            query,
            key,
            value,
            score_mod=_modified(score, bias),
            block_mask=blocks,
            scale=score.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return torch.where(blind, 0.0, out)


def _modified(score: spec.Score, bias: Tensor | None) -> Callable[..., Tensor] | None:
    """Capped, then biased, as the reference does."""
    if score.cap is None and bias is None:
        return None
    cap = score.cap
    rows, heads = (0, 0) if bias is None else (bias.shape[0] > 1, bias.shape[1] > 1)

    def modify(value: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            value = cap * torch.tanh(value / cap)
        return value if bias is None else value + bias[b * rows, h * heads, q, k]

    return modify


@functools.cache
def _compiled() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex.flex_attention)
    return compiled
