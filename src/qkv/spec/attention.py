"""Attention as data: how queries, keys and values are made, scored, masked and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Literal

import numpy as np

from qkv.spec.masks import Causal, Everything, Mask
from qkv.spec.node import Node, Tensor, linear, node, part, vector
from qkv.spec.norms import LayerNorm, Norm, RMSNorm
from qkv.spec.positions import Position, Rotary


@node
class LogScale(Node):
    """Queries grow with their position: 1 + factor * ln(1 + floor((position + first) / floor)).

    Positions from 0, which counts as `first`: 1 in Llama 4's layers without positions, where so the
    first one to grow is floor - 1; 0 in Ministral 3.
    """

    floor: int
    factor: float
    first: int = 1


@node
class Score(Node):
    """Scaled dot product. `scale` None is 1 / sqrt(head_dim).

    `cap`: scores become cap * tanh(score / cap). `sink`: each head has a learned logit that takes
    part in the softmax and has no value (gpt-oss). `query_scale`: a factor by position.
    """

    scale: float | None = None
    cap: float | None = None
    sink: bool = False
    query_scale: LogScale | None = None


@node
class Dot(Score):
    """query . key, unscaled. Luong et al. 2015."""

    scale: float | None = 1.0


@node
class General(Node):
    """query . W key. Luong et al. 2015."""

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        query, key = sizes
        yield from linear("key", query, key)


@node
class Additive(Node):
    """v . tanh(W query + U key). Bahdanau et al. 2014."""

    hidden: int

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        query, key = sizes
        yield from linear("query", self.hidden, query)
        yield from linear("key", self.hidden, key)
        yield from linear("output", 1, self.hidden)


@node
class Concat(Node):
    """v . tanh(W [query; key]). Luong et al. 2015."""

    hidden: int

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        query, key = sizes
        yield from linear("hidden", self.hidden, query + key)
        yield from linear("output", 1, self.hidden)


@node
class Location(Node):
    """softmax(W query): where to look without looking at the keys. Luong et al. 2015."""

    keys: int

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        yield from linear("query", self.keys, sizes[0])


@node
class Projections(Node):
    """What stands between the stream and the heads.

    `bias` names those of q, k, v, o that carry one. `clip` bounds queries, keys and values to
    [-clip, clip]. `norm` is applied to queries and keys, before rotating them unless
    `norm_after_rotation`; `norm_over` says over what: each "head" with one scale for all heads,
    each of the "heads" with a scale of its own, or "all" heads at once. `gate` is the activation
    of a gate on the mixed heads, made from the same input. `values_are_keys`: the keys' projection,
    before their norm and rotation, gives the values too (Gemma 4). Each head's values are
    normalised by `value_norm`, then multiplied by `value_scale`.
    """

    bias: str = ""
    clip: float | None = None
    norm: Norm | None = None
    norm_over: Literal["head", "heads", "all"] = "head"
    norm_after_rotation: bool = False
    gate: str | None = None
    values_are_keys: bool = False
    value_norm: Norm | None = None
    value_scale: float = 1.0

    def norm_sizes(self, heads: int, head_dim: int) -> tuple[int, ...]:
        return {"head": (head_dim,), "heads": (heads, head_dim), "all": (heads * head_dim,)}[self.norm_over]


@node
class Attention(Node):
    """Self-attention. `kv_heads` fewer than `heads` share keys and values (1: MQA, between: GQA)."""

    heads: int
    kv_heads: int
    head_dim: int
    score: Score = Score()
    position: Position | None = None
    mask: Mask = Causal()
    projections: Projections = Projections()
    value_dim: int | None = None

    role = "attention"

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from _projected(self, width, width)
        yield from part("position", self.position, width, self.heads, self.head_dim)

    def cached(self) -> tuple[tuple[int, int], ...]:
        """What is kept of a token: the number of heads and the size of each, of keys and of values."""
        return (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim or self.head_dim)

    def cache_values(self, length: int, source: int) -> int:
        """Values one sequence keeps: keys and values of the positions a query can still need."""
        kept = self.mask.kept(length)
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * kept

    def mixing_flops(self, length: int, source: int) -> int:
        per_pair = 2 * self.heads * (self.head_dim + (self.value_dim or self.head_dim))
        return per_pair * self.mask.pairs(length)


@node
class CrossAttention(Node):
    """Queries from this stream, keys and values from another of width `source_width`; made once and kept."""

    heads: int
    kv_heads: int
    head_dim: int
    source_width: int
    score: Score = Score()
    projections: Projections = Projections()
    mask: Mask = Everything()
    value_dim: int | None = None

    role = "cross"
    position = None

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        yield from _projected(self, width, self.source_width)

    def cache_values(self, length: int, source: int) -> int:
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * source

    def mixing_flops(self, length: int, source: int) -> int:
        return 2 * self.heads * (self.head_dim + (self.value_dim or self.head_dim)) * length * source


def _projected(attention: Attention | CrossAttention, width: int, source: int) -> Iterator[Tensor]:
    """The four projections, the norms on queries and keys, the gate and the sink."""
    heads, kv_heads, head_dim = attention.heads, attention.kv_heads, attention.head_dim
    value_dim, through = attention.value_dim or head_dim, attention.projections
    yield from linear("query", heads * head_dim, width, "q" in through.bias)
    yield from linear("key", kv_heads * head_dim, source, "k" in through.bias)
    if not through.values_are_keys:
        yield from linear("value", kv_heads * value_dim, source, "v" in through.bias)
    yield from linear("output", width, heads * value_dim, "o" in through.bias)
    if through.gate:
        yield from linear("gate", heads * value_dim, width)
    yield from part("query_norm", through.norm, *through.norm_sizes(heads, head_dim))
    yield from part("key_norm", through.norm, *through.norm_sizes(kv_heads, head_dim))
    yield from part("value_norm", through.value_norm, value_dim)
    if getattr(attention.score, "sink", False):
        yield vector("sink", heads)


@node
class Indexer(Node):
    """Chooses the `top_k` visible keys that each query sees. DeepSeek-V3.2: the lightning indexer.

    sum over heads of w_h * relu(q_h . k): one key a token, of `head_dim` dimensions of which the
    first rotate, normalised and cached beside the latent; queries from the latent of the queries;
    the weights w from the stream. `pairs` is how it turns. `own=False`: no parameters and no keys,
    the choice is that of the last layer which made one (GLM-5.2).
    """

    heads: int
    head_dim: int
    top_k: int
    pairs: Literal["half", "interleaved"] = "half"
    norm: Norm = LayerNorm(1e-6)
    own: bool = True

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        width, rank = sizes
        if self.own:
            yield from linear("query", self.heads * self.head_dim, rank)
            yield from linear("key", self.head_dim, width)
            yield from part("key_norm", self.norm, self.head_dim)
            yield from linear("weights", self.heads, width)

    def chosen(self, mask: Mask, length: int) -> int:
        """Pairs of a query and a key that are left of those that `mask` shows."""
        if length <= self.top_k:
            return mask.pairs(length)
        run = mask.interval(np.arange(length))
        if run is None:  # at most
            return min(mask.pairs(length), self.top_k * length)
        first, last = np.maximum(run[0], 0), np.minimum(run[1], length - 1)
        return int(np.clip(last - first + 1, 0, self.top_k).sum())


@node
class LatentAttention(Node):
    """Keys and values from one small latent that is all the cache keeps. DeepSeek-V2, section 2.1 (MLA).

    Queries and keys are `head_dim` content dimensions and `rotary_dim` rotated ones; the rotated
    key is shared by all heads. `query_rank` None: queries are projected directly. With an `indexer`
    a query sees only what it chooses.
    """

    heads: int
    head_dim: int
    rotary_dim: int
    value_dim: int
    rank: int
    query_rank: int | None = None
    score: Score = Score()
    position: Rotary | None = None
    mask: Mask = Causal()
    norm: Norm = RMSNorm()
    bias: str = field(default="", kw_only=True)  # of "a" (the two down-projections) and "o"
    indexer: Indexer | None = field(default=None, kw_only=True)

    role = "attention"

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        queries = self.heads * (self.head_dim + self.rotary_dim)
        if self.query_rank is None:
            yield from linear("query", queries, width)
        else:
            yield from linear("query_down", self.query_rank, width, "a" in self.bias)
            yield from part("query_norm", self.norm, self.query_rank)
            yield from linear("query_up", queries, self.query_rank)
        yield from linear("latent", self.rank + self.rotary_dim, width, "a" in self.bias)
        yield from part("latent_norm", self.norm, self.rank)
        yield from linear("key_up", self.heads * self.head_dim, self.rank)
        yield from linear("value_up", self.heads * self.value_dim, self.rank)
        yield from linear("output", width, self.heads * self.value_dim, "o" in self.bias)
        yield from part("indexer", self.indexer, width, self.query_rank or width)

    def cached(self) -> tuple[tuple[int, int], ...]:
        """What is kept of a token: the latent, and the rotated key that all heads share."""
        return (1, self.rank), (1, self.rotary_dim)

    def cache_values(self, length: int, source: int) -> int:
        index = self.indexer.head_dim if self.indexer is not None and self.indexer.own else 0
        return (self.rank + self.rotary_dim + index) * length

    def mixing_flops(self, length: int, source: int) -> int:
        per_pair = 2 * self.heads * (self.head_dim + self.rotary_dim + self.value_dim)
        if self.indexer is None:
            return per_pair * self.mask.pairs(length)
        choosing = 2 * self.indexer.heads * (self.indexer.head_dim + 1) * self.indexer.own
        return per_pair * self.indexer.chosen(self.mask, length) + choosing * self.mask.pairs(length)


@node
class GatedDelta(Node):
    """Linear attention whose state forgets by a gate and corrects by the delta rule. Yang et al. 2024.

    The state is (value_heads, key_dim, value_dim) in fp32 whatever the length; a causal depthwise
    convolution of `convolution` steps runs over queries, keys and values first.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int = 4
    norm: Norm = RMSNorm()
    activation: str = "silu"

    role = "mixer"

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values side by side."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        values = self.value_heads * self.value_dim
        yield from linear("query", self.key_heads * self.key_dim, width)
        yield from linear("key", self.key_heads * self.key_dim, width)
        yield from linear("value", values, width)
        yield from linear("gate", values, width)
        yield from linear("beta", self.value_heads, width)
        yield from linear("decay", self.value_heads, width)
        yield vector("convolution.weight", self.channels, self.convolution)
        yield vector("decay_bias", self.value_heads)
        yield vector("decay_log", self.value_heads)
        yield from part("norm", self.norm, self.value_dim)
        yield from linear("output", width, values)

    def state_values(self) -> tuple[int, int]:
        """Values kept in fp32 (the state) and in the cache's own type (the convolution's last inputs)."""
        return (
            self.value_heads * self.key_dim * self.value_dim,
            self.channels * (self.convolution - 1),
        )

    def mixing_flops(self, length: int, source: int) -> int:
        # a token: read k, write the correction, read q (2 each), and the convolution
        state = 6 * self.value_heads * self.key_dim * self.value_dim
        return length * (state + 2 * self.channels * self.convolution)


@node
class StateSpace(Node):
    """A state that fades by a learned step and takes in one outer product a token. Dao and Gu 2024 (Mamba-2).

    `groups` of heads share the state's input (key) and output (query) of `state` dimensions; a
    causal depthwise convolution runs over values, keys and queries first. The gate multiplies
    before the norm, whose statistics are over a group's values. The state is (heads, head_dim,
    state) in fp32 whatever the length.
    """

    heads: int
    head_dim: int
    state: int
    groups: int = 1
    convolution: int = 4
    convolution_bias: bool = True
    norm: Norm = RMSNorm()
    activation: str = "silu"

    role = "mixer"

    @property
    def channels(self) -> int:
        """Of the convolution: values, keys and queries side by side."""
        return self.heads * self.head_dim + 2 * self.groups * self.state

    def tensors(self, *sizes: int) -> Iterator[Tensor]:
        (width,) = sizes
        values = self.heads * self.head_dim
        yield from linear("gate", values, width)
        yield from linear("value", values, width)
        yield from linear("key", self.groups * self.state, width)
        yield from linear("query", self.groups * self.state, width)
        yield from linear("decay", self.heads, width)
        yield vector("convolution.weight", self.channels, self.convolution)
        if self.convolution_bias:
            yield vector("convolution.bias", self.channels)
        yield vector("decay_bias", self.heads)
        yield vector("decay_log", self.heads)
        yield vector("skip", self.heads)
        yield from part("norm", self.norm, self.groups, values // self.groups)
        yield from linear("output", width, values)

    def state_values(self) -> tuple[int, int]:
        """Values kept in fp32 (the state) and in the cache's own type (the convolution's last inputs)."""
        return self.heads * self.head_dim * self.state, self.channels * (self.convolution - 1)

    def mixing_flops(self, length: int, source: int) -> int:
        # a token: write key x value, read with the query (2 each), and the convolution
        state = 4 * self.heads * self.head_dim * self.state
        return length * (state + 2 * self.channels * self.convolution)
