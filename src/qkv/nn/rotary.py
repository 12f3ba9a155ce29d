"""Angles that rotate queries and keys. Su et al. 2021."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qkv import spec
from qkv.errors import ConfigError, RequestError
from qkv.nn.build import implements
from qkv.nn.layout import Layout
from qkv.nn.positions import AttentionPosition


@implements(spec.Rotary)
class Rotary(AttentionPosition):
    """Turns pairs of dimensions of queries and keys by position times frequency.

    It has no parameters. Frequencies come from the description; positions, frequencies and angles
    are fp32, as a half-precision angle at position 1857 is off by most of a radian.
    """

    def __init__(self, node: spec.Rotary, *sizes: int):
        super().__init__()
        self.node, self.head_dim = node, sizes[-1]
        self.by_length = isinstance(node.scaling, spec.DynamicNTK | spec.LongRope)
        pairs = (node.dims or self.head_dim) // 2
        if node.axes is not None and sum(node.axes.sections) != pairs:
            raise ConfigError(f"Sections {node.axes.sections} must sum up to the {pairs} pairs that rotate.")
        self.axes = () if node.axes is None else node.axes.of_pairs()

    def angles(
        self,
        layout: Layout,
        positions: Int[Tensor, "batch length"],
        axes: Int[Tensor, "axes batch length"] | None = None,
    ) -> tuple[Float[Tensor, "batch 1 length pairs"], Float[Tensor, "batch 1 length pairs"]]:
        """Cosines and sines, times the scaling's attention factor.

        Frequencies follow from the length of the sequence a token stands in, never from its batch
        mates' or from how it was cut into chunks. Positions are those of the token on each pair's
        axis, where there are axes.
        """
        lengths = layout.lengths if self.by_length else torch.zeros(1, 1, dtype=torch.long)
        known, place = lengths.cpu().unique(return_inverse=True)
        each = [self.node.frequencies(self.head_dim, int(length)) for length in known]
        frequencies = torch.stack([torch.from_numpy(values) for values, _ in each])[place]
        factors = torch.tensor([factor for _, factor in each], dtype=torch.float32)[place]
        frequencies, factors = frequencies.to(positions.device), factors.to(positions.device)
        turns = self._turns(positions, axes)
        angles = turns[:, None] * frequencies[:, None]
        return angles.cos() * factors[:, None, :, None], angles.sin() * factors[:, None, :, None]

    def _turns(self, positions: Tensor, axes: Tensor | None) -> Float[Tensor, "batch length pairs_or_one"]:
        """Where each token stands, for each pair."""
        if axes is None or self.node.axes is None:
            return positions[..., None].float()
        sections = self.node.axes.sections
        if len(axes) != len(sections):
            raise RequestError(f"The layout has {len(axes)} axes, and this model turns by {len(sections)}.")
        return axes[torch.tensor(self.axes, device=axes.device)].permute(1, 2, 0).float()

    def turn(
        self, x: Float[Tensor, "batch heads length head_dim"], layout: Layout, keys: bool
    ) -> Float[Tensor, "batch heads length head_dim"]:
        positions, axes = (layout.key_positions, layout.key_axes) if keys else (layout.positions, layout.axes)
        cosine, sine = layout.once(
            ("rotary", self.node, self.head_dim, keys), lambda: self.angles(layout, positions, axes)
        )
        return rotate(x, cosine, sine, self.node.pairs)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, pairs: str = "half") -> Tensor:
    """The first dimensions of x (..., head_dim) turned by the angles (..., pairs); the rest untouched.

    "half" pairs dimension i with i + pairs, "interleaved" 2i with 2i + 1.
    """
    dims = 2 * cosine.shape[-1]
    turned, rest = x[..., :dims].float(), x[..., dims:]
    if pairs == "half":
        a, b = turned.chunk(2, -1)
        out = torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack([a * cosine - b * sine, b * cosine + a * sine], -1).flatten(-2)
    return torch.cat([out.to(x.dtype), rest], -1) if rest.shape[-1] else out.to(x.dtype)
