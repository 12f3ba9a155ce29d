"""First keys and a window: where queries stand, seen from keys that nothing in between separates any more."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qkv.nn.layout import Layout
from qkv.spec import Streaming


def seen_from_first(layout: Layout, mask: Streaming | None) -> Layout | None:
    """The layout with queries at their places, and with distances to the first keys counted from there.

    None where there is no such mask, or where nothing is out of sight yet: then all is as it would be
    without one. Xiao et al. 2023, section 3.2. On several axes a query moves alike on each.
    """
    if mask is None:
        return None
    return layout.once(("streaming", mask), lambda: _moved(layout, mask))


def _moved(layout: Layout, mask: Streaming) -> Layout | None:
    places = mask.place(layout.positions)
    if torch.equal(places, layout.positions):
        return None
    axes = None if layout.axes is None else layout.axes + (places - layout.positions)
    first = (layout.key_positions < mask.first)[:, None]
    seen = layout.key_positions[:, None, :] - places[:, :, None]
    distances = torch.where(first, seen, layout.distances)
    return replace(layout, positions=places, axes=axes, _memo={"distances": distances})


def twofold(
    near: Float[Tensor, "batch heads query head_dim"],
    far: Float[Tensor, "batch heads query head_dim"],
    key: Float[Tensor, "batch kv_heads key head_dim"],
    first: Bool[Tensor, "batch key"],
) -> tuple[
    Float[Tensor, "batch heads query twice_head_dim"], Float[Tensor, "batch kv_heads key twice_head_dim"]
]:
    """Queries and keys of twice the size, whose product is far . key for the first keys, else near . key.

    So every backend computes it, as it computes any other attention.
    """
    is_first = first[:, None, :, None]
    keys = torch.cat([key.masked_fill(is_first, 0), key.masked_fill(~is_first, 0)], -1)
    return torch.cat([near, far], -1), keys
