"""Attention over all of a sentence or a part of it. Luong, Pham and Manning 2015, arXiv 1508.04025.

Section 3.1 is global attention with four scores, 3.2 local attention, 3.3 input feeding, 4.1 the
training. Unlike Bahdanau's, a query is the decoder's *current* top state, after it has read the word
before the one to be said, and what was mixed changes the word alone, unless it is fed on.

    h_t      = LSTM([E y_{t-1}; h~_{t-1}])             stacked; h~ where inputs are fed      Luong.advance
    a_t(s)   = softmax_s(score(h_t, h_s)) * gauss_t(s)    over the places in view            Global, Local...
    c_t      = sum_s a_t(s) h_s
    h~_t     = tanh(W_c [c_t; h_t])
    p(y_t)   = softmax(W_s h~_t)

The score is a part of the description (`spec.Dot`, `General`, `Concat`, `Location`); where it looks is a
slot. The paper gives its source reversed, which is how data are prepared: `backwards`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qkv import spec
from qkv.nn import scores  # noqa: F401  (they register what they implement)
from qkv.nn.backends import normalise
from qkv.nn.build import build
from qkv.nn.linear import Linear


@dataclass(frozen=True)
class Sizes:
    """Section 4.1, and what is varied in section 5.

    `window` is D and `deviation` sigma, of local attention; None is D / 2. `dropout` is 0.2 in the
    systems that have it.
    """

    source_vocab: int = 50_000
    target_vocab: int = 50_000
    hidden: int = 1000
    embedding: int = 1000
    layers: int = 4
    score: spec.Node = spec.General()
    feeding: bool = True
    window: int = 10
    deviation: float | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class Training:
    """Section 4.1: plain SGD on batches of 128, gradients cut to a norm of 5, a rate that halves late.

    The objective is `translation.negative_log_likelihood`: summed over a sentence, not averaged.
    """

    batch: int = 128
    clip: float = 5.0
    first_rate: float = 1.0
    epochs: int = 10
    steady: int = 5

    def rate(self, epoch: int) -> float:
        """Of an epoch, counted from 1: halved with each one after the `steady` first."""
        return float(self.first_rate * 0.5 ** max(0, epoch - self.steady))

    def optimiser(self, parameters: Iterable[nn.Parameter], epoch: int = 1) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=self.rate(epoch))

    def clipped(self, parameters: Iterable[nn.Parameter]) -> Float[Tensor, ""]:
        """Scales the gradients down where their norm is above `clip`; gives the norm that they had."""
        return nn.utils.clip_grad_norm_(parameters, self.clip)


WITH_DROPOUT = Training(epochs=12, steady=8)


def places(present: Bool[Tensor, "batch source"]) -> Int[Tensor, "batch source"]:
    """Where the words of each row stand, in order; behind them, where none do."""
    return (~present).long().argsort(dim=1, stable=True)


def backwards(
    source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]
) -> Int[Tensor, "batch source"]:
    """Each row's words from last to first; padding stays. Sutskever et al. 2014, section 3.3."""
    order, length = places(present), present.sum(1, keepdim=True)
    number = torch.arange(source.shape[1], device=source.device)
    mirrored = torch.where(number < length, length - 1 - number, number)
    return source.scatter(1, order, source.gather(1, order.gather(1, mirrored)))


class View(NamedTuple):
    """The places that a decoder state may look at, and what their weights are multiplied by."""

    visible: Bool[Tensor, "batch target_or_1 source"]
    factor: Float[Tensor, "*target_and_source"]


class Looking(Protocol):
    """Where attention looks: a slot. Built from the sizes."""

    def __call__(
        self,
        states: Float[Tensor, "batch target hidden"],
        steps: Int[Tensor, "batch target"],
        present: Bool[Tensor, "batch source"],
    ) -> View:
        """For decoder states at these steps, counted from 0; words fill the left of a source."""
        ...


class Global(nn.Module):
    """Every word of the source. Section 3.1."""

    def __init__(self, sizes: Sizes):
        super().__init__()

    def forward(self, states: Tensor, steps: Tensor, present: Tensor) -> View:
        return View(present[:, None], states.new_ones(()))


class LocalMonotonic(nn.Module):
    """local-m: the words at most D from place t, with nothing to favour the middle. Section 3.2.

    t counts along the source as it is given; past its end by more than D there is nothing to see, and
    the mixture is zero. A reversed source would be looked at from the wrong end.
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.reach = sizes.window

    def forward(self, states: Tensor, steps: Tensor, present: Tensor) -> View:
        return View(present[:, None] & (away(steps, present).abs() <= self.reach), states.new_ones(()))


class LocalPredictive(nn.Module):
    """local-p: around p = S sigmoid(v . tanh(W h)), weights times exp(-(s - p)^2 / 2 sigma^2). Section 3.2.

    Equations 9 and 10. p is not rounded. What is in the window is yes or no, so that W and v learn
    through the factor alone, which comes after the softmax: weights then sum to less than 1.
    """

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.reach = sizes.window
        self.deviation = sizes.window / 2 if sizes.deviation is None else sizes.deviation
        self.hidden, self.output = Linear(sizes.hidden, sizes.hidden), Linear(sizes.hidden, 1)

    def centre(
        self, states: Float[Tensor, "batch target hidden"], present: Bool[Tensor, "batch source"]
    ) -> Float[Tensor, "batch target"]:
        """p_t: a real place from 0 to the number of words."""
        share = torch.sigmoid(self.output(torch.tanh(self.hidden(states)))[..., 0])
        return present.sum(1, keepdim=True) * share

    def forward(self, states: Tensor, steps: Tensor, present: Tensor) -> View:
        distance = away(self.centre(states, present), present)
        factor = torch.exp(-distance.square() / (2 * self.deviation**2))
        return View(present[:, None] & (distance.abs() <= self.reach), factor)


def away(
    centre: Int[Tensor, "batch target"] | Float[Tensor, "batch target"], present: Bool[Tensor, "batch source"]
) -> Tensor:
    """s - p of every place and every centre: (batch, target, source)."""
    return torch.arange(present.shape[1], device=present.device) - centre[..., None]


class State(NamedTuple):
    """The LSTM's two, h~ to be fed (or nothing), how many words were read, and what is kept of the source."""

    hidden: Float[Tensor, "batch layers hidden"]
    cell: Float[Tensor, "batch layers hidden"]
    fed: Float[Tensor, "batch hidden"] | tuple[()]
    step: Int[Tensor, " batch"]
    memory: tuple[Tensor, Tensor, Tensor]


class Luong(nn.Module):
    """Encoder, attention and decoder: a `translation.Translator`."""

    def __init__(self, sizes: Sizes = Sizes(), looking: Callable[[Sizes], Looking] = LocalPredictive):
        super().__init__()
        self.sizes, hidden = sizes, sizes.hidden
        self.source_embedding = nn.Embedding(sizes.source_vocab, sizes.embedding)
        self.target_embedding = nn.Embedding(sizes.target_vocab, sizes.embedding)
        self.encoder = lstm(sizes, sizes.embedding)
        self.decoder = lstm(sizes, sizes.embedding + sizes.feeding * hidden)
        self.score: Any = build(sizes.score, hidden, hidden)
        self.looking: Any = looking(sizes)
        self.combine = Linear(2 * hidden, hidden)  # W_c
        self.output = Linear(hidden, sizes.target_vocab)  # W_s
        self.reset_parameters()

    def dropped(self, x: Tensor) -> Tensor:
        """Up through the layers and out, never from step to step. Zaremba et al. 2014, section 3.1."""
        return F.dropout(x, self.sizes.dropout, self.training)

    def begin(self, source: Int[Tensor, "batch source"], present: Bool[Tensor, "batch source"]) -> State:
        """The decoder begins with the encoder's last states, layer by layer."""
        length = present.sum(1)
        order = places(present)[:, : max(1, int(length.max()))]
        source, present = source.gather(1, order), present.gather(1, order)
        words = self.dropped(self.source_embedding(source.masked_fill(~present, 0)))
        packed = pack_padded_sequence(
            words, length.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        packed, (hidden, cell) = self.encoder(packed)
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=source.shape[1])
        states = self.dropped(states)
        fed = hidden.new_zeros(hidden.shape[1:]) if self.sizes.feeding else ()
        memory = states, self.score.prepared(states), present
        return State(hidden.transpose(0, 1), cell.transpose(0, 1), fed, torch.zeros_like(length), memory)

    def next(self, state: State, tokens: Int[Tensor, " batch"]) -> tuple[Float[Tensor, "batch vocab"], State]:
        attentional, _, state = self.advance(self.target_embedding(tokens)[:, None], state)
        return self.output(attentional[:, 0]), state

    def forward(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target vocab"]:
        return self.output(self.walk(source, present, target)[0])

    def alignment(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> Float[Tensor, "batch target source"]:
        weights = self.walk(source, present, target)[1]
        order = places(present)[:, None, : weights.shape[-1]].expand_as(weights)
        return weights.new_zeros(*target.shape, source.shape[1]).scatter(2, order, weights)

    def walk(
        self,
        source: Int[Tensor, "batch source"],
        present: Bool[Tensor, "batch source"],
        target: Int[Tensor, "batch target"],
    ) -> tuple[Float[Tensor, "batch target hidden"], Float[Tensor, "batch target words"]]:
        """h~_t and the weights for each target word. What is fed makes steps wait for each other."""
        words, state = self.target_embedding(target), self.begin(source, present)
        found = []
        for part in words.split(1, 1) if self.sizes.feeding else (words,):
            attentional, weights, state = self.advance(part, state)
            found.append((attentional, weights))
        attentionals, all_weights = zip(*found, strict=True)
        return torch.cat(attentionals, 1), torch.cat(all_weights, 1)

    def advance(
        self, words: Float[Tensor, "batch target embedding"], state: State
    ) -> tuple[Float[Tensor, "batch target hidden"], Float[Tensor, "batch target words"], State]:
        """Reads words, one at a time where inputs are fed: h~_t, the weights, and the state behind them."""
        values, prepared, present = state.memory
        inputs = self.dropped(words)
        if isinstance(state.fed, Tensor):
            inputs = torch.cat([inputs, state.fed[:, None]], -1)
        before = state.hidden.transpose(0, 1).contiguous(), state.cell.transpose(0, 1).contiguous()
        queries, (hidden, cell) = self.decoder(inputs, before)
        queries = self.dropped(queries)
        steps = state.step[:, None] + torch.arange(words.shape[1], device=words.device)
        visible, factor = self.looking(queries, steps, present)
        fit = self.score(queries, prepared).masked_fill(~visible, float("-inf"))
        weights = normalise(fit) * factor
        attentional = torch.tanh(self.combine(torch.cat([weights @ values, queries], -1)))
        fed = attentional[:, -1] if self.sizes.feeding else ()
        after = (hidden.transpose(0, 1), cell.transpose(0, 1), fed, steps[:, -1] + 1, state.memory)
        return attentional, weights, State(*after)

    def reset_parameters(self) -> None:
        """Section 4.1: everything uniform in [-0.1, 0.1]."""
        for parameter in self.parameters():
            width = 0.1 if parameter.requires_grad else 0.0
            nn.init.uniform_(parameter, -width, width)


def lstm(sizes: Sizes, width: int) -> nn.LSTM:
    """A stack with one bias a gate, as in Zaremba et al. 2015: the second of torch's two is held at 0."""
    between = sizes.dropout if sizes.layers > 1 else 0.0  # of one layer torch warns that there is none
    layers = nn.LSTM(width, sizes.hidden, sizes.layers, batch_first=True, dropout=between)
    for name, parameter in layers.named_parameters():
        parameter.requires_grad_(not name.startswith("bias_hh"))
    return layers
