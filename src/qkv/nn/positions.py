"""Positions: rows added to the embedding, and angles that rotate queries and keys."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qkv import spec
from qkv.errors import RequestError
from qkv.nn.build import implements
from qkv.nn.layout import Layout


@implements(spec.Learned)
class Learned(nn.Module):
    """A table: position p adds row p + offset. A token that is not there reads the row before the first."""

    def __init__(self, node: spec.Learned, width: int):
        super().__init__()
        self.offset = node.offset
        self.weight = nn.Parameter(torch.empty(node.rows, width))

    def forward(self, positions: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        rows = (positions + self.offset).clamp(min=0)
        if rows.numel() and int(rows.max()) >= len(self.weight):
            limit = len(self.weight) - self.offset
            raise RequestError(
                f"Position {int(positions.max()):,} has no row: this model's table ends at {limit:,}."
            )
        return self.weight[rows]


@implements(spec.Sinusoidal)
class Sinusoidal(nn.Module):
    """sin(p * base^(-2i/width)) and its cosine. Vaswani et al. 2017, section 3.5. Computed, not stored."""

    def __init__(self, node: spec.Sinusoidal, width: int):
        super().__init__()
        self.node, self.width = node, width

    def forward(self, positions: Int[Tensor, "batch length"]) -> Float[Tensor, "batch length width"]:
        exponent = -torch.arange(0, self.width, 2, dtype=torch.float64, device=positions.device) / self.width
        angles = positions.clamp(min=0)[..., None].double() * self.node.base**exponent
        sine, cosine = angles.sin().float(), angles.cos().float()
        if self.node.layout == "halves":
            return torch.cat([sine, cosine], -1)
        return torch.stack([sine, cosine], -1).flatten(-2)


class Rotary:
    """Turns pairs of dimensions of queries and keys by position times frequency. Su et al. 2021.

    It has no parameters. Frequencies come from the description; positions, frequencies and angles
    are fp32, as a half-precision angle at position 1857 is off by most of a radian.
    """

    def __init__(self, node: spec.Rotary, head_dim: int):
        self.node, self.dims = node, node.dims or head_dim
        self.head_dim = head_dim

    @property
    def by_length(self) -> bool:
        """Whether frequencies depend on the total length: then keys are cached before rotation."""
        return isinstance(self.node.scaling, spec.DynamicNTK | spec.LongRope)

    def angles(
        self, layout: Layout, positions: Int[Tensor, "batch length"]
    ) -> tuple[Float[Tensor, "batch 1 length pairs"], Float[Tensor, "batch 1 length pairs"]]:
        """Cosines and sines, times the scaling's attention factor.

        Frequencies follow from the length of the sequence a token stands in, never from its batch
        mates' or from how it was cut into chunks.
        """
        lengths = layout.lengths if self.by_length else torch.zeros(1, 1, dtype=torch.long)
        known, place = lengths.cpu().unique(return_inverse=True)
        each = [self.node.frequencies(self.head_dim, int(length)) for length in known]
        frequencies = torch.stack([torch.from_numpy(values) for values, _ in each])[place]
        factors = torch.tensor([factor for _, factor in each], dtype=torch.float32)[place]
        frequencies, factors = frequencies.to(positions.device), factors.to(positions.device)
        angles = positions[:, None, :, None].float() * frequencies[:, None]
        return angles.cos() * factors[:, None, :, None], angles.sin() * factors[:, None, :, None]

    def __call__(
        self, x: Float[Tensor, "batch heads length head_dim"], layout: Layout, keys: bool
    ) -> Float[Tensor, "batch heads length head_dim"]:
        """Rotated at the layout's query positions, or at its key positions."""
        positions = layout.key_positions if keys else layout.positions
        cosine, sine = layout.once(
            ("rotary", self.node, self.head_dim, keys), lambda: self.angles(layout, positions)
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
