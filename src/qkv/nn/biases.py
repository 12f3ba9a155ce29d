"""Positions that bias the score: fixed slopes, learned buckets, vectors and sinusoids of the distance."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.nn.build import build, implements
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.positions import AttentionPosition, Projecting, sinusoids

ByHead = Float[Tensor, "batch heads query key"]


@implements(spec.Alibi)
class Alibi(AttentionPosition):
    """-slope[head] * |query - key|, outside the scale. Press et al. 2022, section 3.

    Slopes are constants, not parameters. A key after its query, where a mask shows it, costs as
    much as one before it.
    """

    def __init__(self, node: spec.Alibi, width: int, heads: int, head_dim: int):
        super().__init__()
        self.slopes = node.slopes(heads)

    def bias(self, query: Tensor, key: Tensor, layout: Layout, attention: Projecting) -> ByHead:
        slopes = torch.tensor(self.slopes, device=query.device)[:, None, None]
        return -slopes * layout.distances.abs()[:, None].float()


@implements(spec.Buckets)
class Buckets(AttentionPosition):
    """weight[bucket(key - query), head], outside the scale. Raffel et al. 2019, section 2.1 (T5)."""

    def __init__(self, node: spec.Buckets, width: int, heads: int, head_dim: int):
        super().__init__()
        self.node, self.starts = node, node.starts()
        self.weight = nn.Parameter(torch.empty(node.buckets, heads))

    def bias(self, query: Tensor, key: Tensor, layout: Layout, attention: Projecting) -> ByHead:
        buckets = layout.once(("buckets", self.starts, self.node.bidirectional), lambda: self.of(layout))
        return self.weight.float()[buckets].permute(0, 3, 1, 2)

    def of(self, layout: Layout) -> Int[Tensor, "batch query key"]:
        """The bucket of each distance."""
        ahead = layout.distances
        if not self.node.bidirectional:
            return steps(self.starts, (-ahead).clamp(min=0))
        return steps(self.starts, ahead.abs()) + self.node.one_side * (ahead > 0)


@implements(spec.Shaw)
class Shaw(AttentionPosition):
    """Vectors of the distance clip(key - query, -k, k), on keys and on values. Shaw et al. 2018, section 3.

    scores: scale * q_i . (k_j + key[distance]); outputs: sum over j of weight_ij * (v_j + value[distance]).
    Neither makes a vector for each pair (section 3.3): queries meet the 2k + 1 vectors first, and
    weights of one distance are summed first.
    """

    def __init__(self, node: spec.Shaw, width: int, heads: int, head_dim: int):
        super().__init__()
        self.clip = node.clip
        shape = (2 * node.clip + 1, *((heads,) if node.per_head else ()), head_dim)
        self.key = Vectors(*shape)
        self.value = Vectors(*shape) if node.values else None

    def bias(self, query: Tensor, key: Tensor, layout: Layout, attention: Projecting) -> ByHead:
        products = query.float() @ self.key.by_head().transpose(-1, -2)
        return attention.scale * at(products, self.clipped(layout))

    def values(self, weights: ByHead, layout: Layout) -> Float[Tensor, "batch heads query head_dim"] | None:
        if self.value is None:
            return None
        batch, heads, queries, _ = weights.shape
        by_distance = weights.new_zeros(batch, heads, queries, 2 * self.clip + 1)
        places = self.clipped(layout)[:, None].expand_as(weights)
        return by_distance.scatter_add(-1, places, weights) @ self.value.by_head()

    def clipped(self, layout: Layout) -> Int[Tensor, "batch query key"]:
        """The row of each distance."""
        return layout.once(
            ("clipped", self.clip), lambda: layout.distances.clamp(-self.clip, self.clip) + self.clip
        )


class Vectors(nn.Module):
    """A table with a vector for each distance, of each head or of all."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def by_head(self) -> Float[Tensor, "heads_or_one rows head_dim"]:
        wide = self.weight.float()
        return wide.transpose(0, 1) if wide.ndim == 3 else wide[None]


@implements(spec.HeadBiases)
class HeadBiases(nn.Module):
    """Transformer-XL's u (`content`) and v (`distance`), a vector a head."""

    def __init__(self, node: spec.HeadBiases, width: int, heads: int, head_dim: int):
        super().__init__()
        self.content = nn.Parameter(torch.empty(heads, head_dim))
        self.distance = nn.Parameter(torch.empty(heads, head_dim))


@implements(spec.RelativeSinusoidal)
class RelativeSinusoidal(AttentionPosition):
    """scale * [(q_i + v) . W_R R(i - j) + u . k_j], beside q_i . k_j. Dai et al. 2019, section 3.3.

    R is a sinusoid of the distance, made once for each distance that occurs, and W_R its key.
    """

    def __init__(self, node: spec.RelativeSinusoidal, width: int, heads: int, head_dim: int):
        super().__init__()
        self.base, self.width = node.base, width
        self.key = Linear(width, heads * head_dim)
        self.biases = cast(HeadBiases, build(node.biases, width, heads, head_dim))

    def bias(self, query: Tensor, key: Tensor, layout: Layout, attention: Projecting) -> ByHead:
        content, distance = self.biases.content.float(), self.biases.distance.float()
        asked, places = layout.once(("sinusoids", self.base, self.width), lambda: self.sinusoids(layout))
        keys = self.key(asked).float().unflatten(-1, content.shape).transpose(0, 1)
        by_distance = at((query.float() + distance[:, None]) @ keys.transpose(-1, -2), places)
        groups = content.unflatten(0, (key.shape[1], -1))  # query heads of one key head side by side
        by_content = (groups @ key.float().transpose(-1, -2)).flatten(1, 2)[:, :, None]
        return attention.scale * (by_distance + by_content)

    def sinusoids(
        self, layout: Layout
    ) -> tuple[Float[Tensor, "distances width"], Int[Tensor, "batch query key"]]:
        """R of every distance between the least and the largest, and which one a pair has."""
        behind = -layout.distances
        least = behind.min()
        known = torch.arange(int(least), int(behind.max()) + 1, device=behind.device)
        return sinusoids(known, self.width, self.base, "halves"), behind - least


def at(
    products: Float[Tensor, "batch heads rows columns"], places: Int[Tensor, "batch rows chosen"]
) -> Float[Tensor, "batch heads rows chosen"]:
    """Of each row the columns `places` names, the same ones in every head."""
    return products.gather(-1, places[:, None].expand(-1, products.shape[1], -1, -1))


def steps(starts: tuple[int, ...], distances: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """How many of `starts` each distance has reached."""
    return torch.bucketize(distances, torch.tensor(starts, device=distances.device), right=True)
