"""Mixers with a state of fixed size in place of a cache that grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError
from qkv.nn.build import build, implements
from qkv.nn.cache import Cache
from qkv.nn.feed_forward import activation
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.taps import NoTap, Tap


@dataclass(frozen=True, eq=False)
class Sequences:
    """The tokens of a call that are there, one row a sequence, from its left: what a recurrence walks over.

    A sequence is a row of the batch, or a document where they are packed. Rows end in tokens that
    are not there, up to the longest; `slots` says where in the flat grid each token that is there goes.
    """

    there: Bool[Tensor, "batch length"]
    slots: Int[Tensor, " tokens"]
    lengths: Int[Tensor, " rows"]
    longest: int

    @staticmethod
    def of(layout: Layout) -> Sequences:
        there = layout.positions >= 0
        batch = there.shape[0]
        row = torch.arange(batch, device=there.device)[:, None].expand_as(there)[there]
        count = batch
        if layout.documents is not None:
            pairs = torch.stack([row, layout.documents[there]], -1)
            found, row = pairs.unique(dim=0, return_inverse=True)
            count = len(found)
        lengths = torch.bincount(row, minlength=count)
        longest = max(1, int(lengths.max())) if count else 1  # a call of padding alone still takes a step
        # tokens of a sequence stand in order: their places follow from where each sequence begins
        order = row.argsort(stable=True)
        starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        places = torch.empty_like(row)
        places[order] = torch.arange(len(row), device=row.device) - starts
        return Sequences(there, row * longest + places, lengths, longest)

    @property
    def present(self) -> Bool[Tensor, "rows longest"]:
        return torch.arange(self.longest, device=self.lengths.device) < self.lengths[:, None]

    def lined(self, x: Float[Tensor, "batch length *dims"]) -> Float[Tensor, "rows longest *dims"]:
        """Sequences as rows, zero behind their ends."""
        rows = x.new_zeros(len(self.lengths) * self.longest, *x.shape[2:])
        return rows.index_copy(0, self.slots, x[self.there]).unflatten(0, (-1, self.longest))

    def back(self, rows: Float[Tensor, "rows longest *dims"]) -> Float[Tensor, "batch length *dims"]:
        """Each token's values at its place in the batch, zero where none is."""
        out = rows.new_zeros(*self.there.shape, *rows.shape[2:])
        return out.masked_scatter(
            self.there[(...,) + (None,) * (out.ndim - 2)], rows.flatten(0, 1)[self.slots]
        )


class Convolution(nn.Module):
    """Each channel's last `steps` values, weighted: causal and depthwise."""

    def __init__(self, channels: int, steps: int, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, steps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(
        self,
        x: Float[Tensor, "rows longest channels"],
        before: Float[Tensor, "rows past channels"] | None,
        lengths: Int[Tensor, " rows"],
    ) -> tuple[Float[Tensor, "rows longest channels"], Float[Tensor, "rows past channels"]]:
        """The mixed values, and the last steps - 1 inputs of each row, which its next call begins with."""
        past = self.weight.shape[1] - 1
        if before is None:
            before = x.new_zeros(len(x), past, x.shape[2])
        inputs = torch.cat([before.to(x.dtype), x], 1)
        windows = inputs.to(self.weight.dtype).unfold(1, past + 1, 1)  # (rows, longest, channels, steps)
        mixed = (windows * self.weight).sum(-1)
        if self.bias is not None:
            mixed = mixed + self.bias
        last = lengths[:, None] + torch.arange(past, device=x.device)
        kept = inputs.gather(1, last[..., None].expand(-1, -1, x.shape[2]))
        return mixed, kept


class Recurrent(nn.Module, ABC):
    """What the mixers with a state have in common: a convolution, a walk over the tokens, a last map.

    Padding is never walked over, and each packed document begins anew. The cache keeps the state in
    fp32 and the convolution's last inputs. Taps: heads (batch, length, heads, dim), as the last map
    reads them; output.
    """

    convolution: Convolution
    activation: Callable[[Tensor], Tensor]  # behind the convolution, and of the gate
    output: Linear

    def forward(
        self,
        x: Float[Tensor, "batch length width"],
        layout: Layout,
        cache: Cache | None = None,
        name: str = "",
        tap: Tap = NoTap(),
    ) -> Float[Tensor, "batch length width"]:
        rows: Sequences = layout.once("sequences", lambda: Sequences.of(layout))
        held = cache.state(name) if cache is not None else None
        state, before = (None, None) if held is None else held
        x = rows.lined(x)
        mixed, before = self.convolution(self.inputs(x), before, rows.lengths)
        heads, state = self.walk(x, self.activation(mixed), rows.present, state)
        if cache is not None:
            cache.set_state(name, state, before)
        heads = tap("heads", rows.back(heads.to(x.dtype)))
        return tap("output", self.output(heads.flatten(-2)))

    @abstractmethod
    def inputs(self, x: Float[Tensor, "rows longest width"]) -> Float[Tensor, "rows longest channels"]:
        """What the convolution reads."""

    @abstractmethod
    def walk(
        self,
        x: Float[Tensor, "rows longest width"],
        mixed: Float[Tensor, "rows longest channels"],
        present: Bool[Tensor, "rows longest"],
        state: Float[Tensor, "rows heads a b"] | None,
    ) -> tuple[Float[Tensor, "rows longest heads dim"], Float[Tensor, "rows heads a b"]]:
        """The heads, gated and normalised, and the state after each row's last token."""


@implements(spec.GatedDelta)
class GatedDelta(Recurrent):
    """S <- a S; S <- S + k (b (v - S^T k))^T; out = S^T q. Yang et al. 2024 (Gated DeltaNet), equation 10.

    Queries and keys have length 1, queries are then divided by sqrt(key_dim); the decay is
    a = exp(-exp(decay_log) softplus(decay + decay_bias)), the step b = sigmoid(beta). Each key head
    serves value_heads / key_heads neighbouring value heads. The result is normalised by head, then gated.
    """

    def __init__(self, node: spec.GatedDelta, width: int):
        super().__init__()
        if node.value_heads % node.key_heads:
            raise ConfigError(
                f"{node.value_heads} value heads cannot share {node.key_heads} key heads evenly."
            )
        self.node, self.activation = node, activation(node.activation)
        keys, values = node.key_heads * node.key_dim, node.value_heads * node.value_dim
        self.query, self.key = Linear(width, keys), Linear(width, keys)
        self.value, self.gate = Linear(width, values), Linear(width, values)
        self.beta, self.decay = Linear(width, node.value_heads), Linear(width, node.value_heads)
        self.convolution = Convolution(node.channels, node.convolution)
        self.decay_bias = nn.Parameter(torch.empty(node.value_heads))
        self.decay_log = nn.Parameter(torch.empty(node.value_heads))
        self.norm = build(node.norm, node.value_dim)
        self.output = Linear(values, width)

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.query(x), self.key(x), self.value(x)], -1)

    def walk(self, x: Tensor, mixed: Tensor, present: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        node, keys = self.node, self.node.key_heads * self.node.key_dim
        query, key, value = mixed.float().split([keys, keys, node.value_heads * node.value_dim], -1)
        query, key = (unit(t.unflatten(-1, (node.key_heads, -1))) for t in (query, key))
        each = node.value_heads // node.key_heads
        query = query.repeat_interleave(each, 2) * node.key_dim**-0.5
        key, value = key.repeat_interleave(each, 2), value.unflatten(-1, (node.value_heads, -1))
        kept = torch.exp(_fading(self.decay(x), self.decay_bias, self.decay_log) * present[..., None])
        step = self.beta(x).float().sigmoid() * present[..., None]  # 0 where no token is: nothing changes
        if state is None:
            state = value.new_zeros(len(x), node.value_heads, node.key_dim, node.value_dim)
        outputs = []
        for q, k, v, a, b in zip(*(t.unbind(1) for t in (query, key, value, kept, step)), strict=True):
            state = a[..., None, None] * state
            wrong = v - torch.einsum("rhkv,rhk->rhv", state, k)
            state = state + torch.einsum("rhk,rhv->rhkv", k, b[..., None] * wrong)
            outputs.append(torch.einsum("rhkv,rhk->rhv", state, q))
        heads = self.norm(torch.stack(outputs, 1).to(x.dtype)).float()
        return heads * self.activation(self.gate(x).float()).view_as(heads), state


@implements(spec.StateSpace)
class StateSpace(Recurrent):
    """S <- exp(-exp(decay_log) t) S + t v k^T; out = S q + skip v. Dao and Gu 2024 (Mamba-2), equation 1.

    The step is t = softplus(decay + decay_bias), one a head; key, value and query are the paper's
    B, X and C. Heads of a group share keys and queries. The result is gated, then normalised by group.
    """

    def __init__(self, node: spec.StateSpace, width: int):
        super().__init__()
        if node.heads % node.groups:
            raise ConfigError(f"{node.heads} heads cannot be put into {node.groups} groups evenly.")
        self.node, self.activation = node, activation(node.activation)
        values, shared = node.heads * node.head_dim, node.groups * node.state
        self.gate, self.value = Linear(width, values), Linear(width, values)
        self.key, self.query = Linear(width, shared), Linear(width, shared)
        self.decay = Linear(width, node.heads)
        self.convolution = Convolution(node.channels, node.convolution, node.convolution_bias)
        self.decay_bias = nn.Parameter(torch.empty(node.heads))
        self.decay_log = nn.Parameter(torch.empty(node.heads))
        self.skip = nn.Parameter(torch.empty(node.heads))
        self.norm = build(node.norm, node.groups, values // node.groups)
        self.output = Linear(values, width)

    def inputs(self, x: Tensor) -> Tensor:
        return torch.cat([self.value(x), self.key(x), self.query(x)], -1)

    def walk(self, x: Tensor, mixed: Tensor, present: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        node, shared = self.node, self.node.groups * self.node.state
        value, key, query = mixed.float().split([node.heads * node.head_dim, shared, shared], -1)
        value = value.unflatten(-1, (node.heads, -1))
        each = node.heads // node.groups
        key, query = (t.unflatten(-1, (node.groups, -1)).repeat_interleave(each, 2) for t in (key, query))
        step = F.softplus(self.decay(x).float() + self.decay_bias.float()) * present[..., None]
        kept = torch.exp(-self.decay_log.float().exp() * step)
        if state is None:
            state = value.new_zeros(len(x), node.heads, node.head_dim, node.state)
        outputs = []
        for v, k, q, t, a in zip(*(t.unbind(1) for t in (value, key, query, step, kept)), strict=True):
            state = a[..., None, None] * state + torch.einsum("rhd,rhs->rhds", t[..., None] * v, k)
            outputs.append(torch.einsum("rhds,rhs->rhd", state, q))
        heads = torch.stack(outputs, 1) + self.skip.float()[:, None] * value
        gated = heads.flatten(-2) * self.activation(self.gate(x).float())
        return self.norm(gated.unflatten(-1, (node.groups, -1))).view_as(heads), state


def unit(x: Float[Tensor, "*rows dim"], eps: float = 1e-6) -> Float[Tensor, "*rows dim"]:
    """x / sqrt(|x|^2 + eps)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _fading(decay: Tensor, bias: Tensor, log: Tensor) -> Tensor:
    """The logarithm of what is kept of a state: -exp(log) softplus(decay + bias), in fp32."""
    return -log.float().exp() * F.softplus(decay.float() + bias.float())
