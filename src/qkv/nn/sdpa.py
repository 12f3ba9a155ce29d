"""Attention by torch's own fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qkv import spec
from qkv.nn.backends import Beside, with_sink, without_weights
from qkv.nn.taps import NoTap, Tap


class SDPA:
    """`torch.nn.functional.scaled_dot_product_attention`. It shows no scores and no weights.

    It has no soft cap and cannot mix in anything by weight beside the values: `lacks` says so.
    """

    name = "sdpa"

    def lacks(self, node: spec.Node) -> str | None:
        return without_weights(node) or ("a soft cap" if _score(node).cap is not None else None)

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
        blind = ~visible.any(-1)[:, None, :, None]  # rows of -inf alone would be NaN: let them see, then zero
        mask = visible[:, None] | blind
        if sink is not None:
            key, value, mask, bias = with_sink(query, key, value, mask, bias, sink)
        dtype = query.dtype
        if bias is not None:  # the kernel wants one type for all, and a bias rounded to half is another one
            mask = bias.float().masked_fill(~mask, float("-inf"))
            query, key, value = query.float(), key.float(), value.float()
        scale, grouped = score.scale, key.shape[1] != query.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
        return torch.where(blind, 0.0, out.to(dtype))


def _score(node: spec.Node) -> spec.Score:
    score: spec.Score = node.score  # type: ignore[attr-defined]
    return score
