"""A choice of experts for each token, and the losses that keep the choice even."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from qkv import spec
from qkv.errors import ConfigError, UnsupportedError
from qkv.nn.build import build_if, implements
from qkv.nn.feed_forward import activation, gated
from qkv.nn.layout import Layout
from qkv.nn.linear import Linear
from qkv.nn.taps import NoTap, Tap


class Routing(NamedTuple):
    """Which tokens go to which experts. Tokens that are not there go to none."""

    scores: Float[Tensor, "batch length experts"]
    chosen: Bool[Tensor, "batch length experts"]
    weights: Float[Tensor, "batch length experts"]  # 0 where not chosen


@implements(spec.Experts)
class Experts(nn.Module):
    """sum over the chosen of weight_i * expert_i(x), plus what the shared expert gives.

    Shazeer et al. 2017, section 2; shared experts: Dai et al. 2024 (DeepSeekMoE). Nothing is dropped
    unless a capacity is described. Taps: router, the logits (batch, length, experts) in fp32, where
    -inf shuts an expert out; output.
    """

    def __init__(self, node: spec.Experts, width: int):
        super().__init__()
        _refuse(node)
        self.scales_input = node.router.scales == "input"
        self.router = Router(node, width)
        self.norm = build_if(node.norm, width)
        self.latent_down = None if node.latent is None else Linear(width, node.latent)
        self.latent_up = None if node.latent is None else Linear(node.latent, width)
        self.expert = Stacked(node.expert, node.count, node.latent or width)
        self.shared_expert = build_if(node.shared_expert, width)
        self.shared_gate = Linear(width, 1) if node.shared_gate else None

    def forward(
        self, x: Float[Tensor, "batch length width"], layout: Layout, tap: Tap = NoTap()
    ) -> Float[Tensor, "batch length width"]:
        routing = self.router(tap("router", self.router.logits(x)), layout)
        inputs = x if self.norm is None else self.norm(x)
        if self.latent_down is not None:
            inputs = self.latent_down(inputs).to(x.dtype)
        total = self.routed(inputs.flatten(0, 1), routing).view(inputs.shape)
        if self.latent_up is not None:
            total = self.latent_up(total).to(x.dtype)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_gate is not None:
                shared = F.sigmoid(self.shared_gate(x)) * shared
            total = total + shared
        return tap("output", total)

    def routed(self, x: Float[Tensor, "tokens width"], routing: Routing) -> Float[Tensor, "tokens width"]:
        """Each expert once, with its tokens, in the order of the experts. Added in fp32 at least."""
        chosen, weights = routing.chosen.flatten(0, 1), routing.weights.flatten(0, 1)
        wide = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros_like(x, dtype=wide)
        for expert in chosen.any(0).nonzero().flatten().tolist():
            rows = chosen[:, expert].nonzero().flatten()
            inputs, weight = x[rows], weights[rows, expert, None]
            if self.scales_input:
                outputs = self.expert((inputs * weight).to(x.dtype), expert).to(wide)
            else:
                outputs = self.expert(inputs, expert) * weight
            total.index_add_(0, rows, outputs)
        return total.to(x.dtype)


class Stacked(nn.Module):
    """`count` feed-forwards of one shape: each parameter has the expert as its first axis."""

    def __init__(self, node: spec.Dense | spec.Gated, count: int, width: int):
        super().__init__()
        activation(node.activation)  # refused now, if it is not known
        self.activation = node.activation
        gates = isinstance(node, spec.Gated)
        self.gate = StackedLinear(count, width, node.hidden, node.bias) if gates else None
        self.up = StackedLinear(count, width, node.hidden, node.bias)
        self.down = StackedLinear(count, node.hidden, width, node.bias)

    def forward(self, x: Float[Tensor, "tokens width"], expert: int) -> Float[Tensor, "tokens width"]:
        up = self.up(x, expert)
        if self.gate is None:
            return self.down(activation(self.activation)(up), expert)
        return self.down(gated(self.activation, self.gate(x, expert), up), expert)


class StackedLinear(nn.Module):
    """One affine map an expert: weight (count, out, into), bias (count, out)."""

    def __init__(self, count: int, into: int, out: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, out, into))
        self.bias = nn.Parameter(torch.empty(count, out)) if bias else None

    def forward(self, x: Float[Tensor, "tokens into"], expert: int) -> Float[Tensor, "tokens out"]:
        bias = None if self.bias is None else self.bias[expert]
        return F.linear(x.to(self.weight.dtype), self.weight[expert], bias)


class Router(nn.Module):
    """From logits to a choice and its weights, in fp32: at lower precision near ties change sides.

    Fedus et al. 2021, section 2.2 (fp32); groups: DeepSeek-V2, section 2.2; a bias that takes part in
    choosing alone: DeepSeek-V3, section 2.1.2; experts that choose: Zhou et al. 2022, section 3.2.
    """

    def __init__(self, node: spec.Experts, width: int):
        super().__init__()
        self.node, self.top_k = node.router, node.top_k
        self.weight = nn.Parameter(torch.empty(node.count, width))
        self.bias = nn.Parameter(torch.empty(node.count)) if node.router.bias else None
        self.balance = nn.Parameter(torch.empty(node.count)) if node.router.balance else None
        self.gain = nn.Parameter(torch.empty(node.count)) if node.router.gain else None
        self.norm = build_if(node.router.norm, width)

    def logits(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length experts"]:
        bias = None if self.bias is None else self.bias.float()
        read = x if self.norm is None else self.norm(x)
        return self.node.logit_scale * F.linear(read.float(), self.weight.float(), bias)

    def forward(self, logits: Float[Tensor, "batch length experts"], layout: Layout) -> Routing:
        node = self.node
        scores = logits.softmax(-1) if node.score == "softmax" else logits.sigmoid()
        by_experts = node.chosen_by == "experts"
        chosen = self.by_experts(scores, layout) if by_experts else self.by_tokens(logits, scores)
        chosen = chosen & (layout.positions >= 0)[..., None]
        if node.capacity is not None:
            chosen = self.within_capacity(chosen, layout)
        weights = torch.where(chosen, scores, 0.0)
        if node.normalise:
            # the bound: sigmoids may all vanish, and a token may have no expert
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if self.gain is not None:
            weights = weights * self.gain.float()
        return Routing(scores, chosen, node.scale * weights)

    def by_tokens(self, logits: Tensor, scores: Tensor) -> Bool[Tensor, "batch length experts"]:
        """Each token's `top_k` best experts, among those of the best groups where there are groups."""
        if self.balance is None and self.node.groups == 1:
            return best(logits, self.top_k)  # in the order of the scores, which round to ties more often
        ranking = scores if self.balance is None else scores + self.balance.float()
        if self.node.groups > 1:
            # -inf, not 0: a score with its bias may be negative
            ranking = ranking.masked_fill(~self.eligible(ranking), float("-inf"))
        return best(ranking, self.top_k)

    def eligible(self, ranking: Tensor) -> Bool[Tensor, "batch length experts"]:
        """The experts of each token's best groups."""
        grouped = ranking.unflatten(-1, (self.node.groups, -1))
        merit = grouped.topk(self.node.group_best, -1).values.sum(-1)
        return best(merit, self.node.top_groups).repeat_interleave(grouped.shape[-1], -1)

    def by_experts(self, scores: Tensor, layout: Layout) -> Bool[Tensor, "batch length experts"]:
        """Each expert's best length * top_k / count tokens of a sequence, rounded up."""
        ranking = scores if self.balance is None else scores + self.balance.float()
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        for row, places in _sequences(layout):
            share = min(self.share(len(places), self.top_k), len(places))
            chosen[row, places] = best(ranking[row, places].T, share).T
        return chosen

    def within_capacity(self, chosen: Tensor, layout: Layout) -> Bool[Tensor, "batch length experts"]:
        """Without the tokens that come to an expert when it is full."""
        kept = torch.zeros_like(chosen)
        for row, places in _sequences(layout):
            wanted = chosen[row, places]
            room = self.share(len(places), (self.node.capacity or 0.0) * self.top_k)
            kept[row, places] = wanted & (wanted.cumsum(0) <= room)
        return kept

    def share(self, length: int, times: float) -> int:
        return math.ceil(times * length / len(self.weight))


def best(ranking: Float[Tensor, "*rows items"], count: int) -> Bool[Tensor, "*rows items"]:
    """The `count` highest of each row; of equals those that stand first, whatever else is in the batch."""
    order = ranking.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(ranking, dtype=torch.bool).scatter(-1, order, True)


def _sequences(layout: Layout) -> Iterator[tuple[int, Int[Tensor, " tokens"]]]:
    """Each sequence's row and the places of its tokens. Raises UnsupportedError for parts of sequences."""
    present = layout.positions >= 0
    if layout.documents is None and bool((layout.lengths[:, 0] != present.sum(-1)).any()):
        raise UnsupportedError(
            "Experts that choose their tokens, or have a capacity, need the whole sequence in one call: "
            "run without a cache."
        )
    documents = torch.zeros_like(layout.positions) if layout.documents is None else layout.documents
    for row, there in enumerate(present):
        for document in documents[row, there].unique().tolist():
            yield row, (there & (documents[row] == document)).nonzero().flatten()


def _refuse(node: spec.Experts) -> None:
    """Choices that cannot be made."""
    router = node.router
    if node.count % router.groups or not 0 < router.top_groups <= router.groups:
        raise ConfigError(
            f"{node.count} experts cannot be in {router.groups} equal groups, "
            f"of which {router.top_groups} serve."
        )
    size = node.count // router.groups
    if router.groups > 1 and not 0 < router.group_best <= size:
        raise ConfigError(f"A group of {size} experts cannot be ranked by its best {router.group_best}.")
    if not 0 < node.top_k <= size * router.top_groups:
        raise ConfigError(f"A token cannot use {node.top_k} of {size * router.top_groups} experts.")
    if node.shared_gate and node.shared_expert is None:
        raise ConfigError("shared_gate has nothing to open: there is no shared expert.")
    if router.chosen_by == "experts" and (router.groups > 1 or router.capacity is not None):
        raise ConfigError("Experts that choose their tokens have neither groups nor a capacity.")


def load_balancing(
    scores: Float[Tensor, "batch length experts"],
    chosen: Bool[Tensor, "batch length experts"],
    layout: Layout,
) -> Float[Tensor, ""]:
    """count * sum over experts of (share of tokens that chose it) * (mean score). Fedus et al. 2021, (4).

    Over the tokens that are there. Even routing gives the number of experts a token uses (1 in
    Switch), everything to the same experts gives their count. The shares have no gradient; the scores do.
    """
    present = layout.positions >= 0
    tokens = present.sum().clamp(min=1)
    share = (chosen & present[..., None]).sum((0, 1)) / tokens
    mean = (scores * present[..., None]).sum((0, 1)) / tokens
    return scores.shape[-1] * (share * mean).sum()


def sequence_balance(
    scores: Float[Tensor, "batch length experts"],
    chosen: Bool[Tensor, "batch length experts"],
    layout: Layout,
) -> Float[Tensor, ""]:
    """The same within each sequence, then their mean. DeepSeek-V3, equations 17 to 20.

    Scores are first made to sum to 1, and shares are those of all choices, so that even routing
    gives 1 however many experts a token uses; everything to the same k of them gives count / k.
    """
    losses = []
    scores = scores / scores.sum(-1, keepdim=True)
    for row, places in _sequences(layout):
        counts = chosen[row, places].sum(0)
        share = counts / counts.sum().clamp(min=1)
        losses.append(scores.shape[-1] * (share * scores[row, places].mean(0)).sum())
    return torch.stack(losses).mean() if losses else scores.sum() * 0


def router_z(logits: Float[Tensor, "batch length experts"], layout: Layout) -> Float[Tensor, ""]:
    """Mean of logsumexp(logits)^2 over the tokens that are there. Zoph et al. 2022 (ST-MoE), (5)."""
    present = layout.positions >= 0
    squares = logits.float().logsumexp(-1).square()
    return torch.where(present, squares, 0.0).sum() / present.sum().clamp(min=1)


def importance(weights: Float[Tensor, "batch length experts"], layout: Layout) -> Float[Tensor, ""]:
    """Squared coefficient of variation of the experts' summed weights. Shazeer et al. 2017, (6) and (7).

    Even routing gives 0, everything to one expert count - 1.
    """
    total = torch.where((layout.positions >= 0)[..., None], weights, 0.0).sum((0, 1))
    mean = total.mean()
    return (total - mean).square().mean() / mean.square().clamp(min=1e-20)


@torch.no_grad()
def rebalanced(
    balance: Float[Tensor, " experts"],
    chosen: Bool[Tensor, "batch length experts"],
    layout: Layout,
    rate: float = 1e-3,
) -> Float[Tensor, " experts"]:
    """The choosing bias after a batch: `rate` less for an overloaded expert, more for an underloaded one.

    Without a loss and without a gradient. DeepSeek-V3, section 2.1.2.
    """
    load = (chosen & (layout.positions >= 0)[..., None]).sum((0, 1)).float()
    return balance + rate * torch.sign(load.mean() - load)
